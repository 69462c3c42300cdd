package controller

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// What the controller keeps of an object: of a Service that is no load balancer its name, and of others
// neither who has written which field nor what kubectl has applied.
func TestMemoryOfController(t *testing.T) {
	// In its own process: what other tests have started allocates and frees meanwhile.
	const ownProcess = "FAIRLEAD_TEST_MEMORY"
	if os.Getenv(ownProcess) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.count=1")
		cmd.Env = append(os.Environ(), ownProcess+"=1")
		out, err := cmd.CombinedOutput()
		if t.Logf("%s", out); err != nil {
			t.Error(err)
		}
		return
	}
	const objects = 10_000
	meta := func(i int) metav1.ObjectMeta {
		o := metav1.ObjectMeta{
			Namespace: "default", Name: fmt.Sprint("service-", i), UID: types.UID(fmt.Sprintf("%036d", i)), ResourceVersion: fmt.Sprint(i + 1),
			Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: strings.Repeat("x", 1000)},
		}
		for range 3 {
			o.ManagedFields = append(o.ManagedFields, metav1.ManagedFieldsEntry{
				Manager: "kubectl", FieldsV1: metav1.NewFieldsV1(strings.Repeat("x", 800)),
			})
		}
		return o
	}
	service := func(kind corev1.ServiceType) func(i int) *corev1.Service {
		return func(i int) *corev1.Service {
			s := &corev1.Service{ObjectMeta: meta(i)}
			s.Spec = corev1.ServiceSpec{Type: kind, ClusterIP: "10.0.0.1", ClusterIPs: []string{"10.0.0.1"}, Ports: []corev1.ServicePort{{Port: 80}}}
			return s
		}
	}
	claim := func(i int) *networkingv1.IPAddress {
		c := &networkingv1.IPAddress{ObjectMeta: meta(i)}
		c.Name, c.Annotations = fmt.Sprintf("10.1.%d.%d", i/256, i%256),
			map[string]string{svc.ClaimServicesAnnotation: fmt.Sprint("default/service-", i)}
		return c
	}
	measure := func(what string, limit int, fill func(c *state) any) {
		c := newState(false, loop.New[svc.Name](nil, "", 1, nil).Queue.Add)
		c.unlisted = 2
		before := heap()
		keep := fill(c)
		if each := (int(heap()) - int(before)) / objects; each > limit {
			t.Errorf("%s: %d bytes each, want %d at most", what, each, limit)
		} else {
			t.Logf("%s: %d bytes each", what, each)
		}
		runtime.KeepAlive(keep)
		runtime.KeepAlive(c)
	}
	measure("a Service that is no load balancer", 500, func(c *state) any {
		return filled(into(c, c.setService, c.dropService), service(corev1.ServiceTypeClusterIP), objects)
	})
	measure("a load balancer", 2500, func(c *state) any {
		return filled(into(c, c.setService, c.dropService), service(corev1.ServiceTypeLoadBalancer), objects)
	})
	measure("a claim", 2000, func(c *state) any { return filled(into(c, c.setClaim, c.dropClaim), claim, objects) })
}

// heap returns the bytes of the objects that are in use.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// filled returns a Sink to which objects were given.
func filled[T any](to reflector.Sink[T], object func(i int) T, objects int) reflector.Sink[T] {
	for i := range objects {
		to.Set(object(i))
	}
	return to
}
