package web

import (
	"net"
	"net/http"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/dialect"
)

// HTTP and UDP have one address and port (behaviours 171, 178).
func TestHTTPBesideUDP(t *testing.T) {
	r := newRig(t, nil)
	port := r.At.Port()
	r.service.Spec = dialect.Read(dialect.Service{Annotations: map[string]string{lbProtocol: "http"},
		Ports: []dialect.Port{{Name: "web", Number: port, Protocol: "TCP"}, {Name: "udp", Number: port, Protocol: "UDP"}}}).Spec
	r.service.Datagrams = map[uint16][]netip.AddrPort{port: {r.Echo("a")}}
	r.set(r.Web(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	answer, err := r.Client().Get("http://web/")
	r.Must(err)
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusNoContent {
		t.Errorf("HTTP: %s", answer.Status)
	}
	c, err := net.Dial("udp", r.At.String())
	r.Must(err)
	defer c.Close()
	if got := r.Asks(c, "x"); got != "a x" {
		t.Errorf("UDP: %q", got)
	}
}
