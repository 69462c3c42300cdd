package proxied

import (
	"context"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/svc"
)

// rig is a Server with one Service.
type rig struct {
	*lbtest.Rig
	server  *Server
	service Service
}

func newRig(t testing.TB, annotations map[string]string) *rig {
	t.Helper()
	r := &rig{Rig: lbtest.New(t)}
	r.server = New(Options{Log: r.Logger(), AccessLogs: filepath.Join(t.TempDir(), "logs"), Node: "n1"})
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		r.server.Close(ctx)
	})
	r.service = Service{Name: svc.Name{Namespace: "default", Name: "web"}, Addrs: []netip.Addr{r.At.Addr()},
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
	if failed := r.server.Set([]*Service{new(r.service)}); len(failed) > 0 {
		r.Fatal(failed)
	}
}
