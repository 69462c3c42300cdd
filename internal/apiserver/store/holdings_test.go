package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
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
		h.put(key("loud", i), 100, 0)
	}
	h.put(key("quiet", 0), 100, 0)
	if got := h.surplus(); len(got) > 0 || h.ofEvents() != 800 {
		t.Errorf("%d bytes, surplus %v", h.ofEvents(), got)
	}
	h.put(key("loud", 0), 150, 0)
	h.put(key("loud", 7), 50, 0)
	if got, want := h.surplus(), []string{key("loud", 1), key("loud", 2)}; !slices.Equal(got, want) { // 100 too much, 100 to spare
		t.Errorf("surplus %v; want %v", got, want)
	}
	for _, k := range h.surplus() {
		h.put(k, 0, 0)
	}
	if got := h.surplus(); len(got) > 0 || h.ofEvents() != 700 {
		t.Errorf("after that %d bytes, surplus %v", h.ofEvents(), got)
	}
	h.put("/registry/configmaps/shop/a", 70, 0)
	h.put("/registry/configmaps/shop/a", 50, 0)
	h.put("/registry/secrets/shop/a", 5, 0)
	if got := ofShop(h); got != 55 {
		t.Errorf("%d bytes; want 55", got)
	}
	h.put("/registry/configmaps/shop/a", 0, 0)
	h.put("/registry/secrets/shop/a", 0, 0)
	if ofShop(h) != 0 || len(h.namespaces) > 0 {
		t.Errorf("deleted: %v", h.namespaces)
	}
}

// ofShop returns the bytes of the namespace shop, without Events.
func ofShop(h *holdings) int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.namespaces["shop"]
}

// pages is a store that is read page by page, and fails at one.
type pages struct {
	source
	all   []*mvccpb.KeyValue
	fails int
	at    func() // at each page
}

func (p *pages) page(_ context.Context, from, _ []byte, _ int64) (out []*mvccpb.KeyValue, err error) {
	p.at()
	if p.fails--; p.fails == 0 {
		return nil, errors.New("compacted")
	}
	for i := range p.all {
		if string(p.all[i].Key) >= string(from) && len(out) < holdingsPage {
			out = append(out, p.all[i])
		}
	}
	return out, nil
}

// While all is counted again, and when that fails, what was counted before holds.
func TestRecountKeepsTheOldCount(t *testing.T) {
	t.Parallel()
	h := newHoldings(DefaultPrefix, DefaultQuota, slog.New(slog.DiscardHandler))
	h.put("/registry/configmaps/shop/old", 1000, 0)
	h.put("/registry/events/shop/old", 500, 0)
	p := &pages{at: func() {
		if ofShop(h) != 1000 || h.ofEvents() != 500 {
			t.Errorf("while all is counted: %d bytes, %d of Events", ofShop(h), h.ofEvents())
		}
	}}
	size := int64(0)
	for i := range 2 * holdingsPage {
		key := fmt.Sprintf("/registry/configmaps/shop/%04d", i)
		p.all = append(p.all, &mvccpb.KeyValue{Key: []byte(key), Value: []byte("x")})
		size += int64(len(key)) + 1
	}
	end := []byte(DefaultPrefix + "0")
	p.fails = 2
	if err := h.recount(t.Context(), p, 1, end); err == nil {
		t.Error("no error")
	}
	p.fails = -1
	if err := h.recount(t.Context(), p, 1, end); err != nil || ofShop(h) != size || h.ofEvents() != 0 {
		t.Errorf("%v; %d bytes, want %d; %d of Events", err, ofShop(h), size, h.ofEvents())
	}
}
