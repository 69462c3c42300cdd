package policy

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registration"
)

// leaving are storages whose client leaves when its Pod is deleted, and which fail to create another one some times.
type leaving struct {
	Pods
	leave  func()
	errs   []error
	made   *corev1.Pod
	called int
}

func (l *leaving) Get(context.Context, string, *metav1.GetOptions) (runtime.Object, error) {
	return &corev1.Node{Spec: corev1.NodeSpec{Unschedulable: true}}, nil
}

// status is the storage of a Pod's status.
type status struct{ rest.Updater }

func (status) Update(context.Context, string, rest.UpdatedObjectInfo, rest.ValidateObjectFunc, rest.ValidateObjectUpdateFunc, bool,
	*metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	return &corev1.Pod{}, false, nil
}

func (l *leaving) Delete(ctx context.Context, _ string, _ rest.ValidateObjectFunc, _ *metav1.DeleteOptions) (runtime.Object, bool, error) {
	l.leave()
	return nil, true, ctx.Err()
}

func (l *leaving) Create(ctx context.Context, obj runtime.Object, _ rest.ValidateObjectFunc, _ *metav1.CreateOptions) (
	runtime.Object, error,
) {
	if l.called++; l.called <= len(l.errs) {
		return nil, l.errs[l.called-1]
	}
	if _, bounded := ctx.Deadline(); !bounded || ctx.Err() != nil {
		return nil, errors.New("the time is over, or not bounded")
	}
	l.made = obj.(*corev1.Pod)
	return obj, nil
}

// A registered program comes back also if the client leaves when its Pod is gone, and if the storage fails for a moment. One that
// was being deleted does not.
func TestEvictionWhoseClientLeaves(t *testing.T) {
	spec := registration.Spec{Name: "db", Namespace: "default", Node: "n", Ports: []string{"db=5432"}}
	pod, err := spec.Pod()
	if err != nil {
		t.Fatal(err)
	}
	failure, pods := errors.New("no leader"), schema.GroupResource{Resource: "pods"}
	for what, c := range map[string]struct {
		errs            []error
		deleting        bool
		made, succeeded bool
		called          int
	}{
		"at once":              {nil, false, true, true, 1},
		"at the third try":     {[]error{failure, failure}, false, true, true, 3},
		"never":                {[]error{failure, failure, failure}, false, false, false, 3},
		"another is faster":    {[]error{apierrors.NewAlreadyExists(pods, "db")}, false, false, true, 1},
		"it is refused":        {[]error{apierrors.NewForbidden(pods, "db", failure)}, false, false, false, 1},
		"it was being deleted": {nil, true, false, false, 0},
	} {
		synctest.Test(t, func(t *testing.T) { // it waits between tries
			ctx, leave := context.WithCancel(t.Context())
			l, p := &leaving{leave: leave, errs: c.errs}, pod.DeepCopy()
			if c.deleting {
				p.DeletionTimestamp = &metav1.Time{Time: time.Now()}
			}
			r := &evictionREST{pods: l, status: status{}, nodes: l}
			err := r.delete(ctx, p, &metav1.DeleteOptions{}, false)
			if (err == nil) != c.succeeded || (l.made != nil) != c.made || l.called != c.called {
				t.Errorf("%s: %v, made: %t, after %d tries", what, err, l.made != nil, l.called)
			}
		})
	}
}
