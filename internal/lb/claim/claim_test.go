package claim

import (
	"net/netip"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/svc"
)

func name(namespace, name string) svc.Name { return svc.Name{Namespace: namespace, Name: name} }

func TestParse(t *testing.T) {
	parent := &networkingv1.ParentReference{Resource: "services", Namespace: "p", Name: "q"}
	for _, c := range []struct {
		what, name, services string
		parent               *networkingv1.ParentReference
		want                 []svc.Name
		ok                   bool
	}{
		{"one Service", "192.0.2.1", "a/b", parent, []svc.Name{name("a", "b")}, true},
		{"two that share the address", "2001:db8::1", "a/b,a/c", parent, []svc.Name{name("a", "b"), name("a", "c")}, true},
		{"a blank after the comma", "192.0.2.1", "a/b, a/c", parent, []svc.Name{name("a", "b"), name("a", "c")}, true},
		{"blanks only around it", "192.0.2.1", " a/c ", nil, []svc.Name{name("a", "c")}, true},
		{"the same one twice", "192.0.2.1", "a/b,a/b", nil, []svc.Name{name("a", "b")}, true},
		{"an invalid name beside a valid one", "192.0.2.1", "b,a/c", parent, []svc.Name{name("a", "c")}, true},
		{"no valid name", "192.0.2.1", "b,,", parent, []svc.Name{name("p", "q")}, true},
		{"no annotation", "192.0.2.1", "", parent, []svc.Name{name("p", "q")}, true},
		{"neither annotation nor parent", "192.0.2.1", "", nil, nil, true},
		{"a name that is not an address", "web", "a/b", nil, []svc.Name{name("a", "b")}, false},
	} {
		o := &networkingv1.IPAddress{
			ObjectMeta: metav1.ObjectMeta{Name: c.name, Annotations: map[string]string{
				svc.ClaimServicesAnnotation: c.services, svc.ClaimPoolAnnotation: "pool"}},
			Spec: networkingv1.IPAddressSpec{ParentRef: c.parent},
		}
		got, ok := Parse(o)
		if ok != c.ok || !reflect.DeepEqual(got.Services, c.want) || got.Pool != "pool" || ok && got.Addr.String() != c.name {
			t.Errorf("%s: %+v, %t", c.what, got, ok)
		}
	}
}

// What a port says about its Pods is read.
func TestRead(t *testing.T) {
	s := &corev1.Service{}
	s.Annotations = map[string]string{"fairlead.dev/lb-protocol": "http"}
	s.Spec.Ports = []corev1.ServicePort{{Name: "web", Port: 80, AppProtocol: new("kubernetes.io/h2c")}, {Name: "other", Port: 81}}
	got := Read(s).Spec.Listeners
	if len(got) != 2 || got[0].Backend != dialect.H2C || got[1].Backend != dialect.HTTP {
		t.Errorf("%+v", got)
	}
}

func TestObjectIsReadBack(t *testing.T) {
	for _, addr := range []string{"192.0.2.1", "2001:db8::1"} {
		want := Claim{netip.MustParseAddr(addr), "pool", []svc.Name{name("a", "b"), name("a", "c")}}
		o := want.Object()
		if got, ok := Parse(o); !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, %t; want %+v", got, ok, want)
		}
		if ref := o.Spec.ParentRef; ref.Namespace != "a" || ref.Name != "b" {
			t.Errorf("the parent is %+v", ref)
		}
	}
}
