package garbage

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// The graph names what is to be checked again, and keeps nothing of what is gone.
func TestOwnerGraph(t *testing.T) {
	g := newOwnerGraph()
	things := schema.GroupVersionResource{Version: "v1", Resource: "things"}
	object := func(name string, owners ...string) *metav1.PartialObjectMetadata {
		o := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}}
		for _, owner := range owners {
			o.OwnerReferences = append(o.OwnerReferences,
				metav1.OwnerReference{APIVersion: "v1", Kind: "Thing", Name: owner, UID: types.UID(owner)})
		}
		return o
	}
	want := func(what string, got []objectRef, names ...string) {
		t.Helper()
		var list []string
		for _, o := range got {
			list = append(list, o.name.Name)
		}
		if slices.Sort(list); !slices.Equal(list, names) {
			t.Errorf("%s: to check again: %q, want %q", what, list, names)
		}
	}
	want("an owner", g.set(things, object("owner")))
	want("a dependent", g.set(things, object("a", "owner")), "a")
	want("the same again", g.set(things, object("a", "owner")))
	want("another", g.set(things, object("b", "owner")), "b")
	deleted := object("owner")
	deleted.DeletionTimestamp, deleted.Finalizers = &metav1.Time{}, []string{metav1.FinalizerDeleteDependents}
	want("an owner deleted in the foreground", g.set(things, deleted), "a", "b", "owner")
	want("the same again", g.set(things, deleted))
	want("a dependent goes", g.remove("a"), "owner")
	want("a list without the owner", g.replace(things, []*metav1.PartialObjectMetadata{object("b", "owner")}), "b")
	if !g.isGone("owner") || !g.isGone("a") || g.isGone("b") {
		t.Error("what is gone is not remembered")
	}
	want("a kind goes", g.forget(things))
	if len(g.objects)+len(g.dependents) > 0 {
		t.Errorf("%v %v remain", g.objects, g.dependents)
	}
}
