package web

import (
	"context"
	"net"
	"net/netip"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/trace/request"
)

const lbProtocol, lbBackend = "fairlead.dev/lb-protocol", "fairlead.dev/lb-backend-protocol"

// rig is a Server with one Service, and the engine that carries its requests.
type rig struct {
	*lbtest.Rig
	server      *proxied.Server
	service     proxied.Service
	logs        string            // the directory of access logs
	shown       shown             // what is shown to whoever records flows
	traced      request.Watch     // the requests that are traced
	bounds                        // of the engine, as it starts
	appProtocol string            // of the Services that routes lead to
	auth        netip.AddrPort    // the Pod of Service auth of Ingresses
	users       *basic.Users      // of Secret staff, likewise
	extra       map[string]string // the codings of Ingresses
	backends    map[string]string // of Ingresses, in place of port 80 of the Service web; a problem but for auth's

	engine *engine         // nil until there is a listener of HTTP
	config *proxied.Config // the last one
	// breaks has configurations be such that requests panic. good is the transport that they would have.
	breaks bool
	good   any
	// panicAt has connections, of which TLS is not expected, panic when they have read a text.
	panicAt atomic.Pointer[string]
}

func newRig(t testing.TB, annotations map[string]string) *rig {
	t.Helper()
	return newSmallRig(t, annotations, 0)
}

// newSmallRig returns a rig that has no more connections at a time.
func newSmallRig(t testing.TB, annotations map[string]string, most int) *rig {
	t.Helper()
	r := &rig{Rig: lbtest.New(t), logs: filepath.Join(t.TempDir(), "logs"), bounds: defaultBounds()}
	r.server = proxied.New(proxied.Options{
		Log: r.Logger(), AccessLogs: r.logs, Node: "n1", Engine: r.start, MaxConnections: most, Requests: &r.shown, Traced: &r.traced,
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		r.server.Close(ctx)
	})
	r.service = proxied.Service{Name: svc.Name{Namespace: "default", Name: "web"}, Addrs: []netip.Addr{r.At.Addr()},
		Backends: map[uint16][]netip.AddrPort{}}
	r.ask(annotations)
	return r
}

// ask changes the annotations.
func (r *rig) ask(annotations map[string]string) {
	r.service.Spec = dialect.Read(dialect.Service{
		Annotations: annotations, Ports: []dialect.Port{{Name: "web", Number: r.At.Port(), Protocol: "TCP"}},
	}).Spec
}

// set makes the Server serve the Service with Pods.
func (r *rig) set(pods ...netip.AddrPort) {
	r.Helper()
	r.service.Backends = map[uint16][]netip.AddrPort{r.At.Port(): pods}
	if failed := r.server.Set([]*proxied.Service{new(r.service)}); len(failed) > 0 {
		r.Fatal(failed)
	}
}

// connections returns how many are open.
func (r *rig) connections() int { return r.server.Usage().Connections }

// start starts the engine.
func (r *rig) start(host proxied.Host) (proxied.Engine, error) {
	e, err := start(host, r.bounds)
	r.engine = e
	if err == nil {
		e.netHTTP = newReference(e, host).carry
	}
	return watched{e, r}, err
}

// watched is the engine of a rig, which sees its configurations and can make it panic.
type watched struct {
	*engine
	rig *rig
}

func (w watched) Configure(c, old *proxied.Config) {
	if old != nil && old.Transport == nil {
		whole := *old
		whole.Transport, old = w.rig.good, &whole
	}
	w.engine.Configure(c, old)
	w.rig.config = c
	if w.rig.breaks {
		w.rig.good, c.Transport = c.Transport, nil
	}
}

func (w watched) Serve(conn stream.Conn, l *proxied.Listener, c *proxied.Config, client, at netip.AddrPort) proxied.Parked {
	if text := w.rig.panicAt.Load(); text != nil {
		plain := *c
		plain.TLS, c = nil, &plain
		conn = lbtest.BadStream{TCPConn: conn.(*net.TCPConn), At: *text}
	}
	return w.engine.Serve(conn, l, c, client, at)
}
