package proxied

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/svc"
)

// Service is the wanted state of one Service.
type Service struct {
	Name  svc.Name
	Addrs []netip.Addr
	Spec  dialect.Spec
	// Certificates are those of Spec.Certificates, in their order.
	Certificates []tls.Certificate
	// Backends are the ready Pods of each port of TCP, by its number, and Datagrams those of UDP.
	Backends  map[uint16][]netip.AddrPort
	Datagrams map[uint16][]netip.AddrPort
	// Weights are the shares of Pods that have another one than 1.
	Weights map[netip.AddrPort]int
	// PodRoots are the certificates by which those of Pods are verified, nil if they are not, and PodCertificate is
	// shown to Pods that ask for one. A change is seen by the pointer.
	PodRoots       *x509.CertPool
	PodCertificate *tls.Certificate
	// Key is the Service's UID, of which cookies are made.
	Key string
}

// Server accepts connections at the addresses of Services. It is safe for concurrent use.
type Server struct {
	log *slog.Logger
	ctx context.Context
	end context.CancelFunc
	wg  sync.WaitGroup

	mu        sync.Mutex
	services  map[svc.Name]*Service // as of the last Set, without those that failed
	listeners map[netip.AddrPort]*listener
	udp       map[netip.AddrPort]*udpListener
	pools     map[poolKey]*pool
	drains    map[poolKey]time.Duration
	usages    map[svc.Name]*usage
	web       *webServer // nil until there is a listener of HTTP

	store     Store // nil if there is none
	inherited map[netip.AddrPort]*net.TCPListener
	began     time.Time
	accepting sync.WaitGroup

	headerTimeout time.Duration
	idleGrace     time.Duration
	logs          *accessLog // nil if none are written
	open          map[net.Conn]struct{}
	most          int // connections at a time, and requests of HTTP/2
	rejected      uint64
	requests      atomic.Int64 // of HTTP/2
	warned        time.Time    // of that, last
}

// usage is what all listeners of a Service share.
type usage struct {
	bandwidth bandwidth
	active    int // connections, guarded by the Server's mu
	requests  atomic.Int64
}

type poolKey struct {
	service svc.Name
	port    uint16
	udp     bool
}

func keyOf(v *Service, l dialect.Listener) poolKey {
	return poolKey{v.Name, l.Port, l.Protocol == dialect.UDP}
}

// Options are the options of a Server.
type Options struct {
	Log *slog.Logger
	// AccessLogs is the directory of access logs, in which Node names this machine. Without one none are written.
	AccessLogs, Node string
	// Store, if not nil, keeps listeners for the next process.
	Store Store
}

// Store keeps listeners while this process gives way to the next one (systemd.FileStore).
type Store interface {
	// Inherited returns those that an earlier process has left, once.
	Inherited() []net.Listener
	Keep(name string, l *net.TCPListener) error
	Drop(name string) error
}

// New returns a Server that listens nowhere. It uses the network namespace of those that
// call Set.
func New(o Options) *Server {
	s := &Server{
		log: o.Log, services: map[svc.Name]*Service{}, listeners: map[netip.AddrPort]*listener{},
		udp: map[netip.AddrPort]*udpListener{}, pools: map[poolKey]*pool{},
		drains: map[poolKey]time.Duration{}, usages: map[svc.Name]*usage{}, open: map[net.Conn]struct{}{},
		inherited: map[netip.AddrPort]*net.TCPListener{}, began: time.Now(),
		headerTimeout: headerTimeout, idleGrace: idleGrace,
		most: socket.MaxFiles() / 4,
	}
	if o.AccessLogs != "" {
		s.logs = &accessLog{dir: filepath.Clean(o.AccessLogs), node: o.Node, log: o.Log, most: maxAccessLogs, files: map[logKey]*logFile{}}
	}
	if s.store = o.Store; s.store != nil {
		for _, l := range s.store.Inherited() {
			if t, ok := l.(*net.TCPListener); ok {
				s.inherited[addrPort(t.Addr())] = t
			} else {
				_ = l.Close()
			}
		}
	}
	s.ctx, s.end = context.WithCancel(context.Background())
	return s
}

// Set makes the Server do what services say, and nothing else. A listener whose address and port
// stay is kept, with its connections; new connections have the new settings. It returns why
// a Service cannot be served; it may be called again with the same. The Services belong to the Server
// and do not change: one that was passed before costs next to nothing.
func (s *Server) Set(services []*Service) map[svc.Name]error {
	s.mu.Lock()
	defer s.mu.Unlock()
	failed := map[svc.Name]error{}
	wanted, wantedUDP := map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}
	pools := map[poolKey]bool{}
	done := make(map[svc.Name]*Service, len(services))
	for _, v := range services {
		var errs []error
		for _, l := range v.Spec.Listeners {
			if s.services[v.Name] != v {
				if err := s.setListener(v, l); err != nil {
					errs = append(errs, err)
					continue
				}
			}
			pools[keyOf(v, l)] = true
			for _, a := range v.Addrs {
				if at := netip.AddrPortFrom(a, l.Port); l.Protocol == dialect.UDP {
					wantedUDP[at] = true
				} else {
					wanted[at] = true
				}
			}
		}
		if len(errs) > 0 {
			failed[v.Name] = errors.Join(errs...)
			continue
		}
		done[v.Name] = v
	}
	s.services = done
	for at, l := range s.listeners {
		if !wanted[at] {
			s.close(l, false)
			delete(s.listeners, at)
			s.drop(at)
		}
	}
	for at, l := range s.udp {
		if !wantedUDP[at] {
			l.close()
			delete(s.udp, at)
		}
	}
	s.dropInherited(inheritTime)
	for n := range s.usages {
		if done[n] == nil && failed[n] == nil {
			delete(s.usages, n)
		}
	}
	if s.logs != nil {
		s.logs.retain(func(n svc.Name) bool { return failed[n] != nil || done[n] != nil && done[n].Spec.AccessLog.Enabled })
	}
	for key, p := range s.pools {
		if !pools[key] {
			p.close(s.drains[key])
			delete(s.pools, key)
			delete(s.drains, key)
		}
	}
	return failed
}

// setListener sets up a port of a Service at its addresses. What fails is not listened at: a Service that asks for
// TLS and has no certificate must not go on in plain text.
func (s *Server) setListener(v *Service, l dialect.Listener) error {
	var old *config
	if len(v.Addrs) > 0 && l.Protocol != dialect.UDP {
		if at := s.listeners[netip.AddrPortFrom(v.Addrs[0], l.Port)]; at != nil {
			old = at.config.Load()
		}
	}
	c, err := newConfig(v, l, old)
	if err != nil {
		return err
	}
	if c.usage = s.usages[v.Name]; c.usage == nil {
		c.usage = &usage{}
		s.usages[v.Name] = c.usage
	}
	c.usage.bandwidth.set(v.Spec.BandwidthMbps)
	if v.Spec.AccessLog.Enabled {
		c.logs = s.logs
	}
	if c.protocol.IsHTTP() {
		c.transport = transportOf(c, old)
		if s.web == nil {
			s.web = newWebServer(s)
			s.wg.Go(func() { _ = s.web.http.Serve(s.web) })
		}
	}
	c.pool = s.pool(keyOf(v, l), v)
	var errs []error
	for _, a := range v.Addrs {
		if at := netip.AddrPortFrom(a, l.Port); l.Protocol == dialect.UDP {
			errs = append(errs, s.listenUDP(at, c))
		} else {
			errs = append(errs, s.listen(at, c))
		}
	}
	return errors.Join(errs...)
}

// pool returns the pool of a port, with the backends that it is to have.
func (s *Server) pool(key poolKey, v *Service) *pool {
	p := s.pools[key]
	if p == nil {
		p = &pool{ctx: s.ctx, wg: &s.wg, log: s.log.With("service", key.service)}
		s.pools[key] = p
	}
	drain := time.Duration(0)
	if v.Spec.Draining {
		drain = v.Spec.DrainTimeout.Std()
		if drain == 0 {
			drain = -1
		}
	}
	s.drains[key] = drain
	o := poolOptions{
		balance: v.Spec.Balance, slowStart: v.Spec.SlowStart.Std(), weights: v.Weights,
		checks: checks{v.Spec.Health, v.Spec.ProxyProtocol, podTLSOf(v)},
	}
	if v.Spec.Sticky.Cookie {
		o.key = v.Key
	}
	backends := v.Backends[key.port]
	if key.udp {
		backends, o.checks.Health = v.Datagrams[key.port], datagramChecks(v.Spec.Health)
	}
	p.set(o, backends, drain)
	return p
}

// listener is a socket at which connections are accepted.
type listener struct {
	socket *net.TCPListener
	config atomic.Pointer[config]
	gone   atomic.Bool // closed
}

// close closes the socket. What the kernel has accepted is served before, unless the next process has it.
func (s *Server) close(l *listener, kept bool) {
	l.gone.Store(true)
	if !kept {
		waiting, err := socket.AcceptAll(l.socket)
		if err != nil {
			s.log.Debug("cannot accept the last connections of a listener", "address", l.socket.Addr(), "err", err)
		}
		s.accepting.Add(1)
		s.wg.Go(func() {
			defer s.accepting.Done()
			for _, conn := range waiting {
				s.take(conn, l)
			}
		})
	}
	_ = l.socket.Close()
}

// config is what counts for a new connection.
type config struct {
	service svc.Name
	owner   logship.Owner // of access logs
	spec    *dialect.Spec
	// protocol is that of clients, and backend that of Pods.
	protocol, backend dialect.Protocol

	cookie    string      // the name of the one by which requests stick, empty for none
	tls       *tls.Config // nil without TLS
	pods      podTLS      // of a backend with TLS
	transport *transport  // of HTTP
	pool      *pool
	usage     *usage
	logs      *accessLog // nil if none is asked for
}

// admits reports whether a client is within the ranges that the Service is for.
func (c *config) admits(client netip.Addr) bool {
	return len(c.spec.SourceRanges) == 0 || contains(c.spec.SourceRanges, client)
}

// record writes a line of the access log, if one is asked for.
func (c *config) record(e entry) {
	if c.logs == nil {
		return
	}
	e.owner, e.at = c.owner, time.Now()
	c.logs.write(&e, c.spec.AccessLog)
}

// newConfig returns the configuration of a listener, or why there is none. old is the one before, or nil.
func newConfig(v *Service, l dialect.Listener, old *config) (*config, error) {
	c := &config{
		service: v.Name, owner: logship.OwnerOf(v.Name, v.Key), spec: &v.Spec, protocol: l.Protocol, backend: l.Backend, pods: podTLSOf(v),
	}
	if !slices.Contains([]dialect.Protocol{dialect.TCP, dialect.TLS, dialect.HTTP, dialect.HTTPS, dialect.UDP}, l.Protocol) {
		return nil, fmt.Errorf("port %d: %s cannot be carried in the proxied way", l.Port, l.Protocol)
	}
	if multiplexed := l.Backend == dialect.H2C || l.Backend == dialect.GRPC; multiplexed && v.Spec.ProxyProtocol != 0 {
		return nil, fmt.Errorf("port %d: Pods cannot have the PROXY protocol by %s: its connections are of many clients", l.Port, l.Backend)
	}
	if v.Spec.Sticky.Cookie && l.Protocol.IsHTTP() {
		c.cookie = cookieName(v.Key)
	}
	if !l.Protocol.IsTLS() {
		return c, nil
	}
	if len(v.Certificates) == 0 {
		return nil, fmt.Errorf("port %d: there is no certificate for %s", l.Port, l.Protocol)
	}
	policy, ok := dialect.TLSPolicyOf(v.Spec.TLSPolicy)
	if !ok {
		return nil, fmt.Errorf("port %d: there is no TLS policy %.100q", l.Port, v.Spec.TLSPolicy)
	}
	c.tls = &tls.Config{
		Certificates: v.Certificates, MinVersion: policy.Least, MaxVersion: policy.Most, CipherSuites: policy.Suites, NextProtos: v.Spec.ALPN,
	}
	if l.Protocol == dialect.HTTPS && len(c.tls.NextProtos) == 0 {
		c.tls.NextProtos = []string{"h2", "http/1.1", "http/1.0"}
	}
	if old != nil && old.tls != nil && sameTLS(old.tls, c.tls) {
		c.tls = old.tls // it has the keys of session tickets
		if !sameStaples(c.tls.Certificates, v.Certificates) {
			c.tls = old.tls.Clone()
			c.tls.Certificates = v.Certificates
		}
	}
	return c, nil
}

// sameTLS reports whether two configurations of newConfig are alike.
func sameTLS(a, b *tls.Config) bool {
	return a.MinVersion == b.MinVersion && a.MaxVersion == b.MaxVersion && slices.Equal(a.CipherSuites, b.CipherSuites) &&
		slices.Equal(a.NextProtos, b.NextProtos) && slices.EqualFunc(a.Certificates, b.Certificates, func(x, y tls.Certificate) bool {
		return slices.EqualFunc(x.Certificate, y.Certificate, bytes.Equal)
	})
}

// sameStaples reports whether certificates that are alike have the same OCSP responses.
func sameStaples(a, b []tls.Certificate) bool {
	return slices.EqualFunc(a, b, func(x, y tls.Certificate) bool { return bytes.Equal(x.OCSPStaple, y.OCSPStaple) })
}

// listen makes a listener at an address have a configuration.
func (s *Server) listen(at netip.AddrPort, c *config) error {
	if l := s.listeners[at]; l != nil {
		l.config.Store(c)
		return nil
	}
	made := s.inherited[at]
	delete(s.inherited, at)
	if made == nil {
		o := socket.Options{AnyAddress: true, Shared: true, KeepAlive: true} // shared with one that drains
		lc := socket.ListenConfig(at, o)
		l, err := lc.Listen(s.ctx, "tcp", at.String())
		if err != nil {
			return fmt.Errorf("cannot listen at %s: %w", at, err)
		}
		made = l.(*net.TCPListener)
		if s.store != nil {
			if err := s.store.Keep(storedName(at), made); err != nil {
				s.log.Warn("cannot keep a listener for the next process; connections may be refused during a restart", "address", at, "err", err)
			}
		}
	}
	l := &listener{socket: made}
	l.config.Store(c)
	s.listeners[at] = l
	s.accepting.Add(1)
	s.wg.Go(func() {
		defer s.accepting.Done()
		s.accept(l)
	})
	return nil
}

// inheritTime is how long a listener of an earlier process waits for its Service to become known.
const inheritTime = 30 * time.Second

// dropInherited closes listeners of an earlier process that nobody has wanted for that long.
func (s *Server) dropInherited(after time.Duration) {
	if time.Since(s.began) < after {
		return
	}
	for at, l := range s.inherited {
		_ = l.Close()
		s.drop(at)
	}
	clear(s.inherited)
}

// drop makes the store forget a listener.
func (s *Server) drop(at netip.AddrPort) {
	if s.store == nil {
		return
	}
	if err := s.store.Drop(storedName(at)); err != nil {
		s.log.Warn("cannot take a listener back from systemd", "address", at, "err", err)
	}
}

// storedName names a listener without colons.
func storedName(at netip.AddrPort) string {
	return fmt.Sprintf("lb-%x-%d", at.Addr().AsSlice(), at.Port())
}

// Listening returns where connections are accepted.
func (s *Server) Listening() []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Keys(s.listeners), netip.AddrPort.Compare)
}

// acceptPause is how long nothing is accepted after a failure, as of too many open files.
const acceptPause = 50 * time.Millisecond

func (s *Server) accept(l *listener) {
	for {
		conn, err := l.socket.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.log.Warn("cannot accept a connection; retrying", "address", l.socket.Addr(), "err", err)
			select {
			case <-s.ctx.Done():
				return
			case <-time.After(acceptPause):
			}
			continue
		}
		s.take(conn, l)
	}
}

// take serves a connection.
func (s *Server) take(conn net.Conn, l *listener) {
	c := l.config.Load()
	if !s.admit(conn, c) {
		_ = conn.Close()
		return
	}
	s.wg.Go(func() {
		defer func() {
			_ = conn.Close()
			s.forget(conn, c)
		}()
		s.serve(conn.(*net.TCPConn), l, c)
	})
}

// rejectWarning is how often rejected connections are reported at most.
const rejectWarning = time.Minute

// admit counts a connection. It reports false if there are too many: of all Services as many as open files allow, of
// one half of them, so that no Service takes the place of the others.
func (s *Server) admit(conn net.Conn, c *config) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if limit := c.spec.ConnectionLimit; limit > 0 && c.usage.active >= limit {
		return false
	}
	if len(s.open) >= s.most || c.usage.active >= s.most/2 {
		s.reject(c)
		return false
	}
	s.open[conn] = struct{}{}
	c.usage.active++
	return true
}

// forget takes a connection out of what admit has counted.
func (s *Server) forget(conn net.Conn, c *config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, conn)
	c.usage.active--
}

// reject counts and reports what was rejected. s.mu is held.
func (s *Server) reject(c *config) {
	s.rejected++
	if now := time.Now(); now.Sub(s.warned) >= rejectWarning {
		s.warned = now
		s.log.Warn("rejected a connection or a request of HTTP/2, since there are too many: raise the limit of open files (LimitNOFILE=)",
			"service", c.service, "connections", c.usage.active, "requests", c.usage.requests.Load(),
			"all", len(s.open), "limit", s.most)
	}
}

// Rejected returns how many connections and requests were rejected since there were too many.
func (s *Server) Rejected() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rejected
}

// FinishLogs makes sure that nothing is added to files of access logs that are complete at a time.
func (s *Server) FinishLogs(now time.Time) {
	if s.logs != nil {
		s.logs.finish(now)
	}
}

// DroppedLogs returns how many files of access logs were removed, since there were too many, before they were uploaded.
func (s *Server) DroppedLogs() uint64 {
	if s.logs == nil {
		return 0
	}
	s.logs.mu.Lock()
	defer s.logs.mu.Unlock()
	return s.logs.dropped
}

// Close stops listening, waits until ctx ends for connections to finish, and closes the others. At what a store keeps
// new connections wait for the next process.
func (s *Server) Close(ctx context.Context) {
	s.mu.Lock()
	for at, l := range s.listeners {
		s.close(l, s.store != nil)
		delete(s.listeners, at)
	}
	for at, l := range s.udp {
		l.close()
		delete(s.udp, at)
	}
	web := s.web
	s.mu.Unlock()
	s.accepting.Wait()
	if web != nil {
		web.shutdown(ctx) // what is left is closed below
	}
	for s.busy() && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	s.end()
	s.mu.Lock()
	for c := range s.open {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	if s.logs != nil {
		s.logs.close()
	}
}

func (s *Server) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open) > 0
}
