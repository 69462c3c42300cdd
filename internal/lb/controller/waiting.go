package controller

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// waitingList has the Services that wait for an address, the oldest first.
type waitingList struct {
	list []waitingService
	in   map[svc.Name]waitingService
}

type waitingService struct {
	name  svc.Name
	since int64 // creation, in seconds
}

func newWaitingList() waitingList { return waitingList{in: map[svc.Name]waitingService{}} }

func (w waitingService) compare(o waitingService) int {
	return cmp.Or(cmp.Compare(w.since, o.since), w.name.Compare(o.name))
}

func (w *waitingList) add(s *corev1.Service) {
	item := waitingService{svc.NameOf(s), s.CreationTimestamp.Unix()}
	if have, is := w.in[item.name]; is {
		if have == item {
			return
		}
		w.remove(item.name)
	}
	w.in[item.name] = item
	i, _ := slices.BinarySearchFunc(w.list, item, waitingService.compare)
	w.list = slices.Insert(w.list, i, item)
}

func (w *waitingList) remove(name svc.Name) {
	item, is := w.in[name]
	if !is {
		return
	}
	delete(w.in, name)
	if i, found := slices.BinarySearchFunc(w.list, item, waitingService.compare); found {
		w.list = slices.Delete(w.list, i, i+1)
	}
}

func (w *waitingList) has(name svc.Name) bool {
	_, is := w.in[name]
	return is
}

// retryWaiting gives addresses to the Services that wait, the oldest first. The workers write the addresses of Services
// that get one. The caller holds mu.
func (st *state) retryWaiting() {
	st.freed = false
	failed := map[string]bool{} // requests for which an earlier Service got no address, as a key
	for _, w := range slices.Clone(st.waiting.list) {
		s := st.object(w.name)
		if !st.isOurs(s) || s.DeletionTimestamp != nil || len(st.alloc.Of(w.name)) == 0 && st.othersIngress(s) != "" {
			continue
		}
		r, problem := st.request(s)
		key := fmt.Sprint(r.Pools, r.Families, r.Both)
		alike := len(r.Asked) == 0 && r.Key == "" && len(r.Prefer) == 0
		if problem != nil || alike && failed[key] {
			continue
		}
		before := st.alloc.Of(w.name)
		if result := st.alloc.Assign(r); alike && len(result.Addrs) == 0 {
			failed[key] = true
		}
		if !slices.Equal(before, st.alloc.Of(w.name)) {
			st.queue(w.name)
		}
	}
}

// serveWaiting retries the Services that wait whenever an address may have become free.
func (t *term) serveWaiting(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.wake:
		}
		t.mu.Lock()
		if t.freed {
			t.retryWaiting()
		}
		t.mu.Unlock()
	}
}
