package table

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func benchService(i int) *corev1.Service {
	ip := fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&255, i&255)
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: fmt.Sprintf("svc-%d", i)},
		Spec: corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip},
			Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}},
	}
}

func benchSlice(i, endpoints, shift int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: fmt.Sprintf("svc-%d-a", i),
			Labels: map[string]string{discoveryv1.LabelServiceName: fmt.Sprintf("svc-%d", i)}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
	}
	for e := range endpoints {
		n := i*endpoints + e + shift
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 128+n>>16, n>>8&255, n&255)}, NodeName: new("node"),
			Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
		})
	}
	return s
}

func fill(b *Builder, services, endpoints int) {
	for i := range services {
		b.SetService(benchService(i))
		b.SetSlice(benchSlice(i, endpoints, 0))
	}
}

// BenchmarkOneChange: one endpoint of one of 10,000 services changes. Expected
// well under 50 µs, and the same at 1,000 services.
func BenchmarkOneChange(b *testing.B) {
	for _, services := range []int{1_000, 10_000, 50_000} {
		b.Run(fmt.Sprintf("%dx10", services), func(b *testing.B) {
			builder := NewBuilder(Config{NodeName: "here"})
			fill(builder, services, 10)
			builder.Build()
			var steps []*discoveryv1.EndpointSlice
			for i := range 64 {
				steps = append(steps, benchSlice(i*7%services, 10, 0), benchSlice(i*7%services, 10, 1))
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				i++
				builder.SetSlice(steps[i%len(steps)])
				if _, changed := builder.Build(); len(changed) > 1 {
					b.Fatal(len(changed))
				}
			}
		})
	}
}

// BenchmarkUnreached: a node that has one of the ten endpoints of each of 10,000 services is not reached, and is again. Expected
// about as long as a full Build of 10,000 services; a node without endpoints costs a look at all of them.
func BenchmarkUnreached(b *testing.B) {
	for name, nodes := range map[string][]string{"concerned": {"away"}, "unconcerned": {"other"}} {
		b.Run(name, func(b *testing.B) {
			builder := NewBuilder(Config{NodeName: "here"})
			for i := range 10_000 {
				builder.SetService(benchService(i))
				slice := benchSlice(i, 10, 0)
				slice.Endpoints[3].NodeName = new("away")
				builder.SetSlice(slice)
			}
			builder.Build()
			for b.Loop() {
				builder.SetUnreached(nodes)
				if _, changed := builder.Build(); len(changed) > 0 != (name == "concerned") {
					b.Fatal(len(changed))
				}
				builder.SetUnreached(nil)
				builder.Build()
			}
		})
	}
}

// BenchmarkFullBuild: everything from nothing. Expected about 5 µs a service of
// ten endpoints.
func BenchmarkFullBuild(b *testing.B) {
	for _, size := range [][2]int{{5_000, 50}, {10_000, 10}, {50_000, 10}} {
		b.Run(fmt.Sprintf("%dx%d", size[0], size[1]), func(b *testing.B) {
			var services []*corev1.Service
			var slices []*discoveryv1.EndpointSlice
			for i := range size[0] {
				services = append(services, benchService(i))
				slices = append(slices, benchSlice(i, size[1], 0))
			}
			b.ReportAllocs()
			for b.Loop() {
				builder := NewBuilder(Config{NodeName: "here"})
				for i := range services {
					builder.SetService(services[i])
					builder.SetSlice(slices[i])
				}
				if t, _ := builder.Build(); t.Len() != size[0] {
					b.Fatal(t.Len())
				}
			}
		})
	}
}

// TestBenchmarksRun keeps the benchmarks' set-up working.
func TestBenchmarksRun(t *testing.T) {
	b := NewBuilder(Config{NodeName: "here"})
	fill(b, 300, 3)
	tab, changed := b.Build()
	if tab.Len() != 300 || len(changed) != 300 {
		t.Fatal(tab.Len(), len(changed))
	}
	b.SetSlice(benchSlice(7, 3, 1))
	if _, changed = b.Build(); len(changed) != 1 {
		t.Fatal(changed)
	}
}
