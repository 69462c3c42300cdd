package proxy

import (
	"net"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes/fake"
)

// With ListenOrFail a proxy ends when its port is taken, and says which.
func TestListenOrFail(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p, err := New(Options{
		Client: fake.NewClientset(), NodeName: "here", Dataplane: newFakeDataplane(), MetricsAddress: l.Addr().String(), ListenOrFail: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Run(t.Context()); err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("Run returned %v", err)
	}
}
