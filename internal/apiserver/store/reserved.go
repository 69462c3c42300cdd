package store

import "time"

// reservedFor is how long a write that was admitted may take before it is taken for one that has failed.
const reservedFor = 10 * time.Second

// reservations are the bytes of writes that were admitted and are not counted yet, the oldest first: writes of one moment
// must not all take what is left of a share. Their number is that of the writes in flight, which the API server bounds.
type reservations struct {
	list  []reservation
	bytes int64
}

type reservation struct {
	bytes int64
	until time.Time
}

// expire forgets writes that have failed.
func (r *reservations) expire(now time.Time) {
	for len(r.list) > 0 && now.After(r.list[0].until) {
		r.drop()
	}
}

// drop forgets the oldest write: it is counted now, or was another one, of which the same number are left.
func (r *reservations) drop() {
	if len(r.list) > 0 {
		r.bytes -= r.list[0].bytes
		r.list = r.list[1:]
	}
}

func (r *reservations) add(bytes int64, now time.Time) {
	r.list = append(r.list, reservation{bytes, now.Add(reservedFor)})
	r.bytes += bytes
}

// room is what a share has for a write.
type room int

const (
	hasRoom room = iota
	noRoom
	// perhapsRoom is that of a share whose rest is reserved for writes that may yet fail.
	perhapsRoom
)

// reserve reserves more bytes of the share of a namespace, if there is room, and returns what the namespace takes.
func (h *holdings) reserve(namespace string, more int64) (used int64, r room) {
	h.mu.Lock()
	defer h.mu.Unlock()
	used = h.namespaces[namespace]
	waiting := h.reserved[namespace]
	if waiting == nil {
		waiting = &reservations{}
	}
	r = waiting.take(used, more, h.limits.namespace)
	if h.reserved[namespace] = waiting; len(waiting.list) == 0 {
		delete(h.reserved, namespace)
	}
	return used, r
}

// reserveEvent reserves more bytes for an Event, as long as all have no more than eventBurst times their share.
func (h *holdings) reserveEvent(more int64) room {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.reservedEvents.take(h.eventBytes, more, eventBurst*h.limits.events)
}

func (r *reservations) take(used, more, limit int64) room {
	now := time.Now()
	more = max(0, more)
	r.expire(now)
	switch {
	case used+more > limit:
		return noRoom
	case used+r.bytes+more > limit:
		return perhapsRoom
	}
	if more > 0 {
		r.add(more, now)
	}
	return hasRoom
}
