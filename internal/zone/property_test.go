package zone_test

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/zone"
)

// world is the objects that exist.
type world struct {
	services   map[svc.Name]*corev1.Service
	slices     map[svc.Name]*discoveryv1.EndpointSlice
	namespaces map[string]bool
}

func emptyWorld() *world {
	return &world{map[svc.Name]*corev1.Service{}, map[svc.Name]*discoveryv1.EndpointSlice{}, map[string]bool{}}
}

// rebuilt is a zone made from the objects at once.
func (w *world) rebuilt() *zone.Zone {
	z, _ := zone.New(propertyConfig())
	for n := range w.namespaces {
		z.SetNamespace(n)
	}
	for _, s := range w.slices {
		z.SetSlice(s)
	}
	for _, s := range w.services {
		z.SetService(s)
	}
	return z
}

func propertyConfig() zone.Config {
	return zone.Config{
		Domains:    []string{"cluster.local", "other.example"},
		Reverse:    []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
		NameServer: svc.Name{Namespace: "a", Name: "x"},
	}
}

// Few names and addresses, so that objects meet.
var (
	anyNamespace = rapid.SampledFrom([]string{"a", "b"})
	anyName      = rapid.SampledFrom([]string{"x", "y", "z"})
	anyAddr      = rapid.SampledFrom([]string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1", "fd00::2"})
	anyHostname  = rapid.SampledFrom([]string{"", "", "h-0", "H-0", "h-1", "10-0-0-1", "bad.name", strings.Repeat("l", 63)})
	anyPortName  = rapid.SampledFrom([]string{"", "http", "dns"})
	anyProtocol  = rapid.SampledFrom([]corev1.Protocol{"TCP", "UDP", ""})
)

func drawService(t *rapid.T) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: anyNamespace.Draw(t, "namespace"), Name: anyName.Draw(t, "name")}}
	switch rapid.IntRange(0, 3).Draw(t, "kind") {
	case 0:
		s.Spec.ClusterIP = "None"
	case 1:
		s.Spec.Type = corev1.ServiceTypeExternalName
		s.Spec.ExternalName = rapid.SampledFrom([]string{"www.example.com", "x.a.svc.cluster.local", "10.0.0.1", "", "a..b"}).Draw(t, "external")
	case 2: // no address yet
	default:
		s.Spec.ClusterIPs = rapid.SliceOfNDistinct(anyAddr, 1, 2, rapid.ID).Draw(t, "ips")
	}
	for range rapid.IntRange(0, 3).Draw(t, "ports") {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{
			Name: anyPortName.Draw(t, "port"), Protocol: anyProtocol.Draw(t, "protocol"), Port: int32(rapid.IntRange(1, 3).Draw(t, "number")),
		})
	}
	return s
}

func drawSlice(t *rapid.T) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: anyNamespace.Draw(t, "namespace"), Name: "s-" + anyName.Draw(t, "slice")},
	}
	if owner := rapid.SampledFrom([]string{"x", "y", "z", ""}).Draw(t, "owner"); owner != "" {
		s.Labels = map[string]string{zone.ServiceNameLabel: owner}
	}
	for range rapid.IntRange(0, 4).Draw(t, "endpoints") {
		e := discoveryv1.Endpoint{Addresses: []string{anyAddr.Draw(t, "address")}}
		if h := anyHostname.Draw(t, "hostname"); h != "" {
			e.Hostname = &h
		}
		if rapid.Bool().Draw(t, "known") {
			ready := rapid.Bool().Draw(t, "ready")
			e.Conditions.Ready = &ready
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	for range rapid.IntRange(0, 2).Draw(t, "ports") {
		name, protocol, number := anyPortName.Draw(t, "port"), anyProtocol.Draw(t, "protocol"), int32(rapid.IntRange(1, 3).Draw(t, "number"))
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &number})
	}
	return s
}

// However it came to be: a zone says what its objects say.
func TestIncrementalEqualsRebuilt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		z, err := zone.New(propertyConfig())
		if err != nil {
			t.Fatal(err)
		}
		w := emptyWorld()
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			switch rapid.IntRange(0, 8).Draw(t, "step") {
			case 0, 1:
				s := drawService(t)
				z.SetService(s)
				w.services[svc.Name{Namespace: s.Namespace, Name: s.Name}] = s
			case 2, 3:
				s := drawSlice(t)
				z.SetSlice(s)
				w.slices[svc.Name{Namespace: s.Namespace, Name: s.Name}] = s
			case 4:
				n := svc.Name{Namespace: anyNamespace.Draw(t, "namespace"), Name: anyName.Draw(t, "name")}
				z.DeleteService(n)
				delete(w.services, n)
			case 5:
				n := svc.Name{Namespace: anyNamespace.Draw(t, "namespace"), Name: "s-" + anyName.Draw(t, "slice")}
				z.DeleteSlice(n)
				delete(w.slices, n)
			case 6:
				n := anyNamespace.Draw(t, "namespace")
				if rapid.Bool().Draw(t, "there") {
					z.SetNamespace(n)
					w.namespaces[n] = true
				} else {
					z.DeleteNamespace(n)
					delete(w.namespaces, n)
				}
			case 7:
				z.Hold()
			case 8:
				z.Release()
			}
		}
		z.Release()
		r := w.rebuilt()
		if d := cmp.Diff(r.Dump(), z.Dump()); d != "" {
			t.Fatalf("-rebuilt +incremental:\n%s", d)
		}
		if len(z.Services()) != len(w.services) || len(z.Namespaces()) != len(w.namespaces) {
			t.Fatal("the lists of objects are wrong")
		}
		checkReadable(t, z)
		// Everything taken out leaves what a new zone has.
		for n := range w.services {
			z.DeleteService(n)
		}
		for n := range w.slices {
			z.DeleteSlice(n)
		}
		for n := range w.namespaces {
			z.DeleteNamespace(n)
		}
		if d := cmp.Diff(emptyWorld().rebuilt().Dump(), z.Dump()); d != "" {
			t.Fatalf("something stays behind:\n%s", d)
		}
	})
}

// checkReadable asks for every name of the dump in both domains and sees that
// the answer has the record.
func checkReadable(t *rapid.T, z *zone.Zone) {
	for line := range strings.Lines(z.Dump()) {
		f := strings.Fields(line)
		if len(f) < 4 {
			continue
		}
		names := []string{f[0]}
		if rest, ok := strings.CutSuffix(f[0], ".cluster.local."); ok {
			names = append(names, rest+".other.example.")
		}
		for _, name := range names {
			m := askAny(t, z, name, dns.StringToType[f[3]])
			if m == nil || len(m.Answer) == 0 {
				t.Fatalf("%s %s has no answer", name, f[3])
			}
		}
	}
}

func askAny(t *rapid.T, z *zone.Zone, name string, typ uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	buf, _ := m.Pack()
	q := zone.Question{Type: typ}
	q.Name.ParseWire(buf, 12)
	out, r := z.Answer(buf, &q, 65535)
	out[7], out[9], out[11] = byte(r.Answers), byte(r.Authority), byte(r.Additional)
	reply := new(dns.Msg)
	if err := reply.Unpack(out); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return reply
}

// Objects in the same state change nothing, not even the serial number.
func TestSameObjectChangesNothing(t *testing.T) {
	z := testZone(t)
	serial := z.Serial()
	load(t, z, "testdata/cluster.yaml")
	if z.Serial() != serial {
		t.Errorf("the serial number went from %d to %d", serial, z.Serial())
	}
}

// Readers see the old or the new answer of a name, never another.
func TestReadersBesideAWriter(t *testing.T) {
	z, err := zone.New(zone.Config{Domains: []string{"cluster.local"}})
	if err != nil {
		t.Fatal(err)
	}
	service := func(i int, headless bool) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprint("s", i)}}
		s.Spec.ClusterIP = "10.0.0.1"
		if headless {
			s.Spec.ClusterIP = "10.0.0.2"
		}
		return s
	}
	z.SetService(service(0, false))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				m := ask(t, z, "s0.a.svc.cluster.local.", dns.TypeA, 512)
				if len(m.Answer) != 1 {
					t.Errorf("s0 is gone: %v", m)
					return
				}
			}
		})
	}
	// The index grows several times while s0 is read and written.
	for i := range 800 {
		z.SetService(service(i+1, false))
		z.SetService(service(0, i%2 == 0))
	}
	for i := range 800 {
		z.DeleteService(svc.Name{Namespace: "a", Name: fmt.Sprint("s", i+1)})
	}
	close(stop)
	wg.Wait()
}
