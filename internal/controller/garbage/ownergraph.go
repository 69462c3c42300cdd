package garbage

import (
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/lru"

	"github.com/fairlead/fairlead/internal/svc"
)

// objectRef identifies one object and the resource that serves it.
type objectRef struct {
	resource schema.GroupVersionResource
	name     svc.Name
	uid      types.UID
}

// deletion is how far the deletion of an object has come, by its finalizers.
type deletion byte

const (
	notDeleted deletion = iota
	terminating
	foreground // waits for dependents that block it
	orphaning  // waits until no dependent refers to it
)

func deletionOf(o *metav1.PartialObjectMetadata) deletion {
	switch {
	case o.DeletionTimestamp == nil:
		return notDeleted
	case slices.Contains(o.Finalizers, metav1.FinalizerOrphanDependents):
		return orphaning
	case slices.Contains(o.Finalizers, metav1.FinalizerDeleteDependents):
		return foreground
	}
	return terminating
}

// ownedObject is what the graph keeps of an object.
type ownedObject struct {
	objectRef
	owners   []metav1.OwnerReference
	deletion deletion
}

// blocks reports whether the foreground deletion of owner waits for o.
func (o *ownedObject) blocks(owner types.UID) bool {
	return slices.ContainsFunc(o.owners, func(r metav1.OwnerReference) bool {
		return r.UID == owner && r.BlockOwnerDeletion != nil && *r.BlockOwnerDeletion
	})
}

// rememberedGone is how many deleted objects the graph remembers, so that each of
// an owner's dependents need not ask for it.
const rememberedGone = 4096

// ownerGraph is every object of the API, and which owns which. Its methods may be
// called concurrently; methods that change it return the objects to check again.
type ownerGraph struct {
	mu         sync.Mutex
	objects    map[types.UID]*ownedObject
	dependents map[types.UID]map[types.UID]bool // by owner, which may be absent
	gone       *lru.Cache
}

func newOwnerGraph() *ownerGraph {
	return &ownerGraph{
		objects: map[types.UID]*ownedObject{}, dependents: map[types.UID]map[types.UID]bool{}, gone: lru.New(rememberedGone),
	}
}

func sameOwner(a, b metav1.OwnerReference) bool {
	return a.APIVersion == b.APIVersion && a.Kind == b.Kind && a.Name == b.Name && a.UID == b.UID &&
		(a.BlockOwnerDeletion != nil && *a.BlockOwnerDeletion) == (b.BlockOwnerDeletion != nil && *b.BlockOwnerDeletion)
}

// set adds or changes an object.
func (g *ownerGraph) set(resource schema.GroupVersionResource, o *metav1.PartialObjectMetadata) (check []objectRef) {
	now := &ownedObject{objectRef{resource, svc.NameOf(o), o.UID}, o.OwnerReferences, deletionOf(o)}
	g.mu.Lock()
	defer g.mu.Unlock()
	old := g.objects[o.UID]
	g.objects[o.UID] = now
	if old == nil || !slices.EqualFunc(old.owners, now.owners, sameOwner) {
		if old != nil {
			check = g.unlink(old)
		}
		for _, r := range now.owners {
			if g.dependents[r.UID] == nil {
				g.dependents[r.UID] = map[types.UID]bool{}
			}
			g.dependents[r.UID][o.UID] = true
		}
		if len(now.owners) > 0 {
			check = append(check, now.objectRef)
		}
	}
	if now.deletion >= foreground && (old == nil || old.deletion != now.deletion) {
		check = append(check, now.objectRef)
		if now.deletion == foreground {
			check = append(check, g.refs(o.UID)...)
		}
	}
	return check
}

// remove drops an object that was deleted.
func (g *ownerGraph) remove(uid types.UID) []objectRef {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gone.Add(uid, nil)
	return g.drop(uid)
}

// drop removes an object. The caller holds mu.
func (g *ownerGraph) drop(uid types.UID) []objectRef {
	o := g.objects[uid]
	if o == nil {
		return g.refs(uid)
	}
	delete(g.objects, uid)
	return append(g.unlink(o), g.refs(uid)...)
}

// unlink drops o from its owners and returns the owners that may wait for it. The
// caller holds mu.
func (g *ownerGraph) unlink(o *ownedObject) (check []objectRef) {
	for _, r := range o.owners {
		delete(g.dependents[r.UID], o.uid)
		if len(g.dependents[r.UID]) == 0 {
			delete(g.dependents, r.UID)
		}
		if owner := g.objects[r.UID]; owner != nil && owner.deletion == foreground {
			check = append(check, owner.objectRef)
		}
	}
	return check
}

// refs returns the dependents of owner. The caller holds mu.
func (g *ownerGraph) refs(owner types.UID) []objectRef {
	var out []objectRef
	for uid := range g.dependents[owner] {
		out = append(out, g.objects[uid].objectRef)
	}
	return out
}

// replace makes objs all there is of a resource.
func (g *ownerGraph) replace(resource schema.GroupVersionResource, objs []*metav1.PartialObjectMetadata) (check []objectRef) {
	there := make(map[types.UID]bool, len(objs))
	for _, o := range objs {
		there[o.UID] = true
		check = append(check, g.set(resource, o)...)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for uid, o := range g.objects {
		if o.resource == resource && !there[uid] {
			g.gone.Add(uid, nil)
			check = append(check, g.drop(uid)...)
		}
	}
	return check
}

// forget drops the objects of a resource that is served no more.
func (g *ownerGraph) forget(resource schema.GroupVersionResource) (check []objectRef) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for uid, o := range g.objects {
		if o.resource == resource {
			check = append(check, g.drop(uid)...)
		}
	}
	return check
}

// get returns a copy of an object, and reports whether it is there.
func (g *ownerGraph) get(uid types.UID) (ownedObject, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if o := g.objects[uid]; o != nil {
		return *o, true
	}
	return ownedObject{}, false
}

// isGone reports whether an object with uid was seen to be deleted.
func (g *ownerGraph) isGone(uid types.UID) bool {
	_, gone := g.gone.Get(uid)
	return gone
}

// dependentsOf returns copies of the dependents of owner.
func (g *ownerGraph) dependentsOf(owner types.UID) []ownedObject {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]ownedObject, 0, len(g.dependents[owner]))
	for uid := range g.dependents[owner] {
		out = append(out, *g.objects[uid])
	}
	return out
}
