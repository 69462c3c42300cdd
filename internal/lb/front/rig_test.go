package front

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// rig is an API that keeps objects and follows them.
type rig struct {
	*testing.T
	client *fake.Clientset
}

func newRig(t *testing.T) *rig { return &rig{t, fake.NewClientset()} }

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) eventually(what string, f func() error) {
	r.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			r.Fatal(fmt.Errorf("%s: %w", what, err))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (r *rig) service(name string) *corev1.Service {
	r.Helper()
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: "u"}}
	o.Spec.Type, o.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Port: 80}}
	o, err := r.client.CoreV1().Services(o.Namespace).Create(r.Context(), o, metav1.CreateOptions{})
	r.must(err)
	return o
}

// build builds a Service, whose reason to fail it keeps as the Front does.
func build(f *Front, n svc.Name, s *service) *proxied.Service {
	built, why := f.inputsLocked(time.Now()).build(n, s)
	if why.text != "" && !why.waits {
		f.failLocked(s, why.text)
	}
	return built
}
