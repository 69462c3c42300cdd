package watch

import (
	"crypto/tls"
	"log/slog"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// A node and the controller find the same version of a Gateway from the same objects. It changes with the listeners, the Gateway itself,
// its ListenerSets and the certificates, and not with routes.
func TestVersions(t *testing.T) {
	t.Parallel()
	front, cert := svc.Name{Namespace: "shop", Name: "front"}, svc.Name{Namespace: "shop", Name: "cert"}
	node := New(Options{Log: slog.New(slog.DiscardHandler), Changed: func() {}})
	controller := New(Options{Log: slog.New(slog.DiscardHandler), Changed: func() {}, Statuses: true})
	make := func(uid types.UID, port int32) *gwv1.Gateway {
		g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Name: "front", Namespace: "shop", UID: uid, Generation: 1}}
		g.Spec.GatewayClassName = "fairlead"
		g.Spec.Listeners = []gwv1.Listener{{Name: "https", Port: port, Protocol: gwv1.HTTPSProtocolType, TLS: &gwv1.ListenerTLSConfig{
			CertificateRefs: []gwv1.SecretObjectReference{{Name: "cert"}},
		}}}
		g.Spec.AllowedListeners = &gwv1.AllowedListeners{Namespaces: &gwv1.ListenerNamespaces{From: new(gwv1.NamespacesFromSame)}}
		return g
	}
	read := func(w *Watch, der string) {
		w.secrets[cert] = &secret{listed: true, cert: &tls.Certificate{Certificate: [][]byte{[]byte(der)}}}
		w.objects.Secrets[cert] = gateway.Secret{}
		w.dirtySecret(cert)
	}
	last := ""
	check := func(what string, change func(*Watch), differs bool) {
		t.Helper()
		var got [2]string
		for i, w := range []*Watch{node, controller} {
			change(w)
			w.classify()
			w.build()
			got[i] = w.updateVersions()[front]
		}
		if got[0] == "" || got[0] != got[1] {
			t.Errorf("%s: the node has version %q, the controller %q", what, got[0], got[1])
		}
		if (got[0] != last) != differs {
			t.Errorf("%s: version %q, %q before: differs %t, want %t", what, got[0], last, !differs, differs)
		}
		last = got[0]
	}
	check("the beginning", func(w *Watch) {
		w.objects.Namespaces["shop"] = map[string]string{}
		class := &gwv1.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: "fairlead"}}
		class.Spec.ControllerName = names.ControllerName
		w.classes["fairlead"] = class
		setGateway(w, front, make("a", 443))
	}, true)
	check("nothing", func(*Watch) {}, false)
	check("a Secret of another type, which a node may not read", func(w *Watch) {
		if w == controller {
			w.secrets[cert] = &secret{listed: true}
			w.objects.Secrets[cert] = gateway.Secret{Problem: "it is of type Opaque"}
			w.dirtySecret(cert)
		}
	}, false)
	check("a certificate", func(w *Watch) { read(w, "one") }, true)
	check("the same certificate", func(w *Watch) { read(w, "one") }, false)
	check("another certificate", func(w *Watch) { read(w, "two") }, true)
	check("a route", func(w *Watch) {
		r := &gwv1.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop", UID: "r"}}
		r.Spec.ParentRefs = []gwv1.ParentReference{{Name: "front"}}
		w.setRoute(svc.Name{Namespace: "shop", Name: "web"}, r)
	}, false)
	check("a ListenerSet", func(w *Watch) {
		s := &gwv1.ListenerSet{ObjectMeta: metav1.ObjectMeta{Name: "more", Namespace: "shop", UID: "s", Generation: 1}}
		s.Spec.ParentRef = gwv1.ParentGatewayReference{Name: "front"}
		s.Spec.Listeners = []gwv1.ListenerEntry{{Name: "http", Port: 8080, Protocol: gwv1.HTTPProtocolType}}
		w.setListenerSet(svc.NameOf(s), s)
	}, true)
	check("a status", func(w *Watch) {
		g := make("a", 443)
		g.Status.Addresses = []gwv1.GatewayStatusAddress{{Value: "192.0.2.1"}}
		setGateway(w, front, g)
	}, false)
	check("another Gateway of the name", func(w *Watch) { setGateway(w, front, make("b", 443)) }, true)
	check("another port", func(w *Watch) {
		g := make("b", 8443)
		g.Generation = 2
		setGateway(w, front, g)
	}, true)
}
