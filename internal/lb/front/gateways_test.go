package front

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// A node reports a version of a Gateway when its server has all of that, and keeps the report while it does not have the next one.
func TestServedGateways(t *testing.T) {
	t.Parallel()
	listed := false
	r := newRig(t)
	recorder := events.NewRecorder(r.client, corev1.EventSource{}, slog.New(slog.DiscardHandler))
	f := New(Options{NodeName: "node1", Events: recorder, Listed: func() bool { return listed }})
	name := svc.Name{Namespace: "shop", Name: "front"}
	n := names.ServiceOfGateway(name)
	s := &service{spec: &dialect.Spec{}}
	s.object = &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: n.Namespace, Name: n.Name, Labels: map[string]string{names.FrontLabel: names.FrontGateway},
		OwnerReferences: []metav1.OwnerReference{{Kind: "Gateway", Name: name.Name, Controller: new(true)}},
	}}
	f.services[n] = s
	plain := &service{spec: &dialect.Spec{}, object: &corev1.Service{}, built: &proxied.Service{}}
	f.services[svc.Name{Namespace: "shop", Name: "plain"}] = plain
	f.routing.state = &watch.State{Versions: map[svc.Name]string{name: "1"}}
	check := func(what string, ready bool, failure error, changed bool, want string) {
		t.Helper()
		if got := f.observe(func(svc.Name) (bool, error) { return ready, failure }); got != changed {
			t.Errorf("%s: changed %t, want %t", what, got, changed)
		}
		if got := fmt.Sprint(f.Gateways()); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	check("nothing is listed", false, nil, false, "<nil>")
	listed = true
	check("it waits", false, nil, true, "&{[] false}")
	s.built = &proxied.Service{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	check("it is served", true, nil, true, "&{[{shop/front 1 [192.0.2.1] []}] false}")
	check("it still is", true, nil, false, "&{[{shop/front 1 [192.0.2.1] []}] false}")
	f.routing.state = &watch.State{Versions: map[svc.Name]string{name: "2"}}
	s.built = nil
	check("the next version waits", true, nil, false, "&{[{shop/front 1 [192.0.2.1] []}] false}")
	s.built = &proxied.Service{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}
	check("a port fails", true, errors.New("in use"), false, "&{[{shop/front 1 [192.0.2.1] []}] false}")
	check("the next version", true, nil, true, "&{[{shop/front 2 [192.0.2.1 2001:db8::1] []}] false}")

	for i := range v1.MaxGateways {
		f.services[svc.Name{Name: fmt.Sprint(i)}] = &service{served: listeners{gateway: fmt.Sprintf("a/%d", i), version: "1"}}
	}
	if got := f.Gateways(); len(got.Served) != v1.MaxGateways || !got.More {
		t.Errorf("%d Gateways, more %t", len(got.Served), got.More)
	}
}
