package chain

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// endpoint is where a listener is. The host is empty for all addresses.
type endpoint struct {
	host      string
	port      uint16
	transport string
}

// serverName returns the label of a listener, as CoreDNS writes it.
func serverName(e endpoint) string {
	return e.transport + "://" + net.JoinHostPort(e.host, strconv.Itoa(int(e.port)))
}

// hostsOf returns the addresses of a block's line bind; names of interfaces stand for theirs.
func hostsOf(b *corefile.Block) ([]string, error) {
	if len(b.Bind) == 0 {
		return []string{""}, nil
	}
	except, err := addresses(b, b.Except)
	if err != nil {
		return nil, err
	}
	hosts, err := addresses(b, b.Bind)
	if err != nil {
		return nil, err
	}
	hosts = slices.DeleteFunc(hosts, func(h string) bool { return slices.Contains(except, h) })
	if len(hosts) == 0 {
		return nil, fmt.Errorf("%s: bind leaves no address to listen on", b.Pos)
	}
	return hosts, nil
}

func addresses(b *corefile.Block, names []string) (out []string, err error) {
	for _, n := range names {
		if a, err := netip.ParseAddr(n); err == nil {
			if a.IsUnspecified() {
				n = ""
			}
			out = append(out, n)
			continue
		}
		i, err := net.InterfaceByName(n)
		if err != nil {
			return nil, fmt.Errorf("%s: bind: %q is neither an IP address nor an interface of this machine", b.Pos, n)
		}
		addrs, err := i.Addrs()
		if err != nil {
			return nil, fmt.Errorf("%s: bind: %w", b.Pos, err)
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLinkLocalUnicast() {
				out = append(out, p.Addr().String())
			}
		}
	}
	return out, nil
}

// serverTLS reads the certificate of a listener; nil for none.
func serverTLS(c *corefile.TLS) (*tls.Config, error) {
	if c == nil {
		return nil, nil
	}
	pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	if err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"dot"}}
	conf.ClientAuth = map[string]tls.ClientAuthType{
		"nocert": tls.NoClientCert, "request": tls.RequestClientCert, "require": tls.RequireAnyClientCert,
		"verify_if_given": tls.VerifyClientCertIfGiven, "require_and_verify": tls.RequireAndVerifyClientCert,
	}[c.ClientAuth]
	if c.CA == "" {
		return conf, nil
	}
	pem, err := os.ReadFile(c.CA)
	if err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	conf.ClientCAs = x509.NewCertPool()
	if !conf.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("tls: %s has no certificate", c.CA)
	}
	return conf, nil
}

// listener is the sockets of an endpoint. Its routes change with the instance.
type listener struct {
	at      endpoint
	routes  atomic.Pointer[routes]
	tcp     net.Listener
	udp     []net.PacketConn
	servers []*mdns.Server
	wg      sync.WaitGroup
	ctx     context.Context
	stop    context.CancelFunc
}

// share lets sockets of the next instance have the port, until these are closed.
func (l *listener) share() error {
	errs := []error{socket.Share(l.tcp.(*limited).Listener)}
	for _, c := range l.udp {
		errs = append(errs, socket.Share(c))
	}
	return errors.Join(errs...)
}

// open opens the sockets. Shared ones may have a port that other sockets of this server have.
func open(at endpoint, r *routes, shared bool) (*listener, error) {
	l := &listener{at: at}
	l.routes.Store(r)
	host := netip.IPv6Unspecified()
	if at.host != "" {
		host = netip.MustParseAddr(at.host)
	}
	err := l.openAt(netip.AddrPortFrom(host, at.port), r, shared)
	if at.host == "" && err != nil && !errors.Is(err, os.ErrPermission) {
		// A machine without IPv6.
		if l.openAt(netip.AddrPortFrom(netip.IPv4Unspecified(), at.port), r, shared) == nil {
			err = nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w", serverName(at), err)
	}
	return l, nil
}

func (l *listener) openAt(addr netip.AddrPort, r *routes, shared bool) error {
	sockets := max(1, r.sockets)
	shared = shared || sockets > 1
	for i := range sockets {
		lc := socket.ListenConfig(addr, socket.Options{Shared: shared, KeepAlive: i == 0})
		if i == 0 {
			tcp, err := lc.Listen(context.Background(), "tcp", addr.String())
			if err != nil {
				return err
			}
			l.tcp = newLimited(tcp)
		}
		if l.at.transport == corefile.TLSTransport {
			return nil
		}
		pc := socket.ListenConfig(addr, socket.Options{Shared: shared})
		udp, err := pc.ListenPacket(context.Background(), "udp", addr.String())
		if err != nil {
			l.closeSockets()
			return err
		}
		l.udp = append(l.udp, udp)
	}
	return nil
}

func (l *listener) closeSockets() {
	l.tcp.Close()
	for _, c := range l.udp {
		c.Close()
	}
	l.udp = nil
}

// idleTimeout is how long a connection may be silent, as in CoreDNS.
const idleTimeout = 10 * time.Second

// serve answers until close.
func (l *listener) serve() {
	l.ctx, l.stop = context.WithCancel(context.Background())
	handler := mdns.HandlerFunc(func(w mdns.ResponseWriter, m *mdns.Msg) { l.routes.Load().serve(l.ctx, w, m) })
	run := func(s *mdns.Server) {
		s.Handler, s.IdleTimeout = handler, func() time.Duration { return idleTimeout }
		// Answers are never answered: two servers that do so never stop.
		s.MsgAcceptFunc = accept
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		l.servers = append(l.servers, s)
		l.wg.Go(func() { _ = s.ActivateAndServe() })
		<-started
	}
	tcp := l.tcp
	if conf := l.routes.Load().tls; l.at.transport == corefile.TLSTransport && conf != nil {
		tcp = tls.NewListener(tcp, &tls.Config{
			MinVersion:         tls.VersionTLS12,
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return l.routes.Load().tls, nil },
			NextProtos:         []string{"dot"}, Certificates: conf.Certificates,
		})
	}
	run(&mdns.Server{Listener: tcp})
	for _, c := range l.udp {
		run(&mdns.Server{PacketConn: c, UDPSize: mdns.DefaultMsgSize})
	}
}

// accept lets every question through, so that the chain answers what it does not support.
func accept(h mdns.Header) mdns.MsgAcceptAction {
	const response = 1 << 15
	switch {
	case h.Bits&response != 0:
		return mdns.MsgIgnore
	case h.Qdcount != 1 || h.Ancount > 1 || h.Nscount > 1 || h.Arcount > 3:
		return mdns.MsgReject
	}
	return mdns.MsgAccept
}

// close closes the sockets, and waits for the questions in work.
func (l *listener) close() {
	l.stop()
	var wg sync.WaitGroup
	for _, s := range l.servers {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_ = s.ShutdownContext(ctx)
		})
	}
	wg.Wait()
	l.wg.Wait()
}

// Bounds of the connections of a listener: in all, and of one client.
const (
	maxConns       = 1000
	maxClientConns = 250
)

// limited closes connections beyond the bounds at once.
type limited struct {
	net.Listener
	mu    sync.Mutex
	total int
	by    map[netip.Addr]int
}

func newLimited(l net.Listener) *limited { return &limited{Listener: l, by: map[netip.Addr]int{}} }

// Accept returns the next connection within the bounds.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		a := clientOf(c.RemoteAddr()).Addr().Unmap()
		if l.take(a) {
			return &limitedConn{Conn: c, release: sync.OnceFunc(func() { l.release(a) })}, nil
		}
		c.Close()
	}
}

func (l *limited) take(a netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.total >= maxConns || l.by[a] >= maxClientConns {
		return false
	}
	l.total++
	l.by[a]++
	return true
}

func (l *limited) release(a netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total--
	if l.by[a]--; l.by[a] == 0 {
		delete(l.by, a)
	}
}

type limitedConn struct {
	net.Conn
	release func()
}

// Close closes the connection and gives its place back.
func (c *limitedConn) Close() error {
	c.release()
	return c.Conn.Close()
}
