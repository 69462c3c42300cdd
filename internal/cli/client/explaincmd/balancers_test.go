package explaincmd

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// The claims of a Service are read by the names of its addresses: others, of which there may be thousands, are not.
func TestClaimsByName(t *testing.T) {
	web := svc.Name{Namespace: "shop", Name: "web"}
	at := netip.MustParseAddr("192.0.2.7")
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch _, name, _ := strings.Cut(r.URL.Path, "/ipaddresses"); {
		case r.URL.Path == "/apis/fairlead.dev/v1/speakers":
			_ = json.NewEncoder(w).Encode(v1.SpeakerList{Items: []v1.Speaker{{ObjectMeta: metav1.ObjectMeta{Name: "n1"},
				Status: v1.SpeakerStatus{Eligible: true, Announce: v1.AnnounceARP}}}})
			return
		case strings.Contains(r.URL.Path, "/ipaddresses"):
			asked = append(asked, name)
			if name == "/192.0.2.7" {
				_ = json.NewEncoder(w).Encode(claim.Claim{Addr: at, Pool: "public", Services: []svc.Name{web}}.Object())
				return
			}
		}
		w.WriteHeader(http.StatusNotFound)
		_ = json.NewEncoder(w).Encode(metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: 404})
	}))
	defer server.Close()
	cfg := &rest.Config{Host: server.URL, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
	c := newCluster()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}}
	for _, ip := range []string{"192.0.2.7", "192.0.2.8"} {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
	}
	c.objects.Services = []*corev1.Service{s}
	got := c.balancers(t.Context(), asking.For(kubernetes.NewForConfigOrDie(cfg), cfg), &explain.Question{Service: web})
	if len(got) != 1 || len(got[0].Addresses) != 2 {
		t.Fatalf("%+v", got)
	}
	if a := got[0].Addresses[0]; a.Pool != "public" || a.Status != explain.HasProblem || !a.Nobody {
		t.Errorf("an address that nobody announces: %+v", a)
	}
	if a := got[0].Addresses[1]; a.Status != explain.Foreign {
		t.Errorf("an address that fairlead has not given: %+v", a)
	}
	if text := strings.Join(asked, " "); text != "/192.0.2.7 /192.0.2.8" {
		t.Errorf("asked for %q", text)
	}
}
