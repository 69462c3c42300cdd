package dns

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/dns/feed"
	"github.com/fairlead/fairlead/internal/dns/membership"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/zone"
)

// Server answers DNS questions. Make it with New, run it with Run.
type Server struct {
	options Options
	log     *slog.Logger
	zone    *zone.Zone
	forward *forwarder
	stats   statsTable

	hosts    atomic.Pointer[hostsTable]
	serving  atomic.Bool
	ending   atomic.Bool // Run's ctx has ended, or Drain was called
	loops    *loopFinder
	members  *membership.Members
	follow   *feed.Follower
	stop     chan struct{} // closed when sockets must close
	drain    sync.Once
	draining chan struct{} // closed by Drain
	drained  chan struct{} // closed by Run after the lame-duck time
	local    *localSockets // nil without NodeLocal

	mu        sync.Mutex
	listeners []*listener
	conns     conns
}

// listener is the sockets of one address.
type listener struct {
	addr netip.AddrPort
	tcp  net.Listener
	udp  []*net.UDPConn
}

// New returns a Server. It opens no sockets and sends no requests yet.
func New(o Options) (*Server, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	z, err := zone.New(o.zoneConfig())
	if err != nil {
		return nil, err
	}
	if len(o.Upstream)+len(o.TLSUpstream) == 0 && o.ResolvConf != "" {
		o.Upstream, err = readResolvConf(o.ResolvConf)
		if errors.Is(err, fs.ErrNotExist) {
			// At boot it may be written later; it is watched.
			o.Logger.Warn("no upstream resolvers yet; waiting for the file", "err", err)
		} else if err != nil {
			return nil, err
		}
	} else {
		o.ResolvConf = ""
	}
	var hosts *hostsTable
	if o.Hosts != "" {
		if hosts, err = readHosts(o.Hosts); err != nil {
			return nil, err
		}
	}
	f, err := newForwarder(o)
	if err != nil {
		return nil, err
	}
	s := &Server{
		options:  o,
		members:  membership.New(o.Publish, o.Client, o.Logger),
		log:      o.Logger,
		zone:     z,
		forward:  f,
		stop:     make(chan struct{}),
		draining: make(chan struct{}),
		drained:  make(chan struct{}),
	}
	s.follow = feed.New(feed.Options{
		Client: o.Client, Zone: z, Log: o.Logger, Pods: o.Pods == zone.PodsVerified, Progress: o.Progress,
		Slice: s.members.Set, SliceDeleted: s.members.Delete,
	})
	s.loops = &loopFinder{forward: f, timeout: o.Timeout, log: o.Logger}
	if o.NodeLocal != nil {
		s.local = &localSockets{o: o.NodeLocal, workers: o.Workers, log: o.Logger, members: s.members}
	}
	s.hosts.Store(hosts)
	s.conns.open, s.conns.shares = map[netip.Addr]map[*tcpConn]struct{}{}, newShares(o.MaxConns)
	return s, nil
}

// Zone returns the cluster's names. Without an API client the caller fills it.
func (s *Server) Zone() *zone.Zone { return s.zone }

// Ready reports whether the server listens and the zone is complete. It stays
// true when the API server cannot be reached, and is false while the server ends.
func (s *Server) Ready() bool { return s.serving.Load() && s.follow.Synced() && !s.ending.Load() }

// Addrs returns the addresses the server listens on, once Listen has opened them.
func (s *Server) Addrs() []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []netip.AddrPort
	for _, l := range s.listeners {
		out = append(out, l.addr)
	}
	return out
}

// Listen opens the sockets. Run does so too; calling it before returns the error
// of a port in use early, and Addrs the port that was chosen. After Listen, Run
// must be called, which closes the sockets.
func (s *Server) Listen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.listeners) > 0 {
		return nil
	}
	for _, text := range s.options.Listen {
		addrs, err := parseListen(text)
		for i, a := range addrs {
			var l *listener
			if l, err = listen(a, s.options.Workers, false); err != nil {
				// A machine without IPv6 still has ":53".
				if i > 0 && errors.Is(err, errNoFamily) {
					err = nil
					continue
				}
				break
			}
			s.listeners = append(s.listeners, l)
		}
		if err != nil {
			for _, l := range s.listeners {
				l.close()
			}
			s.listeners = nil
			return err
		}
	}
	return nil
}

// Run serves until ctx ends, and returns when everything it has started has
// ended. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	if err := s.Listen(); err != nil {
		return err
	}
	serve, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	listed, unlist := context.WithCancel(ctx) // until ctx ends or Drain is called
	defer unlist()
	s.forward.open(serve)

	var sockets sync.WaitGroup
	for _, l := range s.listeners {
		s.start(l, &sockets)
	}
	s.serving.Store(true)
	s.log.Info("dns is listening", "addresses", s.Addrs(), "upstreams", len(s.forward.all()))

	published := false
	var loops sync.WaitGroup
	loops.Go(func() { s.forward.probe(serve) })
	loops.Go(func() { s.loops.find(serve) })
	if s.options.ResolvConf != "" {
		loops.Go(func() { s.loops.watchResolvConf(serve, s.options.ResolvConf) })
	}
	if s.options.Hosts != "" {
		loops.Go(func() { s.watchHosts(serve) })
	}
	if s.options.Client != nil {
		loops.Go(func() { s.follow.Run(serve) })
	}
	if s.local != nil {
		loops.Go(func() { s.local.serve(listed, s.Ready, func(l *listener) { s.start(l, &sockets) }) })
	}
	loops.Go(func() {
		select {
		case <-s.draining:
			unlist()
		case <-listed.Done():
		}
	})
	if s.options.Publish != nil {
		loops.Go(func() { s.members.WatchPeers(listed) })
		published = s.members.Publish(listed, s.Ready)
	}
	<-listed.Done()
	s.ending.Store(true)
	if published {
		s.members.Withdraw(serve)
	}
	s.lameduck()
	close(s.drained)
	<-ctx.Done()
	stopServing()
	loops.Wait()
	s.serving.Store(false)
	s.local.remove()
	close(s.stop)
	for _, l := range s.listeners {
		l.close()
	}
	s.local.close()
	s.conns.closeAll()
	s.forward.close()
	sockets.Wait()
	return nil
}

// Drain begins what Run does when its ctx ends: the server is no longer ready and leaves
// kube-dns. It returns when clients have had Options.Lameduck to turn to other servers,
// or ctx ends; the server still answers until Run's ctx ends. Where kube-dns has no
// other server, Drain does nothing, so that clients can still resolve names until then.
func (s *Server) Drain(ctx context.Context) {
	if s.alone() {
		return
	}
	s.drain.Do(func() { close(s.draining) })
	select {
	case <-s.drained:
	case <-ctx.Done():
	}
}

// alone reports whether kube-dns lists no other server that clients could use. For a
// server that is not published it is false: others know its clients.
func (s *Server) alone() bool { return s.options.Publish != nil && len(s.members.Others()) == 0 }

// start runs the loops of one address.
func (s *Server) start(l *listener, wg *sync.WaitGroup) {
	for _, c := range l.udp {
		stats := s.stats.add(l.addr, "udp")
		wg.Go(func() { s.serveUDP(c, stats, l.addr.Addr().IsUnspecified()) })
	}
	stats := s.stats.add(l.addr, "tcp")
	wg.Go(func() { s.serveTCP(l.tcp, stats) })
}

// aloneLameduck is enough for a published server that knows of no other: no client
// can turn to one.
const aloneLameduck = 250 * time.Millisecond

// lameduck answers on for as long as clients may need to turn to other servers.
func (s *Server) lameduck() {
	d := s.options.Lameduck
	if s.alone() {
		d = min(d, aloneLameduck)
	}
	if d > 0 {
		s.log.Info("dns is stopping; it still answers until clients have turned to other servers", "for", d)
		s.pause(d)
	}
}

// pause waits for d and reports whether it passed before the server stopped.
func (s *Server) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-s.stop:
		return false
	}
}

// errNoFamily is the error of a machine without the address family.
var errNoFamily = errors.New("address family not supported")

// portTries bounds the search for a port that is free for both UDP and TCP.
const portTries = 20

// listen opens the TCP and UDP sockets of an address, which need not be the
// machine's with anyAddress.
func listen(addr netip.AddrPort, workers int, anyAddress bool) (*listener, error) {
	var err error
	for range portTries {
		var l *listener
		if l, err = listenOnce(addr, workers, anyAddress); err == nil {
			return l, nil
		}
		if addr.Port() != 0 {
			break
		}
	}
	return nil, err
}

func listenOnce(addr netip.AddrPort, workers int, anyAddress bool) (*listener, error) {
	lc := socket.ListenConfig(addr, socket.Options{AnyAddress: anyAddress})
	tcp, err := lc.Listen(context.Background(), network("tcp", addr), addr.String())
	if err != nil {
		return nil, listenError(addr, err)
	}
	l := &listener{tcp: tcp}
	l.addr = netip.AddrPortFrom(addr.Addr(), tcp.Addr().(*net.TCPAddr).AddrPort().Port())
	for i := range workers {
		c, err := listenUDP(l.addr, anyAddress, i > 0)
		if err == nil {
			l.udp = append(l.udp, c)
			// With SO_REUSEPORT from the start, a second server of the same user would
			// silently share the port. A socket without it that is only opened to find
			// out, and closed, stays in every process that is being forked at that moment
			// until its exec, and then the others cannot be opened.
			if i == 0 && workers > 1 {
				err = socket.Share(c)
			}
		}
		if err != nil {
			l.close()
			return nil, listenError(l.addr, err)
		}
	}
	return l, nil
}

func (l *listener) close() {
	l.tcp.Close()
	for _, c := range l.udp {
		c.Close()
	}
}
