package walk

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/migrate/metallb"
	"github.com/fairlead/fairlead/internal/svc"
)

const system = "metallb-system"

func app(component string) map[string]string {
	return map[string]string{"app": "metallb", "component": component}
}

// cluster has MetalLB in a phase, with other objects.
func cluster(phase metallb.Phase, others ...runtime.Object) *fake.Clientset {
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "speaker", Namespace: system, Labels: app("speaker")}}
	if phase != metallb.Before {
		d.Annotations = map[string]string{metallb.Annotation: string(phase), metallb.Replicas: "1"}
	}
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: app("speaker")}
	d.Spec.Template.Spec.Containers = []corev1.Container{{Image: "speaker:1"}}
	d.Status.DesiredNumberScheduled, d.Status.UpdatedNumberScheduled, d.Status.NumberReady = 1, 1, 1
	c := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "controller", Namespace: system, Labels: app("controller")}}
	c.Spec.Selector = &metav1.LabelSelector{MatchLabels: app("controller")}
	c.Status.ReadyReplicas = 1
	return fake.NewClientset(append([]runtime.Object{d, c}, others...)...)
}

// newWalk has an API server with pools, which are JSON.
func newWalk(t *testing.T, client *fake.Clientset, pools string) *Walk {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"apiVersion":"fairlead.dev/v1","kind":"IPAddressPoolList","items":[` + pools + `]}`))
	}))
	t.Cleanup(server.Close)
	lb, err := v1.NewClient(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	w, err := New(t.Context(), Options{Client: client, LB: lb, Out: &bytes.Buffer{}, Timeout: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// wrote are the requests of a client that change something.
func wrote(client *fake.Clientset) (out []string) {
	for _, a := range client.Actions() {
		if v := a.GetVerb(); v != "get" && v != "list" {
			out = append(out, v+" "+a.GetResource().Resource)
		}
	}
	return out
}

// Where something is refused, no command writes.
func TestRefused(t *testing.T) {
	byHand := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: metallb.Name, Namespace: svc.SystemNamespace}}
	byHand.Spec.Template.Spec.Containers = []corev1.Container{{Image: "x"}}
	front := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: "a", Name: "shop", Labels: map[string]string{names.FrontLabel: names.FrontGateway},
	}}
	held := cluster(metallb.Both, byHand, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node1", Labels: map[string]string{metallb.NodeLabel: metallb.Leaving}},
	})
	const made = `{"metadata":{"name":"a","labels":{"` + metallb.PoolLabel + `":"true"}}}`
	for _, c := range []struct {
		name, pools string
		client      *fake.Clientset
		do          func(*Walk, context.Context) error
		want        string
	}{
		{"apply beside one by hand", "", cluster(metallb.Before, byHand), (*Walk).Apply, "was not installed by 'fairlead migrate'"},
		{"rollback of one by hand", "", cluster(metallb.Before, byHand), (*Walk).Rollback, "was not installed by 'fairlead migrate'"},
		{"verify of one by hand", "", cluster(metallb.Before, byHand), (*Walk).Verify, "was not installed by 'fairlead migrate'"},
		{"apply without MetalLB", "", fake.NewClientset(), (*Walk).Apply, "MetalLB does not run"},
		{"rollback with a Gateway", made, cluster(metallb.After, byHand, front), (*Walk).Rollback, "Service a/shop"},
		{"rollback with another pool", made + `,{"metadata":{"name":"b"}}`, cluster(metallb.After, byHand), (*Walk).Rollback, "IPAddressPool b"},
		{"rollback of BGP without peers", made, held, (*Walk).Rollback, "MetalLB's peers cannot be read"},
		{"apply of BGP without peers", made, held, (*Walk).Apply, "MetalLB's peers cannot be read"},
		{"apply with a mistake in the phase", "", cluster("bothh"), (*Walk).Apply, "want none, or one of beside"},
	} {
		err := c.do(newWalk(t, c.client, c.pools), t.Context())
		if err == nil || !strings.Contains(err.Error(), c.want) || len(wrote(c.client)) > 0 {
			t.Errorf("%s: %v, requests %v", c.name, err, wrote(c.client))
		}
	}
}

// A phase that another client has changed is an error, unless it is the wanted one: then the answer to an earlier request was lost.
func TestEnter(t *testing.T) {
	client := cluster(metallb.Beside)
	w := newWalk(t, client, "")
	if err := w.enter(t.Context(), metallb.Both, metallb.After); !errors.Is(err, errChanged) {
		t.Errorf("another client's phase: %v", err)
	}
	if err := w.enter(t.Context(), metallb.Before, metallb.Beside); err != nil {
		t.Errorf("the wanted phase: %v", err)
	}
	if err := w.enter(t.Context(), metallb.Beside, metallb.Both); err != nil {
		t.Error(err)
	}
	if got := newWalk(t, client, "").Plan().Phase; got != metallb.Both {
		t.Errorf("the phase is %s", got)
	}
}

// A failure is noted with the ways on; the next phase removes the note.
func TestStopped(t *testing.T) {
	client := cluster(metallb.Both)
	w := newWalk(t, client, "")
	err := w.stopped(t.Context(), metallb.Both, metallb.Step{Action: metallb.AwaitAnnounced}, errors.New("no node announces"))
	if err == nil || !strings.Contains(err.Error(), "'fairlead migrate rollback --component lb'") {
		t.Errorf("the error is %v", err)
	}
	if got := newWalk(t, client, "").Plan().Failure; !strings.Contains(got, "no node announces") {
		t.Errorf("noted is %q", got)
	}
	if err := w.enter(t.Context(), metallb.Both, metallb.Returning); err != nil || newWalk(t, client, "").Plan().Failure != "" {
		t.Errorf("noted in the next phase: %v, %q", err, newWalk(t, client, "").Plan().Failure)
	}
}

// The end of fairlead lb takes its finalizer from its own Services only; they keep their addresses.
func TestReleaseClaims(t *testing.T) {
	service := func(name string) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, Finalizers: []string{cleanupFinalizer, "other"}}}
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
		return s
	}
	holders := []svc.Name{{Namespace: "a", Name: "x"}, {Namespace: "a", Name: "gone"}}
	own := claim.Claim{Addr: netip.MustParseAddr("192.0.2.1"), Services: holders}.Object()
	others := &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: "10.96.0.1"}}
	client := cluster(metallb.Returning, service("x"), service("cloud"), own, others)
	w := newWalk(t, client, "")
	if err := w.releaseClaims(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{"x": 1, "cloud": 2} {
		s, err := client.CoreV1().Services("a").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil || len(s.Finalizers) != want || len(s.Status.LoadBalancer.Ingress) != 1 {
			t.Errorf("Service %s: %+v, %v", name, s, err)
		}
	}
	list, err := client.NetworkingV1().IPAddresses().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || list.Items[0].Name != others.Name {
		t.Errorf("%+v, %v", list, err)
	}
}
