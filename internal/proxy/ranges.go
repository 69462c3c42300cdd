package proxy

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/reflector"
)

// unservedRetry is how often an API server without ServiceCIDRs (Kubernetes before
// 1.33) is asked for them again.
const unservedRetry = 10 * time.Minute

// rangesWait is how long the first Table waits for ServiceCIDRs once all else is
// there.
const rangesWait = 5 * time.Second

// ranges follows the ranges of ClusterIPs: the API's ServiceCIDRs or, where
// the API has none, the ranges of a flag.
type ranges struct {
	fallback []netip.Prefix
	log      *slog.Logger
	changed  func() // called without mu

	mu      sync.Mutex
	objects map[string][]netip.Prefix
	known   chan struct{} // closed when they have been listed, or cannot be
	once    sync.Once
}

func newRanges(fallback []netip.Prefix, log *slog.Logger, changed func()) *ranges {
	return &ranges{fallback: fallback, log: log, changed: changed, objects: map[string][]netip.Prefix{}, known: make(chan struct{})}
}

// get returns the ranges in no particular order.
func (r *ranges) get() []netip.Prefix {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.objects) == 0 {
		return r.fallback
	}
	return slices.Concat(slices.Collect(maps.Values(r.objects))...)
}

// await waits until the ranges are known, but not for long, and reports whether ctx
// has not ended.
func (r *ranges) await(ctx context.Context) bool {
	limit := time.NewTimer(rangesWait)
	defer limit.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-r.known:
	case <-limit.C:
	}
	return true
}

func (r *ranges) run(ctx context.Context, client kubernetes.Interface) {
	from := reflector.From(client.NetworkingV1().ServiceCIDRs(), metav1.ListOptions{})
	list := from.List
	from.List = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		l, err := list(ctx, o)
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			r.unserved(err)
			select {
			case <-ctx.Done():
			case <-time.After(unservedRetry):
			}
		}
		return l, err
	}
	reflector.Run(reflector.Silent(ctx), "proxy/servicecidrs", from, reflector.Sink[*networkingv1.ServiceCIDR]{
		Replace: func(all []*networkingv1.ServiceCIDR) {
			r.set(func() {
				clear(r.objects)
				for _, s := range all {
					r.objects[s.Name] = prefixes(s)
				}
			})
			r.once.Do(func() { close(r.known) })
		},
		Set:    func(s *networkingv1.ServiceCIDR) { r.set(func() { r.objects[s.Name] = prefixes(s) }) },
		Delete: func(s *networkingv1.ServiceCIDR) { r.set(func() { delete(r.objects, s.Name) }) },
	})
}

func (r *ranges) set(change func()) {
	r.mu.Lock()
	change()
	r.mu.Unlock()
	r.changed()
}

// unserved records that there are no ServiceCIDRs to be read, without which the
// proxy works all the same.
func (r *ranges) unserved(err error) {
	r.once.Do(func() {
		r.log.Info("cannot read ServiceCIDRs; using the ranges of --service-cluster-ip-range", "ranges", r.fallback, "err", err)
		close(r.known)
	})
}

func prefixes(s *networkingv1.ServiceCIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range s.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p)
		}
	}
	return out
}
