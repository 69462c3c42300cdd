package store

import (
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// Writes of one moment take no more than the rest of a share together. A write that is counted, and one that has failed, make room.
func TestReservations(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHoldings(DefaultPrefix, namespaceShare*1000, slog.New(slog.DiscardHandler))
		h.put("/registry/configmaps/shop/old", 400)
		reserve := func(namespace string, more int64, want room) {
			t.Helper()
			if _, got := h.reserve(namespace, more); got != want {
				t.Errorf("%d bytes in %s: %d, want %d", more, namespace, got, want)
			}
		}
		reserve("shop", 601, noRoom)
		reserve("shop", 300, hasRoom)
		reserve("shop", 300, hasRoom)
		reserve("shop", 1, perhapsRoom)
		reserve("bank", 1000, hasRoom)
		h.put("/registry/configmaps/shop/new", 100) // less than was reserved: the store's form is shorter
		reserve("shop", 200, hasRoom)
		reserve("shop", 1, perhapsRoom)
		time.Sleep(reservedFor + time.Second)
		reserve("shop", 500, hasRoom)
		reserve("shop", 501, noRoom)
		h.put("/registry/configmaps/shop/new", 600)
		h.put("/registry/configmaps/bank/new", 1000)
		if len(h.reserved) > 0 {
			t.Errorf("reservations are left: %v", h.reserved)
		}

		limit := int64(eventBurst) * h.limits.events
		if got := h.reserveEvent(-1); got != hasRoom || len(h.reservedEvents.list) > 0 {
			t.Errorf("a smaller Event: %d, reserved are %v", got, h.reservedEvents.list)
		}
		for i := range 3 {
			if got, want := h.reserveEvent(limit/2), []room{hasRoom, hasRoom, perhapsRoom}[i]; got != want {
				t.Errorf("Event %d: %d, want %d", i, got, want)
			}
		}
		for i := range 2 {
			h.put(fmt.Sprintf("/registry/events/shop/%d", i), limit/2)
		}
		if got := h.reserveEvent(1); got != noRoom || len(h.reservedEvents.list) > 0 {
			t.Errorf("another Event: %d, reserved are %v", got, h.reservedEvents.list)
		}
	})
}
