package store

import (
	"cmp"
	"container/list"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	corev1 "k8s.io/api/core/v1"
)

const (
	// namespaceShare and eventShare are the parts of the store, one of so many, that the objects of a namespace and
	// the Events of all namespaces may take.
	namespaceShare = 8
	eventShare     = 16
	// holdingsPage is how many objects are read at a time when all are counted. Each may have 1.5 MB.
	holdingsPage = 32
	// holdingsPause is the time until they are counted again after a failure.
	holdingsPause = time.Second
	// trimBatch is how many Events one transaction removes.
	trimBatch = 100
)

// source is the etcd that holdings follow.
type source interface {
	// changes begins to follow what is written from from to end after the revision that it returns. next waits for some changes; stop
	// ends it.
	changes(ctx context.Context, from, end []byte) (
		revision int64, next func(context.Context) ([]*mvccpb.Event, error), stop func(), err error)
	// page returns the first objects from from to end at a revision, at most holdingsPage.
	page(ctx context.Context, from, end []byte, revision int64) ([]*mvccpb.KeyValue, error)
	// remove removes objects in one transaction, and returns how many were there.
	remove(ctx context.Context, keys []string) (int64, error)
	// quota returns the quota of the store in bytes, 0 if it is not known now.
	quota(ctx context.Context) int64
	// leads reports whether it is this server that removes surplus Events.
	leads() bool
}

// holdings knows what each namespace takes of an etcd, and which Events are the oldest. It follows the changes, so that the cost
// is that of the changes. One goroutine runs it; the other methods may be called by any.
type holdings struct {
	prefix string // of the keys of the API, without a slash at the end
	log    *slog.Logger

	mu         sync.Mutex
	limits     holdingLimits
	objects    map[string]holding
	namespaces map[string]int64      // bytes, without Events
	events     map[string]*eventList // by namespace
	eventBytes int64
	// reserved are by namespace, without Events.
	reserved       map[string]*reservations
	reservedEvents reservations
}

// holdingLimits are in bytes.
type holdingLimits struct{ namespace, events int64 }

func limitsOf(quota int64) holdingLimits {
	return holdingLimits{quota / namespaceShare, quota / eventShare}
}

// holding is one object.
type holding struct {
	size  int64
	event *list.Element // nil if it is none
}

// eventList is the Events of a namespace: their keys, the oldest first.
type eventList struct {
	keys  *list.List
	bytes int64
}

func newHoldings(prefix string, quota int64, log *slog.Logger) *holdings {
	return &holdings{
		prefix: prefix, limits: limitsOf(quota), log: log,
		objects: map[string]holding{}, namespaces: map[string]int64{}, events: map[string]*eventList{},
		reserved: map[string]*reservations{},
	}
}

// run works until ctx ends, which is before the source ends.
func (h *holdings) run(ctx context.Context, of source) {
	for ctx.Err() == nil {
		if err := h.follow(ctx, of); err != nil && ctx.Err() == nil {
			h.log.Warn("cannot count what namespaces take of the store; retrying", "err", err, "after", holdingsPause)
		}
		select {
		case <-ctx.Done():
		case <-time.After(holdingsPause):
		}
	}
}

// follow counts all objects, and then what changes.
func (h *holdings) follow(ctx context.Context, of source) error {
	if quota := of.quota(ctx); quota > 0 {
		h.mu.Lock()
		h.limits = limitsOf(quota)
		h.mu.Unlock()
	}
	from, end := []byte(h.prefix+"/"), []byte(h.prefix+"0") // the character after the slash
	revision, next, stop, err := of.changes(ctx, from, end)
	if err != nil {
		return err
	}
	defer stop()
	if err := h.recount(ctx, of, revision, end); err != nil {
		return err
	}
	for {
		if err := h.trim(ctx, of); err != nil {
			h.log.Warn("cannot remove the oldest Events; retrying with the next change", "err", err)
		}
		changes, err := next(ctx)
		if err != nil || ctx.Err() != nil {
			return err
		}
		h.apply(changes)
	}
}

// recount replaces the count by that of the objects at a revision. Until all are counted, the old one holds.
func (h *holdings) recount(ctx context.Context, of source, revision int64, end []byte) error {
	next := newHoldings(h.prefix, 0, h.log)
	if err := next.countAll(ctx, of, revision, end); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.objects, h.namespaces, h.events, h.eventBytes = next.objects, next.namespaces, next.events, next.eventBytes
	h.recounted()
	return nil
}

// countAll counts the objects at a revision.
func (h *holdings) countAll(ctx context.Context, of source, revision int64, end []byte) error {
	type found struct {
		key      string
		size     int64
		modified int64
	}
	var events []found
	for from := []byte(h.prefix + "/"); ; {
		page, err := of.page(ctx, from, end, revision)
		if err != nil {
			return err
		}
		for _, o := range page {
			f := found{string(o.Key), sizeOfKV(o), o.ModRevision}
			if _, event := h.owner(f.key); event {
				events = append(events, f)
				continue
			}
			h.put(f.key, f.size, 0)
		}
		if len(page) < holdingsPage {
			break
		}
		from = append(slices.Clone(page[len(page)-1].Key), 0)
	}
	slices.SortFunc(events, func(a, b found) int { return cmp.Compare(a.modified, b.modified) })
	for _, f := range events {
		h.put(f.key, f.size, 0)
	}
	return nil
}

func sizeOfKV(o *mvccpb.KeyValue) int64 { return int64(len(o.Key) + len(o.Value)) }

// apply counts changes.
func (h *holdings) apply(changes []*mvccpb.Event) {
	for _, c := range changes {
		size := int64(0)
		if c.Type == mvccpb.Event_PUT {
			size = sizeOfKV(c.Kv)
		}
		h.put(string(c.Kv.Key), size, c.Kv.ModRevision)
	}
}

// put counts the object of a key, which is gone if size is 0. The change has a revision, 0 if it is not known.
func (h *holdings) put(key string, size, revision int64) {
	id, event := h.identify(key)
	namespace := id.namespace
	if namespace == "" {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	old := h.objects[key]
	delete(h.objects, key)
	switch {
	case event:
		h.putEvent(namespace, key, old, size)
	case size > 0:
		h.objects[key] = holding{size: size}
	}
	if !event {
		if h.namespaces[namespace] += size - old.size; h.namespaces[namespace] <= 0 {
			delete(h.namespaces, namespace)
		}
	}
	h.count(id, size, revision)
}

// putEvent is put for an Event, which is the youngest now. The caller holds h.mu.
func (h *holdings) putEvent(namespace, key string, old holding, size int64) {
	l := h.events[namespace]
	if l == nil {
		l = &eventList{keys: list.New()}
		h.events[namespace] = l
	}
	if old.event != nil {
		l.keys.Remove(old.event)
	}
	if size > 0 {
		h.objects[key] = holding{size, l.keys.PushBack(key)}
	}
	l.bytes += size - old.size
	h.eventBytes += size - old.size
	if l.keys.Len() == 0 {
		delete(h.events, namespace)
	}
}

// owner returns the namespace of a key, "" for an object without one, and whether the object is an Event.
func (h *holdings) owner(key string) (namespace string, event bool) {
	id, event := h.identify(key)
	return id.namespace, event
}

// identify returns the object of a key, without a namespace if it has none, and whether it is an Event.
func (h *holdings) identify(key string) (id objectID, event bool) {
	prefix := h.prefix + "/"
	if !strings.HasPrefix(key, prefix) {
		return id, false
	}
	kind, dir := kindOf(prefix, key)
	rest, ok := strings.CutPrefix(key, dir)
	if !ok || strings.Count(rest, "/") != 1 {
		return id, false
	}
	namespace, name, _ := strings.Cut(rest, "/")
	return objectID{namespace, kind, name}, kind == corev1.Resource("events")
}

// trim removes the oldest Events of the namespaces that have the most, while all take more than their share.
func (h *holdings) trim(ctx context.Context, of source) error {
	h.expire()
	if !of.leads() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, spaceTimeout)
	defer cancel()
	for all := h.surplus(); len(all) > 0; {
		keys := all[:min(len(all), trimBatch)]
		all = all[len(keys):]
		n, err := of.remove(ctx, keys)
		if err != nil {
			return err
		}
		eventsRemoved.Add(float64(n))
		for _, key := range keys { // the watch shows it, too, but later
			h.put(key, 0, 0)
		}
	}
	return nil
}

// surplus returns the keys of the Events to be removed: an eighth of the share besides what is too much, so that it is
// not done for each new Event.
func (h *holdings) surplus() (keys []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.eventBytes <= h.limits.events {
		return nil
	}
	excess := h.eventBytes - h.limits.events + h.limits.events/8
	left := map[string]int64{}
	next := map[string]*list.Element{}
	for namespace, l := range h.events {
		left[namespace], next[namespace] = l.bytes, l.keys.Front()
	}
	for excess > 0 && len(left) > 0 {
		most := slices.MaxFunc(slices.Collect(maps.Keys(left)), func(a, b string) int { return cmp.Compare(left[a], left[b]) })
		second := int64(0)
		for namespace, bytes := range left {
			if namespace != most {
				second = max(second, bytes)
			}
		}
		for excess > 0 && left[most] >= second && next[most] != nil {
			key := next[most].Value.(string)
			size := h.objects[key].size
			keys, next[most] = append(keys, key), next[most].Next()
			left[most] -= size
			excess -= size
		}
		if next[most] == nil {
			delete(left, most)
		}
	}
	return keys
}

// ofEvents returns the bytes of all Events.
func (h *holdings) ofEvents() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.eventBytes
}
