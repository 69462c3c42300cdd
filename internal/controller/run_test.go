package controller

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Everything that Run starts has ended when it returns. The server of the test
// is in the same process, so only what the loops are made of is counted.
func TestRunLeavesNothingRunning(t *testing.T) {
	r := newRig(t)
	r.node("n0")
	before := loopGoroutines()
	stop := r.run(Options{LeaderElect: true})
	ns := r.namespace("shop")
	r.service(ns, "web")
	r.pod(ns, "a", "web", "n0", "10.244.0.1")
	r.wantEndpoints(ns, "web", "10.244.0.1:9376 true")
	if during := loopGoroutines(); during < before+20 {
		t.Fatalf("%d goroutines before, %d during: the count does not look where the loops are", before, during)
	}
	stop()
	r.eventually("goroutines end", func() error {
		if after := loopGoroutines(); after > before {
			return fmt.Errorf("%d goroutines before, %d after", before, after)
		}
		return nil
	})
}

func loopGoroutines() int {
	buffer := make([]byte, 8<<20)
	n := 0
	for _, stack := range strings.Split(string(buffer[:runtime.Stack(buffer, true)]), "\n\n") {
		for _, mark := range []string{"client-go/tools/cache.", "client-go/util/workqueue.", "client-go/tools/record.",
			"client-go/tools/leaderelection.", "controller.(*loop"} {
			if strings.Contains(stack, mark) {
				n++
				break
			}
		}
	}
	return n
}

// A wrong port name is told on the Service that has it, and no other Service
// suffers.
func TestBadInputGetsAnEvent(t *testing.T) {
	r := newRig(t)
	r.run(Options{Controllers: endpointControllers})
	ns := r.namespace("shop")
	r.node("n0")
	r.service(ns, "typo", func(s *corev1.Service) {
		s.Spec.Selector = map[string]string{"app": "web"}
		s.Spec.Ports[0].TargetPort = intstr.FromString("htpp")
	})
	r.service(ns, "web", func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromString("http") }) // the same Pods
	r.pod(ns, "a", "web", "n0", "10.244.0.1")
	r.wantEndpoints(ns, "web", "10.244.0.1:8080 true")
	r.wantEvent(ns, "typo", "TargetPortNotFound")
	r.eventually("the fault is repaired", func() error {
		s, err := r.client.CoreV1().Services(ns).Get(context.Background(), "typo", metav1.GetOptions{})
		if err != nil {
			return err
		}
		s.Spec.Ports[0].TargetPort = intstr.FromString("http")
		_, err = r.client.CoreV1().Services(ns).Update(context.Background(), s, metav1.UpdateOptions{})
		if err != nil {
			return fmt.Errorf("update: %w", err)
		}
		return nil
	})
	r.wantEndpoints(ns, "typo", "10.244.0.1:8080 true")

	// A selector that crosses another one, though not one that is equal to it or
	// has all of it, is remarked on once, on the younger Service.
	r.service(ns, "narrow", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web", "release": "7"} })
	r.service(ns, "zcrossing", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"release": "7"} })
	r.service(ns, "zcrosses", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"tier": "front"} })
	pod, err := r.client.CoreV1().Pods(ns).Get(context.Background(), "a", metav1.GetOptions{})
	r.must(err)
	pod.Labels["tier"] = "front"
	_, err = r.client.CoreV1().Pods(ns).Update(context.Background(), pod, metav1.UpdateOptions{})
	r.must(err)
	r.wantEvent(ns, "zcrosses", "OverlappingSelectors")
	r.wantEndpoints(ns, "zcrosses", "10.244.0.1:9376 true")
	list, err := r.client.CoreV1().Events(ns).List(context.Background(), metav1.ListOptions{})
	r.must(err)
	for _, e := range list.Items {
		if e.Reason == "OverlappingSelectors" && (e.InvolvedObject.Name != "zcrosses" || e.Type != corev1.EventTypeNormal) {
			t.Errorf("%s event on %s: %s", e.Type, e.InvolvedObject.Name, e.Message)
		}
	}
}
