package front

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/svc"
)

// recorded keeps the messages of Events.
type recorded struct{ messages []string }

func (e *recorded) Event(_ runtime.Object, _, _, message string) {
	e.messages = append(e.messages, message)
}

// A Service that asks for TLS on ports without a certificate, or names one of another namespace, is not served, and the
// Event names the annotation.
func TestReasonOfAWrongConfiguration(t *testing.T) {
	for annotation, value := range map[string]string{
		"service.beta.kubernetes.io/aws-load-balancer-ssl-ports": "443", "fairlead.dev/lb-tls-secrets": "kube-system/web",
	} {
		r, events := newRig(t), &recorded{}
		f := New(Options{Events: events})
		o := r.service("web")
		o.Annotations = map[string]string{annotation: value}
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1", IPMode: new(corev1.LoadBalancerIPModeProxy)}}
		f.SetService(o)
		f.services[svc.NameOf(o)].listed = true
		if built := f.build(); len(built) > 0 {
			t.Errorf("%s: %+v is served", annotation, built[0])
		}
		if len(events.messages) != 1 || !strings.Contains(events.messages[0], annotation) {
			t.Errorf("%s: %q", annotation, events.messages)
		}
	}
}
