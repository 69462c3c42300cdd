package sets

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// A revision whose deletion fails stays in the cache, so that the next sync tries again.
func TestRevisionStaysWhenItsDeletionFails(t *testing.T) {
	status := http.StatusForbidden
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	defer server.Close()
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "agent", UID: "d"}}
	r := &appsv1.ControllerRevision{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "agent-1", UID: "r", ResourceVersion: "1",
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, workloads.DaemonSetKind)},
	}}
	revisions := &dependents[*appsv1.ControllerRevision]{kind: workloads.DaemonSetKind}
	revisions.AssumeCache = kit.NewAssumeCache(revisions.ownerOf, func(svc.Name) bool { return true })
	revisions.Assume(r)
	client := kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL})
	c := &daemonSets{Kit: &kit.Kit{Client: client}, revisions: revisions}
	if err := c.deleteRevision(context.Background(), r, svc.NameOf(d)); err == nil || len(revisions.List(svc.NameOf(d))) != 1 {
		t.Errorf("error %v, %d revisions in the cache", err, len(revisions.List(svc.NameOf(d))))
	}
	status = http.StatusNotFound
	if err := c.deleteRevision(context.Background(), r, svc.NameOf(d)); err != nil || len(revisions.List(svc.NameOf(d))) != 0 {
		t.Errorf("when it is gone: error %v, %d revisions in the cache", err, len(revisions.List(svc.NameOf(d))))
	}
}
