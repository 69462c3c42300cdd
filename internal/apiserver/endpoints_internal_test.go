package apiserver

import (
	"log/slog"
	"net/netip"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// A server that leaves while another one writes the endpoints leaves them all the same.
func TestServersWriteEndpointsAtATime(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset()
	servers := map[string]*endpointKeeper{}
	for _, at := range []string{"192.0.2.1:6443", "192.0.2.2:6443"} {
		k := newEndpointKeeper(client, false, slog.New(slog.DiscardHandler))
		k.self, k.report = netip.MustParseAddrPort(at), func() pki.Report { return pki.Report{} }
		if err := k.join(t.Context()); err != nil {
			t.Fatal(err)
		}
		servers[at] = k
	}
	for _, kind := range []string{"endpoints", "endpointslices"} {
		conflicts := 0
		client.PrependReactor("update", kind, func(clienttesting.Action) (bool, runtime.Object, error) {
			conflicts++
			return conflicts == 1, nil, apierrors.NewConflict(schema.GroupResource{Resource: kind}, "kubernetes", nil)
		})
		if err := servers["192.0.2.1:6443"].leave(); err != nil || conflicts != 2 {
			t.Errorf("%s after %d writes: %v", kind, conflicts, err)
		}
		slice, err := client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Get(t.Context(), "kubernetes", metav1.GetOptions{})
		if err != nil || len(slice.Endpoints) != 1 || slice.Endpoints[0].Addresses[0] != "192.0.2.2" {
			t.Errorf("%v: %v", slice, err)
		}
		if err := servers["192.0.2.1:6443"].join(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}
