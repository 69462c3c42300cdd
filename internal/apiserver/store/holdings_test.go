package store

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"
)

// The key of an object in a namespace belongs to that namespace. Other keys, of the API or not, belong to none.
func TestOwners(t *testing.T) {
	t.Parallel()
	h := newHoldings(DefaultPrefix, DefaultQuota, slog.New(slog.DiscardHandler))
	for key, want := range map[string]string{
		"/registry/pods/shop/web": "shop", "/registry/events/shop/web": "shop events", "/registry/apps/deployments/shop/web": "shop",
		"/registry/example.com/backups/shop/web": "shop", "/registry/nodes/a": "", "/registry/rbac.authorization.k8s.io/clusterroles/a": "",
		"/registry/policy/poddisruptionbudgets/shop/a": "shop", "/fairlead/hand-over": "", "/registry2/pods/shop/web": "",
	} {
		got, event := h.owner(key)
		if event {
			got += " events"
		}
		if got != want {
			t.Errorf("%s belongs to %q; want %q", key, got, want)
		}
	}
}

// The oldest Events of the namespaces with the most go first, an update makes one young, and what is deleted is gone.
func TestSurplus(t *testing.T) {
	t.Parallel()
	h := newHoldings(DefaultPrefix, 16*800, slog.New(slog.DiscardHandler)) // 800 bytes of Events
	key := func(namespace string, i int) string { return fmt.Sprintf("/registry/events/%s/%d", namespace, i) }
	for i := range 7 {
		h.put(key("loud", i), 100)
	}
	h.put(key("quiet", 0), 100)
	if got := h.surplus(); len(got) > 0 || h.ofEvents() != 800 {
		t.Errorf("%d bytes, surplus %v", h.ofEvents(), got)
	}
	h.put(key("loud", 0), 150)
	h.put(key("loud", 7), 50)
	if got, want := h.surplus(), []string{key("loud", 1), key("loud", 2)}; !slices.Equal(got, want) { // 100 too much, 100 to spare
		t.Errorf("surplus %v; want %v", got, want)
	}
	for _, k := range h.surplus() {
		h.put(k, 0)
	}
	if got := h.surplus(); len(got) > 0 || h.ofEvents() != 700 {
		t.Errorf("after that %d bytes, surplus %v", h.ofEvents(), got)
	}
	h.put("/registry/configmaps/shop/a", 70)
	h.put("/registry/configmaps/shop/a", 50)
	h.put("/registry/secrets/shop/a", 5)
	if got := h.of("shop"); got != 55 {
		t.Errorf("%d bytes; want 55", got)
	}
	h.put("/registry/configmaps/shop/a", 0)
	h.put("/registry/secrets/shop/a", 0)
	if h.of("shop") != 0 || len(h.namespaces) > 0 {
		t.Errorf("deleted: %v", h.namespaces)
	}
}
