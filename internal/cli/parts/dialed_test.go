package parts

import (
	"net"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Where a client reaches its server is known by address, whatever name it was
// given.
func TestDialed(t *testing.T) {
	server := httptest.NewServer(nil)
	defer server.Close()
	at := server.Listener.Addr().(*net.TCPAddr).AddrPort()
	cfg := &rest.Config{Host: "http://" + net.JoinHostPort("localhost", strconv.Itoa(int(at.Port())))}
	var reached Dialed
	reached.Record(cfg)
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if got := reached.Servers(); len(got) > 0 {
		t.Errorf("before the first request: %v", got)
	}
	_, _ = client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{}) // 404
	if got := reached.Servers(); !slices.Equal(got, []netip.AddrPort{at}) {
		t.Errorf("reached %v, want %v", got, at)
	}
	for port := range 2 * maxDialed {
		reached.add(&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: port + 1})
		reached.add(&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: port + 1})
	}
	got := reached.Servers()
	if len(got) != maxDialed || !slices.Contains(got, netip.MustParseAddrPort("192.0.2.1:32")) || slices.Contains(got, at) {
		t.Errorf("of many it knows %v", got)
	}
}
