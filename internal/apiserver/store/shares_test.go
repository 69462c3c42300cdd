package store

import (
	"context"
	"log/slog"
	"strconv"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
)

// large is how much more than half of a namespace's share of the rig an object takes.
const large = 6000

// shareRig is the admission by shares of 10,000 bytes, whose changes come when the test has them come.
type shareRig struct {
	*testing.T
	kept  *Store
	check shareAdmission
}

func newShareRig(t *testing.T) *shareRig {
	s := &Store{holdings: newHoldings(DefaultPrefix, namespaceShare*10_000, slog.New(slog.DiscardHandler))}
	return &shareRig{t, s, s.Shares(func(string) bool { return false })}
}

// admit asks for a write of the tenant; old is nil for a creation.
func (r *shareRig) admit(gr schema.GroupResource, sub string, o, old runtime.Object) error {
	r.Helper()
	m, op := o.(metav1.Object), admission.Create
	if old != nil {
		op = admission.Update
	}
	return r.check.Validate(context.Background(), admission.NewAttributesRecord(o, old, schema.GroupVersionKind{}, m.GetNamespace(),
		m.GetName(), gr.WithVersion("v1"), sub, op, nil, false, &user.DefaultInfo{Name: "ann"}), nil)
}

func (r *shareRig) admitMap(o, old *corev1.ConfigMap) error {
	r.Helper()
	if old == nil {
		return r.admit(corev1.Resource("configmaps"), "", o, nil)
	}
	return r.admit(corev1.Resource("configmaps"), "", o, old)
}

// rejects expects that the share has no room for another large object, and why.
func (r *shareRig) rejects(namespace, when string, is func(error) bool) {
	r.Helper()
	if err := r.admitMap(configMap(namespace, "other", "other", 0, large), nil); err == nil || !is(err) {
		r.Errorf("%s: %v", when, err)
	}
}

// accepts expects that a write has room.
func (r *shareRig) accepts(what string, err error) {
	r.Helper()
	if err != nil {
		r.Errorf("%s: %v", what, err)
	}
}

// comes has a change come, a deletion for size 0.
func (r *shareRig) comes(key string, size int, revision int64) {
	c := &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("/registry/" + key), Value: make([]byte, size), ModRevision: revision}}
	if size == 0 {
		c.Type = mvccpb.Event_DELETE
	}
	r.kept.holdings.apply([]*mvccpb.Event{c})
}

// configMap is stored at a revision unless that is 0.
func configMap(namespace, name string, uid types.UID, revision int64, size int) *corev1.ConfigMap {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uid},
		Data: map[string]string{"x": strings.Repeat("x", size)}}
	if revision > 0 {
		m.ResourceVersion = strconv.FormatInt(revision, 10)
	}
	return m
}

// What a write has reserved holds until that write is counted: a late change of its object, such as the end of an earlier one with the
// name, does not end it.
func TestLateChangesEndNoReservation(t *testing.T) {
	t.Parallel()
	r := newShareRig(t)
	maps := corev1.Resource("configmaps")
	r.accepts("the first", r.admitMap(configMap("shop", "a", "1", 0, large), nil))
	r.kept.Wrote(maps, configMap("shop", "a", "1", 5, large))
	r.rejects("shop", "while the first is not counted", apierrors.IsTooManyRequests)
	// It was deleted by 6, and made again by 7.
	r.accepts("the same again", r.admitMap(configMap("shop", "a", "2", 0, large), nil))
	r.comes("configmaps/shop/a", large, 5)
	r.rejects("shop", "with the first counted", apierrors.IsForbidden)
	r.comes("configmaps/shop/a", 0, 6)
	r.rejects("shop", "with the first's end counted", apierrors.IsTooManyRequests)
	r.kept.Wrote(maps, configMap("shop", "a", "1", 5, large)) // an answer that was late, too
	r.comes("configmaps/shop/other", 1, 6)
	r.rejects("shop", "after a late answer", apierrors.IsTooManyRequests)
	r.kept.Wrote(maps, configMap("shop", "a", "2", 7, large))
	r.rejects("shop", "while the second is not counted", apierrors.IsTooManyRequests)
	r.comes("configmaps/shop/a", large, 7)
	r.rejects("shop", "with the second counted", apierrors.IsForbidden)
	r.comes("configmaps/shop/a", 0, 8)
	r.accepts("after the end of all", r.admitMap(configMap("shop", "b", "3", 0, large), nil))

	// The change may come before the answer.
	r.accepts("the first of another", r.admitMap(configMap("mill", "a", "1", 0, large), nil))
	r.comes("configmaps/mill/a", large, 9)
	r.kept.Wrote(maps, configMap("mill", "a", "1", 9, large))
	r.comes("configmaps/mill/a", 0, 10)
	r.accepts("after its end", r.admitMap(configMap("mill", "b", "2", 0, large), nil))

	// Updates, of which each grows what the one before it made.
	r.comes("configmaps/bank/a", 1, 11)
	small, half, whole := configMap("bank", "a", "1", 12, 1), configMap("bank", "a", "1", 13, large/2), configMap("bank", "a", "1", 14, large)
	r.accepts("an update", r.admitMap(half, small))
	r.comes("configmaps/bank/a", 1, 12)
	r.accepts("an update of that", r.admitMap(whole, half))
	r.rejects("bank", "while none is counted", apierrors.IsTooManyRequests)
	r.comes("configmaps/bank/a", large/2, 13)
	r.rejects("bank", "while one is counted", apierrors.IsTooManyRequests)
	r.comes("configmaps/bank/a", large, 14)
	r.rejects("bank", "when both are counted", apierrors.IsForbidden)
	r.comes("configmaps/bank/a", 0, 15)
	r.accepts("after the end of that", r.admitMap(configMap("bank", "b", "2", 0, large), nil))
}

// Kinds with one name in two groups are two kinds, and Events are the same in both of theirs.
func TestReservationsByGroup(t *testing.T) {
	t.Parallel()
	r := newShareRig(t)
	widget := func(group string) error {
		o := &unstructured.Unstructured{}
		o.SetNamespace("shop")
		o.SetName("a")
		o.SetUID("1")
		o.Object["x"] = strings.Repeat("x", large)
		return r.admit(schema.GroupResource{Group: group, Resource: "widgets"}, "", o, nil)
	}
	r.accepts("one kind", widget("one.example"))
	if err := widget("two.example"); !apierrors.IsTooManyRequests(err) {
		t.Errorf("another kind of that name: %v", err)
	}
	r.comes("two.example/widgets/shop/a", 1, 5)
	if err := widget("two.example"); !apierrors.IsTooManyRequests(err) {
		t.Errorf("after a change of another kind: %v", err)
	}
	for key, id := range map[string]objectID{
		"/registry/pods/shop/a":                idOf(corev1.Resource("pods"), "shop", "a"),
		"/registry/events/shop/a":              idOf(schema.GroupResource{Group: "events.k8s.io", Resource: "events"}, "shop", "a"),
		"/registry/apps/deployments/shop/a":    idOf(schema.GroupResource{Group: "apps", Resource: "deployments"}, "shop", "a"),
		"/registry/one.example/widgets/shop/a": idOf(schema.GroupResource{Group: "one.example", Resource: "widgets"}, "shop", "a"),
	} {
		if got, _ := r.kept.holdings.identify(key); got != id || id.key(DefaultPrefix) != key {
			t.Errorf("%s is of %+v, and %+v has %s", key, got, id, id.key(DefaultPrefix))
		}
	}
}

// Labels and annotations of a Binding grow its Pod, at either path, and the status of a custom resource grows that.
func TestSharesOfSubresources(t *testing.T) {
	t.Parallel()
	for what, path := range map[string]struct {
		kind schema.GroupResource
		sub  string
	}{"pods/binding": {corev1.Resource("pods"), "binding"}, "bindings": {corev1.Resource("bindings"), ""}} {
		r := newShareRig(t)
		bind := func(size int) error {
			b := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}}
			if size > 0 {
				b.Annotations = map[string]string{"x": strings.Repeat("x", size)}
			}
			return r.admit(path.kind, path.sub, b, nil)
		}
		r.comes("pods/shop/a", 3000, 5)
		r.accepts(what, bind(large))
		r.rejects("shop", what+", while it is not counted", apierrors.IsTooManyRequests)
		r.comes("pods/shop/a", 3000+large, 6)
		r.kept.Wrote(corev1.Resource("pods"), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a", ResourceVersion: "6"}})
		if err := bind(large); !apierrors.IsForbidden(err) {
			t.Errorf("%s, past the share: %v", what, err)
		}
		r.comes("configmaps/shop/rest", 2000, 7)
		r.accepts(what+" of a namespace that is full, without any", bind(0))
		r.comes("pods/shop/a", 0, 8)
		r.accepts(what+": the end of the Pod makes room", r.admitMap(configMap("shop", "b", "2", 0, large), nil))
	}
	r := newShareRig(t)
	old := &unstructured.Unstructured{Object: map[string]any{"status": ""}}
	old.SetNamespace("shop")
	old.SetName("a")
	o := old.DeepCopy()
	o.Object["status"] = strings.Repeat("x", 2*large)
	widgets := schema.GroupResource{Group: "one.example", Resource: "widgets"}
	if err := r.admit(widgets, "status", o, old); !apierrors.IsForbidden(err) {
		t.Errorf("the status of a custom resource: %v", err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}}
	pod.Status.Message = strings.Repeat("x", 2*large)
	r.accepts("the status of a Pod", r.admit(corev1.Resource("pods"), "status", pod, &corev1.Pod{}))
}
