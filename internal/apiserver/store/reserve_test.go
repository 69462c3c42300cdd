package store

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/etcdserver"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// The room in the store's file follows writes that are faster than the period of
// reservations: another program may take the rest of the disk at any time.
func TestReserveFollowsFastWrites(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	failures := etcdFailures{dir: dir, ch: make(chan error, 1)}
	socket := filepath.Join(t.TempDir(), "s")
	e, err := failures.start(etcdConfig(dir, socket, Options{Quota: DefaultQuota, Log: slog.New(slog.DiscardHandler)}, failures))
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	<-e.Server.ReadyNotify()
	keep := newSpace(func() *etcdserver.EtcdServer { return e.Server }, dir, DefaultPrefix, DefaultQuota, slog.New(slog.DiscardHandler))
	keep.begin()
	d := keep.disk
	d.look()
	for i := range 3 * (storeSlack >> 20) / 2 {
		r := &etcdserverpb.PutRequest{Key: fmt.Append(nil, "/k", i), Value: make([]byte, 1<<20)}
		if _, err := e.Server.Put(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		e.Server.Backend().ForceCommit()
		d.reserved = d.reserved.Add(reservePeriod) // no time goes by
		d.look()
		allocated, err := fileio.Allocated(d.store())
		if err != nil {
			t.Fatal(err)
		}
		if room := allocated - e.Server.Backend().SizeInUse(); room < storeSlack/2 {
			t.Fatalf("after %d MiB of writes the store's file has %d bytes of room; want %d at least", i+1, room, storeSlack/2)
		}
	}
}
