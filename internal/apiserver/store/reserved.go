package store

import "time"

const (
	// reservedFor is how long a write that was admitted may take before it is taken for one that has failed.
	reservedFor = 10 * time.Second
	// expirePause is the least time between two looks at all reservations of a share, which writes wait for.
	expirePause = reservedFor / 10
)

// reservations are the bytes of writes that were admitted and are not counted yet, by object: writes of one moment must not all take
// what is left of a share. Of the writes of one object, only one succeeds at a time: the largest counts for all.
type reservations struct {
	of       map[objectID]reservation
	bytes    int64
	by       map[string]int64 // bytes by namespace
	earliest time.Time        // before this none expires, or expire has just looked
}

// objectID names an object of a namespace. The group is left out: keys of etcd do not have it for all kinds.
type objectID struct{ namespace, resource, name string }

type reservation struct {
	bytes int64
	until time.Time
}

// room is what a share has for a write.
type room int

const (
	hasRoom room = iota
	noRoom
	// perhapsRoom: writes that may still fail have reserved the rest.
	perhapsRoom
)

// take reserves more bytes for an object if a share with a limit has room beside what is used. A namespace has no more than most bytes
// reserved, but always one object.
func (r *reservations) take(id objectID, used, more, limit, most int64) room {
	now := time.Now()
	r.expire(now)
	if more <= 0 {
		if used > limit {
			return noRoom
		}
		return hasRoom
	}
	own := r.of[id].bytes
	kept := max(own, more)
	others := r.by[id.namespace] - own
	switch {
	case used+more > limit:
		return noRoom
	case used+r.bytes-own+kept > limit, others > 0 && others+kept > most:
		return perhapsRoom
	}
	if r.of == nil {
		r.of, r.by = map[objectID]reservation{}, map[string]int64{}
	}
	until := now.Add(reservedFor)
	if len(r.of) == 0 {
		r.earliest = until
	}
	r.of[id] = reservation{kept, until}
	r.bytes += kept - own
	r.by[id.namespace] = others + kept
	return hasRoom
}

// drop forgets the reservation of an object, if it has one.
func (r *reservations) drop(id objectID) {
	one, has := r.of[id]
	if !has {
		return
	}
	delete(r.of, id)
	r.bytes -= one.bytes
	if r.by[id.namespace] -= one.bytes; r.by[id.namespace] <= 0 {
		delete(r.by, id.namespace)
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

// reserve reserves more bytes of the share of a namespace for an object, if there is room, and returns what the namespace takes.
func (h *holdings) reserve(id objectID, more int64) (used, limit int64, r room) {
	h.mu.Lock()
	defer h.mu.Unlock()
	used, limit = h.namespaces[id.namespace], h.limits.namespace
	waiting := h.reserved[id.namespace]
	if waiting == nil {
		waiting = &reservations{}
		h.reserved[id.namespace] = waiting
	}
	r = waiting.take(id, used, more, limit, limit)
	h.keep(id.namespace)
	return used, limit, r
}

// keep forgets the reservations of a namespace if there are none. The caller holds mu.
func (h *holdings) keep(namespace string) {
	if r := h.reserved[namespace]; r != nil && len(r.of) == 0 {
		delete(h.reserved, namespace)
	}
}

// reserveEvent reserves more bytes for an Event, as long as all have no more than eventBurst times their share. A namespace reserves
// a part of that only: writes that fail must not keep out the Events of others.
func (h *holdings) reserveEvent(id objectID, more int64) room {
	h.mu.Lock()
	defer h.mu.Unlock()
	limit := eventBurst * h.limits.events
	return h.reservedEvents.take(id, h.eventBytes, more, limit, limit/eventParts)
}

// counted forgets the reservation of an object that is counted now. The caller holds mu.
func (h *holdings) counted(id objectID, event bool) {
	switch r := h.reserved[id.namespace]; {
	case event:
		h.reservedEvents.drop(id)
	case r != nil:
		r.drop(id)
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
