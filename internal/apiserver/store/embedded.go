package store

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// handOverKey is the key, beside the keys of the API, that a leader writes before it hands over, and
	// handOverNotice the time that it gives others to hold their requests back.
	handOverKey    = "/fairlead/hand-over"
	handOverNotice = 200 * time.Millisecond
	// handOverHold bounds the time in which they do, and handOverLook is that between two looks at who leads.
	handOverHold = time.Second
	handOverLook = 5 * time.Millisecond
	// handOverTimeout bounds the change of the leader, which takes an election.
	handOverTimeout = 3 * time.Second
)

// embedded is the etcd of this process. It can be restarted under its clients: new connections, by dial, wait
// for the next one, requests that it has are answered first, and watches go on with the next one.
type embedded struct {
	dir, socket string
	opts        Options
	peering     *Peering // nil for the only server
	space       *Space
	failed      chan error // the fatal error; of capacity 1

	running atomic.Pointer[etcdserver.EtcdServer]

	slow tooSlow

	dials    gate // closed while no etcd can be reached
	requests gate // closed while the leadership is handed over

	mu    sync.Mutex             // held during a restart; guards what follows
	quiet func() <-chan struct{} // ends what else works on the etcd, closed when it has ended
	end   func()                 // ends the etcd; nil if there is none
}

// server is the etcd of the last start.
func (m *embedded) server() *etcdserver.EtcdServer { return m.running.Load() }

// dial makes a connection of a client.
func (m *embedded) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if err := m.dials.pass(ctx); err != nil {
		return nil, err
	}
	return (&net.Dialer{}).DialContext(ctx, "unix", m.socket)
}

// gate has others wait while it is closed. One goroutine closes it at a time.
type gate struct {
	mu     sync.Mutex
	closed chan struct{} // nil while it is open
}

// close closes the gate until open is called.
func (g *gate) close() (open func()) {
	closed := make(chan struct{})
	g.mu.Lock()
	g.closed = closed
	g.mu.Unlock()
	return func() {
		g.mu.Lock()
		g.closed = nil
		g.mu.Unlock()
		close(closed)
	}
}

// pass waits until the gate is open or ctx ends.
func (g *gate) pass(ctx context.Context) error {
	g.mu.Lock()
	closed := g.closed
	g.mu.Unlock()
	if closed == nil {
		return nil
	}
	select {
	case <-closed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// start starts the etcd and waits until it is ready.
func (m *embedded) start(ctx context.Context) error {
	failures := etcdFailures{dir: m.dir, ch: make(chan error, 1), single: m.peering == nil}
	streams, endStreams := context.WithCancel(context.WithoutCancel(ctx))
	config := etcdConfig(m.dir, m.socket, m.opts, failures)
	var e *embed.Etcd
	var err error
	if m.peering != nil {
		config.GRPCAdditionalServerOptions = []grpc.ServerOption{
			grpc.ChainStreamInterceptor(endWith(streams)), grpc.ChainUnaryInterceptor(m.answer),
		}
		// A server with only gRPC answers its requests before it ends; one that shares its listener breaks connections.
		config.ListenClientHttpUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(filepath.Dir(m.socket), "http.sock")}}
		err = m.peering.configure(config)
	}
	if err == nil {
		e, err = failures.start(config)
	}
	if err != nil {
		endStreams()
		return err
	}
	m.end = func() { endStreams(); failures.stop(e) }
	if m.peering != nil {
		err = m.peering.await(ctx, e, failures)
	} else {
		err = failures.await(ctx, e, m.opts.Log)
	}
	if err == nil {
		m.running.Store(e.Server)
		m.space.begin()
		m.space.disk.look()
		// A store that is full must have room before the first write.
		if err = m.space.step(ctx); err != nil {
			err = fmt.Errorf("cannot make room in the embedded etcd in %s: %w", m.dir, err)
		}
	}
	if err != nil {
		m.end()
		m.end = nil
		return err
	}
	m.keep(ctx, e, failures)
	return nil
}

// keep does the upkeep of an etcd and reports its failure, until quiet is called.
func (m *embedded) keep(ctx context.Context, e *embed.Etcd, failures etcdFailures) {
	loop, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var work sync.WaitGroup
	work.Go(func() { m.space.run(loop) })
	work.Go(func() {
		select {
		case err := <-e.Err():
			m.fail(failures.explain(err))
		case err := <-failures.ch:
			failures.report(err) // for stop
			m.fail(failures.explain(err))
		case <-e.Server.StopNotify():
			if m.peering != nil && loop.Err() == nil { // not by stop
				m.fail(m.peering.ended(failures))
			}
		case <-loop.Done():
		}
	})
	if m.peering != nil {
		work.Go(func() { m.awaitHandOvers(loop, e.Server) })
		work.Go(func() { m.yield(loop, e.Server) })
	}
	m.quiet = func() <-chan struct{} {
		cancel()
		done := make(chan struct{})
		go func() { work.Wait(); close(done) }()
		return done
	}
}

func (m *embedded) fail(err error) {
	select {
	case m.failed <- err:
	default: // what came first is the cause
	}
}

// stop ends the etcd for good.
func (m *embedded) stop() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.end == nil {
		return
	}
	select {
	case <-m.quiet():
	case <-time.After(etcdStopTimeout): // the upkeep may wait for an etcd that has failed
	}
	m.end()
	m.end = nil
}

// restart starts the etcd of one of several servers again, which then trusts the authorities of this moment. A leader
// hands over first, to a server of which first reports true for its URL if there is one. The error is
// that of an etcd that goes on as it was; one that does not start again fails the server.
func (m *embedded) restart(ctx context.Context, first func(server string) bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if state, _ := m.space.disk.get(); state != diskOpen {
		return fmt.Errorf("the disk of %s is nearly full: free %d MiB", m.dir, diskRoom>>20)
	}
	if err := m.handOver(ctx, first); err != nil {
		return fmt.Errorf("cannot hand over the leadership: %w", err)
	}
	begin := time.Now()
	select {
	case <-m.quiet():
	case <-ctx.Done():
		return ctx.Err()
	}
	defer m.dials.close()()
	m.end()
	m.end = nil
	err := prepareDisk(m.dir)
	if err == nil {
		err = m.start(ctx)
	}
	if err != nil {
		if ctx.Err() == nil {
			m.fail(err)
		}
		return err
	}
	m.opts.Log.Info("the embedded etcd was restarted; requests have waited for it", "after", time.Since(begin).Round(time.Millisecond))
	return nil
}

// handOver makes another server the leader if this one is.
func (m *embedded) handOver(ctx context.Context, first func(server string) bool) error {
	s := m.server()
	if s.Leader() != s.MemberID() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, handOverTimeout)
	defer cancel()
	if err := m.announceHandOver(ctx, s, ""); err != nil {
		return err
	}
	for _, o := range s.Cluster().Members() {
		if o.ID != s.MemberID() && !o.IsLearner && len(o.ClientURLs) > 0 && first(o.ClientURLs[0]) {
			return s.MoveLeader(ctx, uint64(s.MemberID()), uint64(o.ID))
		}
	}
	return s.TryTransferLeadershipOnShutdown()
}

// announceHandOver has the other servers hold their requests back. slow is the ID of a member that is too slow to lead, in
// hexadecimal, "" if the reason is another one.
func (m *embedded) announceHandOver(ctx context.Context, s *etcdserver.EtcdServer, slow string) error {
	if _, err := s.Put(ctx, &etcdserverpb.PutRequest{Key: []byte(handOverKey), Value: []byte(slow)}); err != nil {
		return err
	}
	select {
	case <-time.After(handOverNotice):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// awaitHandOvers has requests wait while the leadership is handed over, until ctx ends: what a server has just
// sent to a leader that hands over is lost, and its client waits for etcd's timeout of 7 s.
func (m *embedded) awaitHandOvers(ctx context.Context, s *etcdserver.EtcdServer) {
	c := v3client.New(s)
	defer c.Close()
	for r := range c.Watch(ctx, handOverKey) {
		if len(r.Events) == 0 {
			continue
		}
		m.slow.note(r.Events[len(r.Events)-1].Kv.Value)
		from, end := s.Leader(), time.Now().Add(handOverNotice+handOverHold)
		open := m.requests.close()
		tick := time.NewTicker(handOverLook)
		for (s.Leader() == from || s.Leader() == 0) && time.Now().Before(end) && ctx.Err() == nil {
			<-tick.C
		}
		tick.Stop()
		open()
	}
}

// errRestarting has clients of etcd take up their streams again.
var errRestarting = status.Error(codes.Unavailable, "etcd is being restarted")

// endWith ends all streams, which are watches and renewals, with ctx: etcd waits for their end otherwise.
func endWith(ctx context.Context) grpc.StreamServerInterceptor {
	return func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		own, cancel := context.WithCancel(s.Context())
		defer cancel()
		defer context.AfterFunc(ctx, cancel)()
		err := handler(srv, streamUntil{s, own})
		if ctx.Err() != nil && s.Context().Err() == nil {
			return errRestarting
		}
		return err
	}
}

const (
	// dropped is the message of raft.ErrProposalDropped: the leadership is being handed over, and the write is in
	// no member's log.
	dropped = "raft proposal dropped"
	// droppedTimeout bounds the time in which such a write is proposed again, and droppedPause is the pause between two.
	droppedTimeout = 2 * peerElection * time.Millisecond
	droppedPause   = 10 * time.Millisecond
)

// answer answers a request when no leadership is being handed over, and proposes a write again that was dropped
// because there was no leader.
func (m *embedded) answer(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := m.requests.pass(ctx); err != nil {
		return nil, err
	}
	for begin := time.Now(); ; {
		answer, err := handler(ctx, req)
		if err == nil || status.Convert(err).Message() != dropped || time.Since(begin) > droppedTimeout {
			return answer, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(droppedPause):
		}
	}
}

// streamUntil is a stream with another end.
type streamUntil struct {
	grpc.ServerStream

	ctx context.Context //nolint:containedctx // grpc.ServerStream has a method for it
}

func (s streamUntil) Context() context.Context { return s.ctx }
