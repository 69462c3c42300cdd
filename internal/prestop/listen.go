package prestop

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// maxConnections bounds the open connections of each address family. More are closed at once, which ends a Pod as
	// without a hook: a connection that waited for another one's end would hold its Pod.
	maxConnections = 512
	// listenRetry is the time between attempts to listen, and to lead requests here.
	listenRetry = time.Second
	// repairPeriod is how often what leads requests here is written again. Each time the audit of mode nft that follows reads all.
	repairPeriod = 10 * time.Minute
	// lastAnswers bounds how long requests that wait go on after the end of Run's context.
	lastAnswers = 5 * time.Second
)

// lead keeps the way to the server until ctx ends. It writes the rules again now and then: another program may remove them.
func (s *Server) lead(ctx context.Context) {
	retry, repair := time.NewTicker(listenRetry), time.NewTicker(repairPeriod)
	defer retry.Stop()
	defer repair.Stop()
	for pending, warned := true, false; ; {
		select {
		case <-ctx.Done():
			return
		case <-s.pods.moved:
			pending = true
		case <-repair.C:
			pending = true
		case <-retry.C:
		}
		if !pending {
			continue
		}
		err := link.SetInward(s.opts.Port, s.pods.addrs())
		if err != nil && !warned {
			s.opts.Log.Warn("cannot lead preStop requests of this node's Pods here; the Pods end at once; retrying", "err", err,
				"period", listenRetry)
		}
		pending, warned = err != nil, err != nil
	}
}

// listen serves until ctx ends, and then what waits for a while.
func (s *Server) listen(ctx context.Context) {
	server := &http.Server{
		Handler: s, ReadHeaderTimeout: 2 * time.Second, MaxHeaderBytes: 4 << 10, WriteTimeout: s.opts.Wait + 2*lastAnswers,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, calledKey{}, c.(*admitted).called)
		},
		ErrorLog: slog.NewLogLogger(s.opts.Log.Handler(), slog.LevelDebug),
	}
	server.SetKeepAlivesEnabled(false)
	var wg sync.WaitGroup
	for _, family := range socket.UsableFamilies() {
		wg.Go(func() { s.listenOn(ctx, server, family) })
	}
	<-ctx.Done()
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastAnswers)
	defer cancel()
	_ = server.Shutdown(last)
	_ = server.Close()
	wg.Wait()
}

func (s *Server) listenOn(ctx context.Context, server *http.Server, family svc.Family) {
	at, network := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), s.opts.Port), "tcp4"
	if family == svc.IPv6 {
		at, network = netip.AddrPortFrom(netip.IPv6Loopback(), s.opts.Port), "tcp6"
	}
	for warned := false; ctx.Err() == nil; {
		l, err := (&net.ListenConfig{}).Listen(ctx, network, at.String())
		if err == nil {
			warned = false
			err = server.Serve(&gate{Listener: l, known: s.pods.has, rejected: s.metrics.rejected, slots: make(chan struct{}, maxConnections)})
		}
		if errors.Is(err, http.ErrServerClosed) || ctx.Err() != nil {
			return
		}
		if !warned {
			warned = true
			s.opts.Log.Warn("cannot answer preStop requests; Pods end at once; retrying", "address", at, "err", err, "period", listenRetry)
		}
		select {
		case <-ctx.Done():
		case <-time.After(listenRetry):
		}
	}
}

// gate closes connections to addresses that are no Pod's of this node, and those that are too many, as soon as they are
// accepted.
type gate struct {
	net.Listener
	known    func(netip.Addr) bool
	rejected interface{ Inc() }
	slots    chan struct{}
}

// Accept returns the next connection to a Pod's address.
func (g *gate) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if called := calledOf(c); g.known(called) {
			select {
			case g.slots <- struct{}{}:
				return &admitted{Conn: c, called: called, leave: sync.OnceFunc(func() { <-g.slots })}, nil
			default:
			}
		}
		g.rejected.Inc()
		_ = c.Close()
	}
}

// admitted is a connection that has a slot until it is closed.
type admitted struct {
	net.Conn
	called netip.Addr
	leave  func()
}

// Close closes the connection.
func (a *admitted) Close() error {
	defer a.leave()
	return a.Conn.Close()
}

// calledKey is of the address of the Pod that a connection has called, in the context of its requests.
type calledKey struct{}

// calledOf returns the address that a connection has called, the zero Addr if nothing has led it here.
func calledOf(c net.Conn) netip.Addr {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return netip.Addr{}
	}
	to, err := socket.OriginalDestination(t)
	if err != nil {
		return netip.Addr{}
	}
	return to.Addr()
}
