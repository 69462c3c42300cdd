package store

import (
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
)

// Writes of one moment take no more than the rest of a share together, whatever their sizes. A write that is counted makes room for its
// own bytes only, one that is tried again takes them once, also beside a smaller one of the same object, and one that has failed makes
// room later. A namespace reserves a part of what Events may take, and several together do not keep out one with few.
func TestReservations(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHoldings(DefaultPrefix, namespaceShare*1000, slog.New(slog.DiscardHandler))
		revision := int64(0)
		next := func() int64 { revision++; return revision }
		h.put("/registry/configmaps/shop/old", 300, next())
		reserve := func(namespace, name string, more int64, want room) {
			t.Helper()
			w := write{id: idOf(corev1.Resource("configmaps"), namespace, name), size: more, more: more}
			if _, _, got := h.reserve(w); got != want {
				t.Errorf("%d bytes of %s/%s: %d, want %d", more, namespace, name, got, want)
			}
		}
		reserve("shop", "a", 701, noRoom)
		reserve("shop", "large", 600, hasRoom)
		reserve("shop", "small", 1, hasRoom)
		h.put("/registry/configmaps/shop/small", 1, next())
		h.put("/registry/pods/shop/large", 1, next()) // of another kind
		h.put("/registry/configmaps/shop/other", 1, next())
		reserve("shop", "b", 98, perhapsRoom) // 303 are there, 600 reserved
		reserve("shop", "large", 600, hasRoom)
		reserve("shop", "large", 1, hasRoom) // the other write of it goes on
		reserve("shop", "b", 98, perhapsRoom)
		reserve("shop", "b", 97, hasRoom)
		reserve("shop", "c", 1, perhapsRoom)
		reserve("bank", "a", 1000, hasRoom)
		h.put("/registry/configmaps/shop/large", 500, next()) // its form in the store is shorter
		h.put("/registry/configmaps/shop/b", 97, next())
		reserve("shop", "d", 100, hasRoom)
		reserve("shop", "e", 1, perhapsRoom)
		time.Sleep(reservedFor + time.Second)
		reserve("shop", "e", 100, hasRoom)
		reserve("shop", "f", 101, noRoom)
		h.put("/registry/configmaps/shop/e", 100, next())
		h.expire()
		if len(h.reserved) > 0 {
			t.Errorf("reservations are left: %v", h.reserved)
		}

		reserve("mill", "a", 500, hasRoom)
		time.Sleep(time.Millisecond)
		reserve("mill", "b", 500, hasRoom)
		time.Sleep(reservedFor)
		reserve("mill", "c", 500, hasRoom) // a has expired
		time.Sleep(expirePause / 2)
		reserve("mill", "d", 500, perhapsRoom) // b has, too, but not all writes look
		time.Sleep(expirePause / 2)
		reserve("mill", "d", 500, hasRoom)

		h.put("/registry/events/shop/old", 10, next())
		h.put("/registry/events/shop/old", 0, next())
		event := func(namespace, name string, more int64) write {
			return write{id: idOf(eventsv1.Resource("events"), namespace, name), size: more, more: more}
		}
		for i, c := range []struct {
			namespace string
			more      int64
			want      room
		}{
			{"shop", -1, hasRoom}, {"shop", 200, hasRoom}, {"shop", 51, perhapsRoom}, {"shop", 50, hasRoom}, {"shop", 0, hasRoom},
			{"bank", 300, hasRoom}, {"bank", 1, perhapsRoom}, // one has room, whatever its size
			{"mill", 250, hasRoom}, {"farm", 200, hasRoom},
			{"inn", 51, perhapsRoom}, {"inn", 50, hasRoom}, {"inn", 1, perhapsRoom}, // each of five has a fair part
			{"yard", 42, perhapsRoom}, {"yard", 41, hasRoom}, {"farm", 1, perhapsRoom},
		} {
			if got := h.reserveEvent(event(c.namespace, fmt.Sprint(i), c.more)); got != c.want {
				t.Errorf("Event %d: %d, want %d", i, got, c.want)
			}
		}
		for i, namespace := range []string{1: "shop", 3: "shop", 5: "bank", 7: "mill", 8: "farm", 10: "inn", 13: "yard"} {
			h.put(fmt.Sprintf("/registry/events/%s/%d", namespace, i), 500, next())
		}
		h.put("/registry/events/inn/10", 10, next())
		h.put("/registry/events/yard/13", 0, next())
		for _, more := range []int64{0, 1} {
			if got := h.reserveEvent(event("shop", "more", more)); got != noRoom || len(h.reservedEvents.of) > 0 ||
				len(h.reservedEvents.by) > 0 || h.reservedEvents.bytes != 0 {
				t.Errorf("%d bytes more: %d, reserved are %+v", more, got, h.reservedEvents)
			}
		}
		// Others have used up everything: who has few goes on, up to a fair part.
		for _, c := range []struct {
			namespace string
			more      int64
			want      room
		}{{"inn", 0, hasRoom}, {"inn", 41, noRoom}, {"inn", 40, hasRoom}, {"inn", 1, noRoom}, {"yard", 41, hasRoom}, {"bank", 1, noRoom}} {
			if got := h.reserveEvent(event(c.namespace, fmt.Sprint("last", c.more), c.more)); got != c.want {
				t.Errorf("%s, %d bytes: %d, want %d", c.namespace, c.more, got, c.want)
			}
		}
	})
}
