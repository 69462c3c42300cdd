package proxied

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied/accesslog"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// Service is the wanted state of one Service.
type Service struct {
	Name  svc.Name
	Addrs []netip.Addr
	Spec  dialect.Spec
	// Certificates are for Spec.Certificates, in their order.
	Certificates []tls.Certificate
	// Challenges are the certificates, by host names, with which an authority of ACME is answered (TLS-ALPN-01, RFC 8737).
	Challenges map[string]*tls.Certificate
	// Tokens are the answers, by tokens, to an authority that asks by HTTP-01 at port 80.
	Tokens map[string]string
	// Backends are the endpoints of each port of TCP, by its number, and Datagrams the endpoints of UDP.
	Backends  map[uint16][]netip.AddrPort
	Datagrams map[uint16][]netip.AddrPort
	// Weights are the shares of Pods that have another one than 1.
	Weights map[netip.AddrPort]int
	// PodRoots verify the certificates of Pods, nil if nothing does, and PodCertificate is
	// shown to Pods that ask for one. A change is seen by the pointer.
	PodRoots       *x509.CertPool
	PodCertificate *tls.Certificate
	// ClientRoots verify the certificates of clients, nil if none are asked for; a change is seen as of PodRoots.
	ClientRoots *x509.CertPool
	// Key is the Service's UID, of which cookies are made.
	Key string
	// ClusterIP is true if Addrs are ClusterIPs.
	ClusterIP bool
	// Routes, if not nil, route the requests of all ports; then Backends have no use.
	Routes *Routes
}

// Answers reports whether an authority of ACME may ask at port 80.
func (v *Service) Answers() bool {
	return len(v.Tokens) > 0 || v.Routes != nil && len(v.Routes.Tokens) > 0
}

// PodTLS returns how TLS to its Pods begins.
func (v *Service) PodTLS() pods.TLS {
	t := pods.TLS{Roots: v.PodRoots, Cert: v.PodCertificate}
	if t.Roots == nil {
		return t
	}
	if t.Name = v.Spec.BackendTLS.ServerName; t.Name == "" {
		t.Name = v.Name.Name + "." + v.Name.Namespace + ".svc"
	}
	return t
}

// Server accepts connections at the addresses of Services. It is safe for concurrent use.
type Server struct {
	log *slog.Logger
	ctx context.Context
	end context.CancelFunc
	wg  sync.WaitGroup

	workers workers // for connections

	start func(Host) (Engine, error) // nil if there is no HTTP

	mu        sync.Mutex
	services  map[svc.Name]*Service // as of the last Set, except failed ones
	listeners map[netip.AddrPort]*Listener
	udp       map[netip.AddrPort]*udpListener
	pools     map[poolKey]*pods.Pool
	drains    map[poolKey]time.Duration
	usages    map[svc.Name]*usage
	targets   map[svc.Name]map[gateway.Target]*Config
	web       Engine        // nil until there is a listener of HTTP
	engine    *relay.Engine // nil until there is one for the relay

	store     Store // nil if there is none
	inherited map[netip.AddrPort]*net.TCPListener
	insides   *insides // nil if sockets are bound to the addresses of Services
	began     time.Time
	accepting sync.WaitGroup

	logs      *accesslog.Log // nil if none are written
	watched   seen.Requests  // nil if none are shown
	traced    *request.Watch // nil if none are traced
	panics    *panics.Counter
	admission admission
	shared    pods.Shared
	book      *traffic.Book
	shown
}

type poolKey struct {
	service svc.Name
	port    uint16
	udp     bool
	target  gateway.Target // of Routes, without its timeout
}

func keyOf(v *Service, l dialect.Listener) poolKey {
	return poolKey{service: v.Name, port: l.Port, udp: l.Protocol == dialect.UDP}
}

// Options are the options of a Server.
type Options struct {
	Log *slog.Logger
	// AccessLogs is the directory of access logs, in which Node names this machine. Without one none are written.
	AccessLogs, Node string
	// Engine starts what carries requests of HTTP, when there is a listener for them (web.Start). Without one a Service
	// with such a listener fails.
	Engine func(Host) (Engine, error)
	// MaxConnections bounds connections at a time, and requests of HTTP/2. 0 means a quarter of the files that may be open.
	MaxConnections int
	// Store, if not nil, keeps listeners for the next process.
	Store Store
	// Requests, if not nil, is shown the requests of HTTP. Traced, if not nil, keeps what becomes of some.
	Requests seen.Requests
	Traced   *request.Watch
}

// Store keeps listeners while this process gives way to the next one (systemd.FileStore).
type Store interface {
	// Inherited returns the listeners of an earlier process, once.
	Inherited() []net.Listener
	// NameOf returns the name under which one of these was kept, empty if that is unknown.
	NameOf(l net.Listener) string
	Keep(name string, l *net.TCPListener) error
	Drop(name string) error
}

// New returns a Server that listens nowhere. It uses the network namespace of the thread that
// calls Set.
func New(o Options) *Server {
	s := &Server{
		log: o.Log, services: map[svc.Name]*Service{}, listeners: map[netip.AddrPort]*Listener{},
		udp: map[netip.AddrPort]*udpListener{}, pools: map[poolKey]*pods.Pool{},
		drains: map[poolKey]time.Duration{}, usages: map[svc.Name]*usage{}, start: o.Engine,
		targets:   map[svc.Name]map[gateway.Target]*Config{},
		inherited: map[netip.AddrPort]*net.TCPListener{}, began: time.Now(),
		panics: panics.New(o.Log), book: traffic.NewBook(), watched: o.Requests, traced: o.Traced,
		admission: admission{
			log: o.Log, most: cmp.Or(o.MaxConnections, socket.MaxFiles()/4), open: map[io.Closer]netip.Addr{},
		},
	}
	if o.AccessLogs != "" {
		s.logs = accesslog.New(o.AccessLogs, o.Node, o.Log)
	}
	if s.store = o.Store; s.store != nil {
		for _, l := range s.store.Inherited() {
			if t, ok := l.(*net.TCPListener); ok {
				s.inherited[addressOf(t, s.store)] = t
			} else {
				_ = l.Close()
			}
		}
	}
	s.ctx, s.end = context.WithCancel(context.Background())
	s.shown.server = s
	s.shared = pods.Shared{Context: s.ctx, Running: &s.wg, Log: s.log, Panics: s.panics, Absences: pods.NewAbsences(s.changed)}
	s.workers.wg = &s.wg
	context.AfterFunc(s.ctx, s.workers.end)
	return s
}

// Set makes the Server serve services, and no others. A listener whose address and port
// stay is kept, with its connections; new connections have the new settings. It returns why
// a Service, or one of its ports, cannot be served (Serves): it may be called again with the same. The Services belong to the Server
// and do not change: one that was passed before costs next to nothing.
func (s *Server) Set(services []*Service) map[svc.Name]error {
	s.mu.Lock()
	defer s.mu.Unlock()
	failed := map[svc.Name]error{}
	use := inUse{map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}, map[poolKey]bool{}}
	done := make(map[svc.Name]*Service, len(services))
	for _, v := range services {
		if err := use.take(s, v); err != nil {
			failed[v.Name] = err
			continue
		}
		done[v.Name] = v
	}
	s.services = done
	for at, l := range s.listeners {
		if !use.tcp[at] {
			s.close(l, false)
			delete(s.listeners, at)
			s.drop(l.door())
		}
	}
	for at, l := range s.udp {
		if !use.udp[at] {
			l.close()
			delete(s.udp, at)
		}
	}
	s.dropInherited(inheritTime)
	for n := range s.usages {
		if done[n] == nil && failed[n] == nil {
			delete(s.usages, n)
			s.book.Drop(n)
			delete(s.targets, n)
		}
	}
	if s.logs != nil {
		s.logs.Retain(func(n svc.Name) bool { return failed[n] != nil || done[n] != nil && done[n].Spec.AccessLog.Enabled })
	}
	for key, p := range s.pools {
		if !use.pools[key] {
			p.Close(s.drains[key])
			delete(s.pools, key)
			delete(s.drains, key)
		}
	}
	return failed
}

// inUse are the listeners and pools that Services have.
type inUse struct {
	tcp, udp map[netip.AddrPort]bool
	pools    map[poolKey]bool
}

// take makes s serve v, and notes what v uses. The caller holds s.mu.
func (use inUse) take(s *Server, v *Service) error {
	var errs []error
	same := s.services[v.Name] == v
	if v.Routes != nil && !same {
		if err := s.needEngine(); err != nil {
			errs = append(errs, err)
		} else {
			s.targets[v.Name] = newTargeting(s, v).all(s.services[v.Name], s.targets[v.Name])
		}
	}
	for t := range s.targets[v.Name] {
		use.pools[targetKey(v.Name, t)] = true
	}
	for _, l := range v.Spec.Listeners {
		at := addressesAt(v, l)
		if !same {
			var err error
			if at, err = s.setListener(v, l); err != nil {
				errs = append(errs, err)
			}
			if err != nil && len(at) == 0 {
				continue
			}
		}
		use.pools[keyOf(v, l)] = true
		for _, at := range at {
			if l.Protocol == dialect.UDP {
				use.udp[at] = true
			} else {
				use.tcp[at] = true
			}
		}
	}
	return errors.Join(errs...)
}

// addressesAt returns the addresses of a Service with one of its ports.
func addressesAt(v *Service, l dialect.Listener) (out []netip.AddrPort) {
	for _, a := range v.Addrs {
		out = append(out, netip.AddrPortFrom(a, l.Port))
	}
	return out
}

// setListener sets up a port of a Service at its addresses, and returns where it listens. Where it fails it does not: a
// Service that asks for TLS and has no certificate must not be served in plain text. The caller holds mu.
func (s *Server) setListener(v *Service, l dialect.Listener) (listens []netip.AddrPort, err error) {
	var old *Config
	if len(v.Addrs) > 0 && l.Protocol != dialect.UDP {
		if at := s.listeners[netip.AddrPortFrom(v.Addrs[0], l.Port)]; at != nil {
			old = at.config.Load()
		}
	}
	c, err := newConfig(v, l, old)
	if err != nil {
		return nil, err
	}
	c.usage = usageOf(s, v.Name)
	c.watched, c.traced = s.watched, s.traced
	c.usage.bandwidth.Set(v.Spec.BandwidthMbps)
	if v.Spec.AccessLog.Enabled {
		c.logs = s.logs
	}
	if c.Protocol.IsHTTP() {
		if err := s.needEngine(); err != nil {
			return nil, err
		}
		s.web.Configure(c, old)
	}
	if v.Routes != nil {
		v.Routes.give(c, l, v.Key, s.targets[v.Name])
		v.challenge(c, l)
	}
	c.Pool = s.pool(keyOf(v, l), v)
	var errs []error
	for _, at := range addressesAt(v, l) {
		listen := s.listen
		if l.Protocol == dialect.UDP {
			listen = s.listenUDP
		}
		if err := listen(at, c); err != nil {
			errs = append(errs, err)
			continue
		}
		listens = append(listens, at)
	}
	return listens, errors.Join(errs...)
}

// usageOf returns what is counted of a Service. The caller holds mu.
func usageOf(s *Server, n svc.Name) *usage {
	u := s.usages[n]
	if u == nil {
		u = &usage{traffic: s.book.Service(n)}
		s.usages[n] = u
	}
	return u
}

// needEngine starts the engine of HTTP unless it runs. The caller holds mu.
func (s *Server) needEngine() error {
	if s.web != nil {
		return nil
	}
	web, err := s.startEngine()
	if err != nil {
		return err
	}
	s.web = web
	return nil
}

// Serves reports whether something listens for a Service, also if another of its ports has failed.
func (s *Server) Serves(n svc.Name) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.listeners {
		if l.config.Load().Service == n {
			return true
		}
	}
	for _, l := range s.udp {
		if l.config.Load().Service == n {
			return true
		}
	}
	return false
}

// pool returns the pool of a port, with its desired backends. The caller holds mu.
func (s *Server) pool(key poolKey, v *Service) *pods.Pool {
	p := poolOf(s, key)
	drain := time.Duration(0)
	if v.Spec.Draining {
		drain = v.Spec.DrainTimeout.Std()
		if drain == 0 {
			drain = -1
		}
	}
	s.drains[key] = drain
	o := pods.Options{
		Balance: v.Spec.Balance, SlowStart: v.Spec.SlowStart.Std(), Weights: v.Weights, Eject: v.Spec.Eject,
		Checks: pods.Checks{Health: v.Spec.Health, Proxy: v.Spec.ProxyProtocol, TLS: v.PodTLS()},
	}
	if v.Spec.Sticky.Cookie {
		o.Key = v.Key
	}
	backends := v.Backends[key.port]
	if key.udp {
		backends, o.Checks.Health = v.Datagrams[key.port], datagramChecks(v.Spec.Health)
	}
	p.Set(o, backends, drain)
	return p
}

// newTargeting returns what makes the targets of a Service. The caller holds mu.
func newTargeting(s *Server, v *Service) *targeting {
	return &targeting{
		service: v, web: s.web, usage: usageOf(s, v.Name), drains: s.drains, pool: func(key poolKey) *pods.Pool { return poolOf(s, key) },
	}
}

// poolOf returns a pool, which is made if necessary. The caller holds mu.
func poolOf(s *Server, key poolKey) *pods.Pool {
	p := s.pools[key]
	if p == nil {
		p = pods.New(s.shared, key.service, usageOf(s, key.service).traffic)
		s.pools[key] = p
	}
	return p
}

// FinishLogs makes sure that nothing is added to files of access logs that are complete at a time.
func (s *Server) FinishLogs(now time.Time) {
	if s.logs != nil {
		s.logs.Finish(now)
	}
}

// DroppedLogs returns how many files of access logs were removed, since there were too many, before they were uploaded.
func (s *Server) DroppedLogs() uint64 {
	if s.logs == nil {
		return 0
	}
	return s.logs.Dropped()
}

// Close stops listening, waits until ctx ends for connections to finish, and closes the others. It returns which listeners
// the store keeps: there new connections wait for the next process.
func (s *Server) Close(ctx context.Context) (kept []Door) {
	s.mu.Lock()
	for at, l := range s.inherited {
		kept = append(kept, inheritedDoor(s.store, at, l))
		_ = l.Close()
	}
	clear(s.inherited)
	for at, l := range s.listeners {
		if l.kept {
			kept = append(kept, l.door())
		}
		s.close(l, l.kept)
		delete(s.listeners, at)
	}
	for at, l := range s.udp {
		l.close()
		delete(s.udp, at)
	}
	web, engine := s.web, s.engine
	s.mu.Unlock()
	s.accepting.Wait()
	if web != nil {
		web.Shutdown(ctx) // the rest is closed below
	}
	for s.admission.busy() && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	s.end()
	s.admission.closeAll()
	if engine != nil { // before wg: what ends writes its line
		if err := engine.Close(s.ctx); err != nil {
			s.log.Warn("cannot end the relay of connections", "err", err)
		}
	}
	s.wg.Wait()
	if s.logs != nil {
		s.logs.Close()
	}
	return kept
}

// Panics returns how many connections, requests and datagrams were dropped since what served them has panicked.
func (s *Server) Panics() uint64 { return s.panics.Count() }

// Rejected returns how many connections and requests were rejected since there were too many.
func (s *Server) Rejected() uint64 { return s.admission.rejections() }

// Usage is what a Server has at a moment.
type Usage struct {
	// Connections and Requests are of clients, the latter of HTTP/2: as the Server counts them, or all of its Services, if
	// that is more.
	Connections, Requests int
	// AtPods is how many connections and requests Pods have.
	AtPods int
}

// Usage returns what is in use now.
func (s *Server) Usage() (u Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.pools {
		u.AtPods += p.InUse()
	}
	a := &s.admission
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, of := range s.usages {
		u.Connections += of.active
		u.Requests += int(of.requests.Load())
	}
	u.Connections, u.Requests = max(u.Connections, len(a.open)), max(u.Requests, int(a.requests.Load()))
	return u
}
