package dns

import (
	"context"
	"errors"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/zone"
)

// feed enters the objects of one kind into the zone, which keeps what it needs
// of them: a tenth of their size.
type feed[T metav1.Object] struct {
	set    func(T)
	remove func(svc.Name)
	// changed, if not nil, is called after set for each change that the watch
	// brings, not for what is in lists, which may be old.
	changed func(T)
	// have returns the objects in the zone.
	have   func() []svc.Name
	synced chan struct{} // closed after the first list
	once   sync.Once
	// version, if not nil, gets the resource version that the zone has.
	version func(uint64)
}

func (f *feed[T]) update(o T) {
	f.set(o)
	if f.changed != nil {
		f.changed(o)
	}
}

// replace sets the listed objects before it removes the rest, so that names that do
// not change are answered without a gap.
func (f *feed[T]) replace(objs []T) {
	there := make(map[svc.Name]struct{}, len(objs))
	for _, o := range objs {
		there[svc.NameOf(o)] = struct{}{}
		f.set(o)
	}
	for _, n := range f.have() {
		if _, ok := there[n]; !ok {
			f.remove(n)
		}
	}
	f.once.Do(func() { close(f.synced) })
}

// run watches the kind until ctx ends.
func (f *feed[T]) run(ctx context.Context, s *Server, kind string, from reflector.Source) {
	// recordAPI logs once what the reflector would log at each retry.
	from = from.Observed(func(err error) { s.recordAPI(kind, err) })
	reflector.Run(reflector.Silent(ctx), "dns/"+kind, from, reflector.Sink[T]{
		Replace: f.replace, Set: f.update, Delete: func(o T) { f.remove(svc.NameOf(o)) },
		Version: func(text string) {
			if f.version != nil {
				f.version(barrier.Parse(text))
			}
		},
	})
}

// watch keeps the zone in step with the API until ctx ends.
func (s *Server) watch(ctx context.Context) {
	z, c := s.zone, s.options.Client
	z.Hold()
	services := &feed[*corev1.Service]{set: z.SetService, remove: z.DeleteService, have: z.Services, synced: make(chan struct{})}
	slices := &feed[*discoveryv1.EndpointSlice]{
		set: s.setSlice, changed: s.observeDelay, remove: s.deleteSlice, have: z.Slices, synced: make(chan struct{}),
	}
	services.version = func(v uint64) { s.options.Progress.Reached(barrier.DNSServices, v) }
	slices.version = func(v uint64) { s.options.Progress.Reached(barrier.DNSSlices, v) }
	namespaces := &feed[*corev1.Namespace]{
		set:    func(n *corev1.Namespace) { z.SetNamespace(n.Name) },
		remove: func(n svc.Name) { z.DeleteNamespace(n.Name) },
		have: func() (out []svc.Name) {
			for _, n := range z.Namespaces() {
				out = append(out, svc.Name{Name: n})
			}
			return out
		},
		synced: make(chan struct{}),
	}
	everything := metav1.ListOptions{}
	var wg sync.WaitGroup
	wg.Go(func() { services.run(ctx, s, "services", reflector.From(c.CoreV1().Services(""), everything)) })
	wg.Go(func() {
		slices.run(ctx, s, "endpointslices", reflector.From(c.DiscoveryV1().EndpointSlices(""), everything))
	})
	wg.Go(func() { namespaces.run(ctx, s, "namespaces", reflector.From(c.CoreV1().Namespaces(), everything)) })
	waits := []chan struct{}{services.synced, slices.synced, namespaces.synced}
	if s.options.Pods == zone.PodsVerified {
		pods := &feed[*corev1.Pod]{set: z.SetPod, remove: z.DeletePod, have: z.Pods, synced: make(chan struct{})}
		wg.Go(func() { pods.run(ctx, s, "pods", reflector.From(c.CoreV1().Pods(""), everything)) })
		waits = append(waits, pods.synced)
	}
	start := time.Now()
	for _, w := range waits {
		select {
		case <-w:
		case <-ctx.Done():
		}
	}
	if ctx.Err() == nil {
		z.Release()
		s.synced.Store(true)
		s.log.Info("dns is ready", "took", time.Since(start).Round(time.Millisecond), "services", len(z.Services()))
	}
	wg.Wait()
}

// apiState is what the watch of a kind knows of the API server.
type apiState int

const (
	apiUnknown  apiState = iota // nothing has been tried
	apiAnswers                  // it can be read
	apiAway                     // it does not answer
	apiRejected                 // it answers that this server may not read the kind
)

// recordAPI logs, for each kind, when the API server cannot be read, the first time too, and when it can again.
func (s *Server) recordAPI(kind string, err error) {
	if errors.Is(err, context.Canceled) {
		return
	}
	now := apiAnswers
	switch {
	case apierrors.IsUnauthorized(err), apierrors.IsForbidden(err):
		now = apiRejected
	case err != nil:
		now = apiAway
	}
	s.apiMu.Lock()
	before := s.api[kind]
	s.api[kind] = now
	up := true
	for _, state := range s.api {
		up = up && state == apiAnswers
	}
	s.apiUp.Store(up)
	s.apiMu.Unlock()
	switch {
	case now == before:
	case now == apiRejected:
		s.log.Error("the API server does not let this server read what it answers from; the cluster's names are answered from memory, "+
			"or with SERVFAIL; retrying", "kind", kind, "err", err, "remedy", "give the user of --kubeconfig the verbs list and watch")
	case now == apiAway:
		s.log.Warn("cannot reach the API server; answering the cluster's names from memory and retrying", "kind", kind, "err", err)
	case before != apiUnknown:
		s.log.Info("API server reachable", "kind", kind)
	}
}

func (s *Server) setSlice(e *discoveryv1.EndpointSlice) {
	s.zone.SetSlice(e)
	s.members.Set(e)
}

// observeDelay measures the time from a change of endpoints, as their controller
// recorded it, to here: the "DNS programming latency" of Kubernetes.
func (s *Server) observeDelay(e *discoveryv1.EndpointSlice) {
	text, ok := e.Annotations[corev1.EndpointsLastChangeTriggerTime]
	if !ok {
		return
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return // not written by our controller
	}
	kind := "cluster_ip"
	if _, ok := e.Labels[corev1.IsHeadlessService]; ok {
		kind = "headless_with_selector"
	}
	s.programming.WithLabelValues(kind).Observe(time.Since(at).Seconds())
}

func (s *Server) deleteSlice(n svc.Name) {
	s.zone.DeleteSlice(n)
	s.members.Delete(n)
}
