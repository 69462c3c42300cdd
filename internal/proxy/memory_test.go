package proxy

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/pprof"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/testbed"
)

// BenchmarkMemory tells what a loaded node holds, in bytes for each endpoint:
// objects, Table, and what mode nft remembers. Expected: under 400 at
// 10,000 x 10, under 150 at 5,000 x 50.
func BenchmarkMemory(b *testing.B) {
	for _, n := range [][2]int{{10000, 10}, {5000, 50}} {
		b.Run(fmt.Sprintf("%dx%d", n[0], n[1]), func(b *testing.B) {
			for b.Loop() {
				testbed.NewNetwork(b).Outside("host").Do(func() { loadedHeap(b, n[0], n[1]) })
			}
		})
	}
}

func loadedHeap(b *testing.B, services, endpoints int) {
	p, err := nft.New(nft.Config{})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	before := heap()
	n, err := New(Options{Client: fake.NewClientset(), NodeName: "here", Dataplane: p})
	if err != nil {
		b.Fatal(err)
	}
	fill(b, n.feed, services, endpoints)
	n.sync(b.Context())
	if n.Table() == nil || n.Table().Len() != services {
		b.Fatal("nothing was programmed")
	}
	b.ReportMetric(float64(heap()-before)/float64(services*endpoints), "B/endpoint")
	b.ReportMetric(float64(heap()-before)/1e6, "MB")
	if file := os.Getenv("HEAP_PROFILE"); file != "" {
		f, err := os.Create(file)
		if err != nil {
			b.Fatal(err)
		}
		_ = pprof.Lookup("heap").WriteTo(f, 0)
		_ = f.Close()
	}
	runtime.KeepAlive(n)
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// fill gives the feed lists as a watch delivers them: every object decoded from
// the wire, with memory of its own.
func fill(b *testing.B, f *feed, services, endpoints int) {
	b.Helper()
	decode := func(from interface{ Marshal() ([]byte, error) }, to interface{ Unmarshal([]byte) error }) {
		raw, err := from.Marshal()
		if err == nil {
			err = to.Unmarshal(raw)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	svcs := make([]*corev1.Service, services)
	slices := make([]*discoveryv1.EndpointSlice, services)
	for i := range services {
		name := fmt.Sprintf("svc-%d", i)
		s := service(name, 0)
		a := netip.AddrFrom4([4]byte{172, byte(16 + i>>16), byte(i >> 8), byte(i)}).String()
		s.Spec.ClusterIP, s.Spec.ClusterIPs = a, []string{a}
		svcs[i], slices[i] = &corev1.Service{}, &discoveryv1.EndpointSlice{}
		decode(s, svcs[i])
		sl := slice(name)
		for j := range endpoints {
			x := i*endpoints + j
			sl.Endpoints = append(sl.Endpoints, discoveryv1.Endpoint{
				Addresses:  []string{netip.AddrFrom4([4]byte{10, byte(64 + x>>16), byte(x >> 8), byte(x)}).String()},
				Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
				NodeName:   new("node-1"), TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("pod-%d", x)},
			})
		}
		decode(sl, slices[i])
	}
	(&kind[*corev1.Service]{feed: f, into: &f.services, lean: leanService}).replace(svcs)
	(&kind[*discoveryv1.EndpointSlice]{feed: f, into: &f.slices}).replace(slices)
	(&kind[*corev1.Node]{feed: f, into: &f.node, lean: leanNode}).replace(nil)
}
