package dns

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	mdns "github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func headless(ns, name string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: "None", Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}
}

func sliceOf(ns, service string, n int) *discoveryv1.EndpointSlice {
	e := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: ns, Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	a := netip.MustParseAddr("10.244.0.1")
	for range n {
		e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{Addresses: []string{a.String()}})
		a = a.Next()
	}
	name, tcp, port := "http", corev1.ProtocolTCP, int32(8080)
	e.Ports = []discoveryv1.EndpointPort{{Name: &name, Protocol: &tcp, Port: &port}}
	return e
}

// BenchmarkAnswer is the work on a packet between the two system calls.
func BenchmarkAnswer(b *testing.B) {
	o := clusterOptions()
	o.Listen = []string{"127.0.0.1:0"}
	s, err := New(o)
	if err != nil {
		b.Fatal(err)
	}
	fill(s.Zone(), objects(b))
	s.Zone().SetService(headless("prod", "fifty"))
	s.Zone().SetSlice(sliceOf("prod", "fifty", 50))
	for _, c := range []struct {
		what, name string
		typ        uint16
	}{
		{"A", "my-service.prod.svc.cluster.local.", mdns.TypeA},
		{"AAAA-nodata", "my-service.prod.svc.cluster.local.", mdns.TypeAAAA},
		{"A-headless50", "fifty.prod.svc.cluster.local.", mdns.TypeA},
		{"SRV", "_http._tcp.dual.prod.svc.cluster.local.", mdns.TypeSRV},
		{"NXDOMAIN", "www.example.com.prod.svc.cluster.local.", mdns.TypeA},
		{"PTR", "20.0.96.10.in-addr.arpa.", mdns.TypePTR},
	} {
		b.Run(c.what, func(b *testing.B) {
			m := question(c.name, c.typ)
			m.SetEdns0(1232, false)
			req, _ := m.Pack()
			w := s.newWorker(true, &workerStats{})
			b.ReportAllocs()
			for b.Loop() {
				if w.answer(req) != reply {
					b.Fatal("no answer")
				}
				w.count(len(req), 0)
			}
		})
	}
}

// cluster is 10,000 Services, a tenth of them headless, with 10 endpoints each.
func cluster() (services []*corev1.Service, slices []*discoveryv1.EndpointSlice) {
	a := netip.MustParseAddr("10.244.0.1")
	for i := range 10000 {
		s := headless("ns-"+fmt.Sprint(i%100), "svc-"+fmt.Sprint(i))
		if i%10 != 0 {
			s.Spec.ClusterIP = netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String()
		}
		services = append(services, s)
		e := sliceOf(s.Namespace, s.Name, 10)
		for j := range e.Endpoints {
			e.Endpoints[j].Addresses[0] = a.String()
			a = a.Next()
		}
		slices = append(slices, e)
	}
	return services, slices
}

func loaded(b *testing.B, services []*corev1.Service, slices []*discoveryv1.EndpointSlice) *Server {
	s, err := New(Options{Listen: []string{"127.0.0.1:0"}})
	if err != nil {
		b.Fatal(err)
	}
	s.Zone().Hold()
	for _, v := range services {
		s.Zone().SetService(v)
	}
	for _, e := range slices {
		s.Zone().SetSlice(e)
	}
	s.Zone().Release()
	return s
}

// BenchmarkLoad fills a zone with 10,000 Services and 100,000 endpoints, and
// reports the memory it takes. Expected: at most 2 s and 80 MB.
func BenchmarkLoad(b *testing.B) {
	services, slices := cluster()
	var before, after runtime.MemStats
	var s *Server
	for b.Loop() {
		s = nil //nolint:ineffassign // what the last round loaded must not count
		runtime.GC()
		runtime.ReadMemStats(&before)
		s = loaded(b, services, slices)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/1e6, "MB")
	runtime.KeepAlive(s)
}

// BenchmarkChange makes one endpoint of a Service unready and ready again.
// Expected: the same cost in a cluster of any size.
func BenchmarkChange(b *testing.B) {
	services, slices := cluster()
	for _, n := range []int{10, 10000} {
		s := loaded(b, services[:n], slices[:n])
		e := slices[5].DeepCopy()
		ready := false
		e.Endpoints[3].Conditions.Ready = &ready
		b.Run(fmt.Sprint(n, "-services"), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				ready = !ready
				s.Zone().SetSlice(e)
			}
		})
	}
}
