package front

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clienttesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/svc"
)

// backendRig is a Front without Services that follows backends, of namespaces shop and other.
type backendRig struct {
	*rig
	f       *Front
	running sync.WaitGroup
}

func newBackendRig(t *testing.T) *backendRig {
	r := &backendRig{rig: newRig(t)}
	r.f = New(Options{NodeName: "node1", Client: r.client})
	t.Cleanup(func() { r.follow(); r.running.Wait() })
	return r
}

// follow follows these backends, "NAMESPACE/NAME", and no others.
func (r *backendRig) follow(backends ...string) {
	named := map[svc.Name]bool{}
	for _, b := range backends {
		namespace, name, _ := strings.Cut(b, "/")
		named[svc.Name{Namespace: namespace, Name: name}] = true
	}
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	r.f.routing.followBackends(r.Context(), &r.running, named)
}

func (r *backendRig) slice(namespace, name, service, addr string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{addr}}},
		Ports: []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(80)), Protocol: new(corev1.ProtocolTCP)}},
	}
}

func (r *backendRig) create(o *discoveryv1.EndpointSlice) {
	r.Helper()
	_, err := r.client.DiscoveryV1().EndpointSlices(o.Namespace).Create(r.Context(), o, metav1.CreateOptions{})
	r.must(err)
}

// leads waits until a backend has these addresses.
func (r *backendRig) leads(namespace, name string, addrs ...string) {
	r.Helper()
	r.eventually(namespace+"/"+name+" at "+fmt.Sprint(addrs), func() error {
		r.f.mu.Lock()
		defer r.f.mu.Unlock()
		n := svc.Name{Namespace: namespace, Name: name}
		t := r.f.routing.backends[n]
		if !t.listed {
			return fmt.Errorf("it is not listed")
		}
		var got []string
		for _, a := range t.endpoints(gateway.Backend{Name: n, Port: 80, Protocol: gateway.HTTP1}, "node1", "") {
			got = append(got, netip.AddrPort(a).Addr().String())
		}
		if slices.Sort(got); !slices.Equal(got, addrs) {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}

// watches returns how many watches have begun, for one Service each and for all of a namespace.
func (r *backendRig) watches() (one, all int) {
	for _, a := range r.client.Actions() {
		if w, ok := a.(clienttesting.WatchAction); ok && strings.Contains(w.GetWatchRestrictions().Labels.String(), "=") {
			one++
		} else if ok {
			all++
		}
	}
	return one, all
}

// Few backends of a namespace have a watch each. More have one together, which takes over without a moment in which a backend lacks
// its endpoints, and gives new ones theirs at once.
func TestManyBackends(t *testing.T) {
	r := newBackendRig(t)
	var few, many []string
	for i := range 3 * maxAlone {
		name := fmt.Sprint("s", i)
		r.create(r.slice("shop", name+"-1", name, fmt.Sprint("10.0.0.", i+1)))
		if many = append(many, "shop/"+name); i < maxAlone {
			few = append(few, "shop/"+name)
		}
	}
	r.create(r.slice("other", "s0-1", "s0", "10.0.1.1"))
	r.follow(append(few, "other/s0")...)
	for i := range few {
		r.leads("shop", fmt.Sprint("s", i), fmt.Sprint("10.0.0.", i+1))
	}
	r.leads("other", "s0", "10.0.1.1")
	if one, all := r.watches(); one != maxAlone+1 || all != 0 {
		t.Errorf("%d watches of Services and %d of namespaces for few, want %d and 0", one, all, maxAlone+1)
	}
	r.follow(append(many, "other/s0")...)
	r.leads("shop", "s0", "10.0.0.1") // nothing is waited for
	for i := range many {
		r.leads("shop", fmt.Sprint("s", i), fmt.Sprint("10.0.0.", i+1))
	}
	if one, all := r.watches(); one != maxAlone+1 || all != 1 {
		t.Errorf("%d watches of Services and %d of namespaces for many, want %d and 1", one, all, maxAlone+1)
	}

	r.create(r.slice("shop", "s0-2", "s0", "10.0.0.99"))
	r.leads("shop", "s0", "10.0.0.1", "10.0.0.99")
	moved := r.slice("shop", "s0-2", "s1", "10.0.0.99") // it is of another Service now
	_, err := r.client.DiscoveryV1().EndpointSlices("shop").Update(r.Context(), moved, metav1.UpdateOptions{})
	r.must(err)
	r.leads("shop", "s0", "10.0.0.1")
	r.leads("shop", "s1", "10.0.0.2", "10.0.0.99")
	r.must(r.client.DiscoveryV1().EndpointSlices("shop").Delete(r.Context(), "s0-1", metav1.DeleteOptions{}))
	r.leads("shop", "s0")

	r.create(r.slice("shop", "late-1", "late", "10.0.0.77"))
	r.create(r.slice("shop", "sign-1", "sign", "10.0.0.78"))
	r.follow(append(many, "shop/sign")...)
	r.leads("shop", "sign", "10.0.0.78")
	r.follow(append(many, "shop/late")...)
	r.f.mu.Lock()
	late := r.f.routing.backends[svc.Name{Namespace: "shop", Name: "late"}]
	if len(late.slices) == 0 || !late.listed {
		t.Error("a further backend waits for a list")
	}
	r.f.mu.Unlock()
	r.follow(few[:2]...) // they stay together
	r.leads("shop", "s1", "10.0.0.2", "10.0.0.99")
	if one, all := r.watches(); one != maxAlone+1 || all != 1 {
		t.Errorf("%d watches of Services and %d of namespaces in the end, want %d and 1", one, all, maxAlone+1)
	}
}
