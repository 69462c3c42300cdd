package store

import (
	"log/slog"
	"testing"

	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// An election that is due while the first entries are applied, some of which are compacted already, ends the etcd of
// several servers and not the only one, which becomes the leader.
func TestElectionWhileFirstEntriesAreApplied(t *testing.T) {
	const member, entries, election = 1, 108, 5
	for _, single := range []bool{true, false} {
		failures := etcdFailures{dir: t.TempDir(), ch: make(chan error, 1), single: single}
		config := etcdConfig(failures.dir, "", Options{Log: slog.New(slog.DiscardHandler)}, failures)
		if err := config.ZapLoggerBuilder(config); err != nil {
			t.Fatal(err)
		}
		elected := make(chan raft.StateType, 1)
		go func() {
			defer close(elected)
			s := raft.NewMemoryStorage()
			if err := s.ApplySnapshot(&pb.Snapshot{Metadata: &pb.SnapshotMetadata{
				Index: proto.Uint64(1), Term: proto.Uint64(1), ConfState: &pb.ConfState{Voters: []uint64{member}},
			}}); err != nil {
				t.Error(err)
			}
			var log []*pb.Entry
			for i := range uint64(entries) {
				log = append(log, &pb.Entry{Index: proto.Uint64(i + 2), Term: proto.Uint64(1)})
			}
			if err := s.Append(log); err != nil {
				t.Error(err)
			}
			s.SetHardState(&pb.HardState{Term: proto.Uint64(1), Commit: proto.Uint64(entries + 1)})
			n, err := raft.NewRawNode(&raft.Config{
				ID: member, ElectionTick: election, HeartbeatTick: 1, Storage: s, MaxSizePerMsg: 1 << 20, MaxInflightMsgs: 1,
				PreVote: true, Logger: etcdserver.NewRaftLoggerZap(config.GetLogger()),
			})
			if err != nil {
				t.Error(err)
				return
			}
			first := n.Ready()
			if got := len(first.CommittedEntries); got != entries {
				t.Errorf("%d entries to apply, want %d", got, entries)
			}
			if err := s.Compact(8); err != nil {
				t.Error(err)
			}
			for range 2 * election {
				n.Tick()
			}
			n.Advance(first)
			for n.HasReady() {
				r := n.Ready()
				if err := s.Append(r.Entries); err != nil {
					t.Error(err)
				}
				n.Advance(r)
			}
			elected <- n.BasicStatus().RaftState
		}()
		state, ok := <-elected
		if ok != single || single && state != raft.StateLeader {
			t.Errorf("the only server %v: it has gone on: %v, as %v", single, ok, state)
		}
		select {
		case err := <-failures.ch:
			if single {
				t.Error(err)
			}
		default:
			if !single {
				t.Error("no failure is reported")
			}
		}
	}
}
