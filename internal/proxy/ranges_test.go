package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
)

func (w *world) wantRanges(when string, want ...string) {
	w.t.Helper()
	w.settle(time.Minute)
	tab := w.proxy.Table()
	if tab == nil {
		w.t.Fatalf("%s: nothing is programmed", when)
	}
	var got []string
	for _, p := range tab.ServiceCIDRs {
		got = append(got, p.String())
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		w.t.Errorf("%s: ranges %v, want %v", when, got, want)
	}
}

// The ranges of ClusterIPs are those of the API's ServiceCIDRs, as they change;
// without any, those of the flag.
func TestServiceCIDRs(t *testing.T) {
	flag := func(o *Options) { o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")} }
	inBubble(t, flag, func(w *world) {
		api := w.client.NetworkingV1().ServiceCIDRs()
		object := func(name string, ranges ...string) *networkingv1.ServiceCIDR {
			return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: ranges}}
		}
		w.wantRanges("none in the API", "10.0.0.0/16")
		for _, o := range []*networkingv1.ServiceCIDR{
			object("kubernetes", "10.96.0.0/16", "fd00:10:96::/112"), object("more", "10.97.0.0/24"),
		} {
			if _, err := api.Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		w.wantRanges("two of the API", "10.96.0.0/16", "10.97.0.0/24", "fd00:10:96::/112")
		if err := api.Delete(t.Context(), "kubernetes", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.wantRanges("one is deleted", "10.97.0.0/24")
		if err := api.Delete(t.Context(), "more", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.wantRanges("the last is deleted", "10.0.0.0/16")
	})
}

// A ServiceCIDR that has the server's, the node's or Pods' addresses does not cut them off: it
// is left out, with an Event. A server that is dialed at a ClusterIP is no overlap.
func TestServiceCIDRsThatOverlap(t *testing.T) {
	change := func(o *Options) {
		o.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("172.20.0.0/16")}
		o.Servers = func() []netip.AddrPort {
			return []netip.AddrPort{netip.MustParseAddrPort("198.51.100.7:443"), netip.MustParseAddrPort("10.96.0.1:443")}
		}
	}
	inBubble(t, change, func(w *world) {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.3.0/24"}},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.1.2.3"}}}}
		if _, err := w.client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.setService(service("kubernetes", 0))
		api := slice("kubernetes")
		api.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"203.0.113.9"}}}
		w.setSlice(api)
		w.settle(time.Second)
		cidrs := w.client.NetworkingV1().ServiceCIDRs()
		// All in one object, as the Events of one moment are one.
		o := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "all"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{
			"10.96.0.0/16", "10.0.0.0/13", "10.244.0.0/16", "172.20.7.0/24", "198.51.100.0/24", "203.0.113.0/24"}}}
		if _, err := cidrs.Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.wantRanges("one of six is usable", "10.96.0.0/16")
		var got []string
		for _, e := range w.events("ServiceCIDROverlaps") {
			got = append(got, e.Message)
		}
		want := "cannot use ranges of service addresses: " +
			"10.0.0.0/13 has 10.1.2.3, an address of this node; " +
			"10.244.0.0/16 overlaps 10.244.3.0/24, a range of pods; " +
			"172.20.7.0/24 overlaps 172.20.0.0/16, a range of pods; " +
			"198.51.100.0/24 has 198.51.100.7, where this node reaches its API server; " +
			"203.0.113.0/24 has 203.0.113.9, where an API server answers"
		if !slices.Contains(got, want) {
			t.Errorf("Events %q, want %q", got, want)
		}
		if err := w.client.CoreV1().Nodes().Delete(t.Context(), "here", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.wantRanges("without the Node", "10.0.0.0/13", "10.244.0.0/16", "10.96.0.0/16")
	})
}

// An API server that does not serve ServiceCIDRs, or not to this proxy, does not keep
// it from its work, and is not asked all the time. (Not in a bubble: client-go
// remembers by the clock of all tests when it last met an error.)
func TestServiceCIDRsCannotBeRead(t *testing.T) {
	kind := schema.GroupResource{Group: networkingv1.GroupName, Resource: "servicecidrs"}
	fallback := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}
	for _, err := range []error{apierrors.NewNotFound(kind, ""), apierrors.NewForbidden(kind, "", errors.New("no"))} {
		client := fake.NewClientset()
		lists := make(chan struct{}, 10)
		client.PrependReactor("list", "servicecidrs", func(ktesting.Action) (bool, runtime.Object, error) {
			lists <- struct{}{}
			return true, nil, err
		})
		r := newRanges(fallback, slog.New(slog.DiscardHandler), func() { t.Error("changed") })
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.run(ctx, client)
		}()
		select {
		case <-r.known:
		case <-time.After(30 * time.Second):
			t.Errorf("%v: still waiting for them", err)
		}
		stop()
		<-done
		if got := r.get(); !slices.Equal(got, fallback) || len(lists) != 1 {
			t.Errorf("%v: ranges %v after %d requests", err, got, len(lists))
		}
	}
}

// An API server that never answers for ServiceCIDRs is not waited for.
func TestServiceCIDRsAreNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRanges(nil, slog.New(slog.DiscardHandler), func() {})
		start := time.Now()
		if !r.await(t.Context()) || time.Since(start) != rangesWait {
			t.Errorf("waited %s, want %s", time.Since(start), rangesWait)
		}
	})
}
