package zone

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// crowd is a zone of n headless Services of 10 endpoints each, with a port, and
// their slices.
func crowd(t *testing.T, n int) (*Zone, []*discoveryv1.EndpointSlice) {
	t.Helper()
	z, err := New(Config{Domains: []string{"cluster.local"}, Reverse: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}})
	if err != nil {
		t.Fatal(err)
	}
	name, port := "http", int32(80)
	a := netip.MustParseAddr("10.0.0.1")
	var out []*discoveryv1.EndpointSlice
	for i := range n {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: fmt.Sprint("s", i)},
			Spec: corev1.ServiceSpec{ClusterIP: "None"}}
		z.SetService(s)
		e := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: s.Name + "-1", Labels: map[string]string{ServiceNameLabel: s.Name}},
			Ports:      []discoveryv1.EndpointPort{{Name: &name, Port: &port}},
		}
		for range 10 {
			e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{Addresses: []string{a.String()}})
			a = a.Next()
		}
		z.SetSlice(e)
		out = append(out, e)
	}
	return z, out
}

// answers are what every name has at the moment. An answer that was made again
// is another one, even if it says the same.
func (z *Zone) answers() map[string]*records {
	out := map[string]*records{}
	z.names.each(func(key string, r *records) { out[key] = r })
	return out
}

// touched are the names whose answers are others than before, in text.
func touched(before, after map[string]*records) map[string]bool {
	out := map[string]bool{}
	text := func(key string) string {
		if key[0] == 0 {
			a, _ := netip.AddrFromSlice([]byte(key[1:]))
			return reverseText(a)
		}
		return wireText([]byte(key))
	}
	for key, r := range after {
		if before[key] != r {
			out[text(key)] = true
		}
	}
	for key := range before {
		if after[key] == nil {
			out[text(key)] = true
		}
	}
	return out
}

// A change of one endpoint makes the answers anew in which it is, and no other:
// not those of its Service's other endpoints, and none of another Service.
func TestChangeTouchesItsNamesOnly(t *testing.T) {
	const changed = 37
	z, slices := crowd(t, 100)
	e := slices[changed]
	ready := false
	own := func(names ...string) string {
		for i, n := range names {
			names[i] = strings.ReplaceAll(n, "SVC", fmt.Sprintf("s%d.prod.svc.", changed))
		}
		return strings.Join(names, " ")
	}
	for _, c := range []struct {
		what   string
		change func()
		want   string
	}{
		{"becomes unready", func() { e.Endpoints[3].Conditions.Ready = &ready; z.SetSlice(e) },
			own("SVC", "_http._tcp.SVC", "10-0-1-118.SVC", "118.1.0.10.in-addr.arpa.")},
		{"is ready again", func() { e.Endpoints[3].Conditions.Ready = nil; z.SetSlice(e) },
			own("SVC", "_http._tcp.SVC", "10-0-1-118.SVC", "118.1.0.10.in-addr.arpa.")},
		{"moves", func() { e.Endpoints[3].Addresses = []string{"10.9.9.9"}; z.SetSlice(e) },
			own("SVC", "_http._tcp.SVC", "10-0-1-118.SVC", "118.1.0.10.in-addr.arpa.", "10-9-9-9.SVC", "9.9.9.10.in-addr.arpa.")},
		{"changes in what no answer has", func() { node := "n"; e.Endpoints[3].NodeName = &node; z.SetSlice(e) }, ""},
		{"the whole Service goes", func() { z.DeleteSlice(svc.Name{Namespace: "prod", Name: e.Name}) }, "all of its names"},
	} {
		before, serial := z.answers(), z.Serial()
		c.change()
		got := touched(before, z.answers())
		if more := z.Serial() - serial; more > 1 || (more == 1) != (c.want != "") {
			t.Errorf("%s: the serial number grew by %d", c.what, more)
		}
		if c.want == "all of its names" {
			if len(got) != 3+2*10 { // its own, _tcp, _http._tcp; an endpoint's and its reverse
				t.Errorf("%s: touched %d names: %v", c.what, len(got), got)
			}
			continue
		}
		want := strings.Fields(c.want)
		for _, n := range want {
			if !got[n] {
				t.Errorf("%s: %s is not made anew", c.what, n)
			}
			delete(got, n)
		}
		if len(got) > 0 {
			t.Errorf("%s: touched too: %v", c.what, got)
		}
	}
}

// What a change costs depends on its Service, not on how many others there are.
func TestChangeCostsTheSameInAnyZone(t *testing.T) {
	cost := func(n int) float64 {
		z, slices := crowd(t, n)
		e, ready := slices[5], false
		e.Endpoints[3].Conditions.Ready = &ready
		return testing.AllocsPerRun(20, func() {
			ready = !ready
			z.SetSlice(e)
		})
	}
	few, many := cost(10), cost(2000)
	// The table of names grows in steps; nothing else may differ.
	if many > few+1 {
		t.Errorf("%v allocations in a zone of 10 Services, %v in one of 2000", few, many)
	}
}
