package pods

import (
	"context"
	"errors"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The hook of a unit goes before the registration that knows of it, so that a failure can
// be repeated.
func TestHookGoesFirst(t *testing.T) {
	client := kubernetes.NewForConfigOrDie(process.API(t))
	node := base.Hostname()
	spec := registration.Spec{Name: "a", Namespace: "default", Node: node, Ports: []string{"80"}, Unit: "old"}
	pod, err := spec.Pod()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := registration.Write(t.Context(), client, pod); err != nil {
		t.Fatal(err)
	}
	var removed []string
	failure := errors.New("no systemd")
	remove := func(_ context.Context, unit string) (bool, error) {
		removed = append(removed, unit)
		return failure == nil, failure
	}
	if err := removeOldHook(t.Context(), client, pod, remove); err != nil || removed != nil {
		t.Errorf("the same unit again: %v, removed %q", err, removed)
	}
	spec.Unit = "new"
	if pod, err = spec.Pod(); err != nil {
		t.Fatal(err)
	}
	if err := removeOldHook(t.Context(), client, pod, remove); !errors.Is(err, failure) {
		t.Errorf("another unit: %v, want %v", err, failure)
	}
	if err := deregister(t.Context(), client, "default", "a", node, remove); !errors.Is(err, failure) {
		t.Errorf("deregister: %v, want %v", err, failure)
	}
	if _, err := client.CoreV1().Pods("default").Get(t.Context(), pod.Name, metav1.GetOptions{}); err != nil {
		t.Errorf("after a hook that is left: %v", err)
	}
	failure = nil
	if err := deregister(t.Context(), client, "default", "a", node, remove); err != nil {
		t.Error(err)
	}
	if want := []string{"old.service", "old.service", "old.service"}; !slices.Equal(removed, want) {
		t.Errorf("removed %q, want %q", removed, want)
	}
}
