package store

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// reservedFor is how long a write that was admitted may take before it is taken for one that has failed.
	reservedFor = 10 * time.Second
	// expirePause is the least time between two looks at all reservations of a share, which writes wait for.
	expirePause = reservedFor / 10
)

// objectID names an object of a namespace. Events have the group core, by which they are stored.
type objectID struct {
	namespace string
	kind      schema.GroupResource
	name      string
}

// idOf returns the ID of an object by the resource of a request for it.
func idOf(gr schema.GroupResource, namespace, name string) objectID {
	if gr == eventsv1.Resource("events") {
		gr = corev1.Resource("events")
	}
	return objectID{namespace, gr, name}
}

// key returns the key of the object in etcd, below prefix.
func (id objectID) key(prefix string) string {
	dir := id.kind.Resource
	if id.kind.Group != "" {
		dir = id.kind.Group + "/" + dir
	}
	return prefix + "/" + dir + "/" + id.namespace + "/" + id.name
}

// write is what a request wants to store.
type write struct {
	id objectID
	// size is what the object has after it, in bytes of etcd, and more is how much that is beyond what it had.
	size, more int64
	// base is the revision of the object that an update changes: of the object's later changes, the first is this write, or makes it
	// fail.
	base int64
	// creates is the UID of the object that a creation makes, anyUID for a write whose base is not known, and empty for others.
	creates types.UID
}

const (
	anyUID types.UID = "any"
	// severalUIDs stands for several creations of one name: which of them will succeed is not known.
	severalUIDs types.UID = "several"
)

// reservations are the bytes of writes that were admitted and are not counted yet, by object: writes of one moment must not all take
// what is left of a share.
type reservations struct {
	of       map[objectID]*reservation
	bytes    int64
	by       map[string]int64 // bytes by namespace
	earliest time.Time        // before this none expires, or expire has just looked
}

// reservation is for all admitted writes of an object. It holds the largest size that one of them gives it, so that changes which
// are counted late neither end it nor add to it.
type reservation struct {
	size, counted int64
	// base and creates are of the writes: the reservation ends with a change after base once creates is empty.
	base    int64
	creates types.UID
	changed int64 // revision of the last change that is counted, 0 if there was none
	until   time.Time
}

// bytes is what the object may take beside what is counted of it.
func (r *reservation) bytes() int64 { return max(0, r.size-r.counted) }

// room is what a share has for a write.
type room int

const (
	hasRoom room = iota
	noRoom
	// perhapsRoom: writes that may still fail have reserved the rest.
	perhapsRoom
)

// ask returns what is reserved for an object of which counted bytes are counted, and what would be with w.
func (r *reservations) ask(w write, counted int64) (own, kept int64) {
	if one := r.of[w.id]; one != nil {
		own = one.bytes()
	}
	return own, max(0, r.sizeWith(w, counted)-counted)
}

// sizeWith returns the largest size that w and the writes before it give their object.
func (r *reservations) sizeWith(w write, counted int64) int64 {
	size := max(w.size, counted+w.more)
	if one := r.of[w.id]; one != nil {
		size = max(size, one.size)
	}
	return size
}

// add reserves what w needs.
func (r *reservations) add(w write, counted int64, now time.Time) {
	if r.of == nil {
		r.of, r.by = map[objectID]*reservation{}, map[string]int64{}
	}
	until := now.Add(reservedFor)
	if len(r.of) == 0 {
		r.earliest = until
	}
	one := r.of[w.id]
	if one == nil {
		one = &reservation{counted: counted}
		r.of[w.id] = one
	}
	r.resize(w.id, one, r.sizeWith(w, counted), counted)
	one.until, one.base = until, max(one.base, w.base)
	switch {
	case w.creates == "" || w.creates == one.creates:
	case one.creates == "":
		one.creates = w.creates
	default:
		one.creates = severalUIDs
	}
}

// resize sets the sizes of a reservation.
func (r *reservations) resize(id objectID, one *reservation, size, counted int64) {
	before := one.bytes()
	one.size, one.counted = size, counted
	more := one.bytes() - before
	r.bytes += more
	if r.by[id.namespace] += more; r.by[id.namespace] <= 0 {
		delete(r.by, id.namespace)
	}
}

// count takes in that an object has size bytes since a revision, 0 for one that is not known.
func (r *reservations) count(id objectID, size, revision int64) {
	if one := r.of[id]; one != nil {
		r.resize(id, one, one.size, size)
		one.changed = max(one.changed, revision)
		r.end(id, one)
	}
}

// wrote takes in that an object with a UID has a revision.
func (r *reservations) wrote(id objectID, uid types.UID, revision int64) {
	one := r.of[id]
	if one == nil || one.creates == "" || one.creates != anyUID && one.creates != uid {
		return
	}
	one.creates, one.base = "", max(one.base, revision-1)
	r.end(id, one)
}

// end forgets a reservation whose writes are counted or have failed.
func (r *reservations) end(id objectID, one *reservation) {
	if one.creates == "" && one.changed > one.base {
		r.drop(id)
	}
}

// drop forgets the reservation of an object, if it has one.
func (r *reservations) drop(id objectID) {
	if one := r.of[id]; one != nil {
		r.resize(id, one, 0, one.counted)
		delete(r.of, id)
	}
}

// expire forgets writes that have failed, up to expirePause late.
func (r *reservations) expire(now time.Time) {
	if len(r.of) == 0 || now.Before(r.earliest) {
		return
	}
	r.earliest = now.Add(reservedFor)
	for id, one := range r.of {
		if now.After(one.until) {
			r.drop(id)
		} else if one.until.Before(r.earliest) {
			r.earliest = one.until
		}
	}
	if pause := now.Add(expirePause); r.earliest.Before(pause) {
		r.earliest = pause
	}
}

// reserve reserves what a write needs of the share of its namespace, if there is room, and returns what the namespace takes.
func (h *holdings) reserve(w write) (used, limit int64, r room) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now, namespace := time.Now(), w.id.namespace
	used, limit = h.namespaces[namespace], h.limits.namespace
	waiting := h.reserved[namespace]
	if waiting == nil {
		waiting = &reservations{}
		h.reserved[namespace] = waiting
	}
	defer h.keep(namespace)
	waiting.expire(now)
	counted := h.counted(w.id)
	own, kept := waiting.ask(w, counted)
	switch {
	case used+w.more > limit:
		return used, limit, noRoom
	case used+waiting.bytes-own+kept > limit:
		return used, limit, perhapsRoom
	}
	waiting.add(w, counted, now)
	return used, limit, hasRoom
}

// counted returns the bytes that are counted of an object. The caller holds mu.
func (h *holdings) counted(id objectID) int64 { return h.objects[id.key(h.prefix)].size }

// keep forgets the reservations of a namespace if there are none. The caller holds mu.
func (h *holdings) keep(namespace string) {
	if r := h.reserved[namespace]; r != nil && len(r.of) == 0 {
		delete(h.reserved, namespace)
	}
}

// reserveEvent reserves what the write of an Event needs, as long as all have no more than eventBurst times their share. A namespace
// reserves a part of that only: writes that fail must not keep out the Events of others. One that takes no more than a fair part, with
// what it reserves, has room in any case: several others together must not keep it out.
func (h *holdings) reserveEvent(w write) room {
	h.mu.Lock()
	defer h.mu.Unlock()
	now, r, counted := time.Now(), &h.reservedEvents, h.counted(w.id)
	r.expire(now)
	limit := eventBurst * h.limits.events
	most := limit / eventParts
	own, kept := r.ask(w, counted)
	others := r.by[w.id.namespace] - own
	full := h.eventBytes+max(0, w.more) > limit
	tight := r.bytes-own+kept+h.eventBytes > limit || others > 0 && others+kept > most
	switch {
	case !full && (w.more <= 0 || !tight):
	case h.takesOfEvents(w.id.namespace)+others+kept <= most/h.sharers(w.id.namespace):
	case full:
		return noRoom
	default:
		return perhapsRoom
	}
	if w.more > 0 {
		r.add(w, counted, now)
	}
	return hasRoom
}

// takesOfEvents returns the bytes of the Events of a namespace. The caller holds mu.
func (h *holdings) takesOfEvents(namespace string) int64 {
	if l := h.events[namespace]; l != nil {
		return l.bytes
	}
	return 0
}

// sharers returns how many namespaces have Events or reservations for some, with the one called namespace. The caller holds mu.
func (h *holdings) sharers(namespace string) int64 {
	n, has := len(h.events), h.events[namespace] != nil
	for one := range h.reservedEvents.by {
		if h.events[one] == nil {
			n++
			has = has || one == namespace
		}
	}
	if !has {
		n++
	}
	return int64(n)
}

// reservationsOf returns the reservations among which that of an object is, nil if there are none. The caller holds mu.
func (h *holdings) reservationsOf(id objectID) *reservations {
	if id.kind == corev1.Resource("events") {
		return &h.reservedEvents
	}
	return h.reserved[id.namespace]
}

// count takes in that an object has size bytes since a revision, 0 for one that is not known. The caller holds mu.
func (h *holdings) count(id objectID, size, revision int64) {
	if r := h.reservationsOf(id); r != nil {
		r.count(id, size, revision)
		h.keep(id.namespace)
	}
}

// recounted gives all reservations what is counted now. The caller holds mu.
func (h *holdings) recounted() {
	update := func(r *reservations) {
		for id := range r.of {
			r.count(id, h.counted(id), 0)
		}
	}
	update(&h.reservedEvents)
	for _, r := range h.reserved {
		update(r)
	}
}

// wrote takes in that an object with a UID has a revision, by a write of this server.
func (h *holdings) wrote(id objectID, uid types.UID, revision int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r := h.reservationsOf(id); r != nil {
		r.wrote(id, uid, revision)
		h.keep(id.namespace)
	}
}

// expire forgets reservations of all namespaces whose writes have failed.
func (h *holdings) expire() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for namespace, r := range h.reserved {
		r.expire(time.Now())
		h.keep(namespace)
	}
}
