// Package feed keeps a zone in step with a Kubernetes API. It keeps no objects:
// the zone holds what it needs of them.
package feed

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/zone"
)

// Options are what a Follower follows. Client, Zone and Log are required.
type Options struct {
	Client kubernetes.Interface
	Zone   *zone.Zone
	Log    *slog.Logger
	// Pods follows Pods as well, for zone.PodsVerified.
	Pods bool
	// Namespaces are the ones whose Services are answered; empty for all.
	Namespaces []string
	// NoEndpoints leaves EndpointSlices out.
	NoEndpoints bool
	// Progress gets which versions of Services and EndpointSlices are answered; nil for none.
	Progress *barrier.Progress
	// Slice and SliceDeleted, if not nil, get each EndpointSlice as well.
	Slice        func(*discoveryv1.EndpointSlice)
	SliceDeleted func(svc.Name)
}

// Follower brings the objects of a cluster into a zone. Make it with New, run it with Run.
type Follower struct {
	o      Options
	synced atomic.Bool // the zone is complete
	up     atomic.Bool // every kind can be read
	// programming is how long changes of endpoints took to be answered.
	programming *prometheus.HistogramVec

	mu  sync.Mutex
	api map[string]apiState // by kind
}

// New returns a Follower. It sends no requests yet.
func New(o Options) *Follower {
	return &Follower{o: o, api: map[string]apiState{}, programming: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "coredns_kubernetes_dns_programming_duration_seconds",
		Help:    "Time from a change of a Pod or Service until its endpoints are answered.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 20),
	}, []string{"service_kind"})}
}

// Synced reports whether the zone is complete. It stays true when the API server cannot be reached.
func (f *Follower) Synced() bool { return f.o.Client == nil || f.synced.Load() }

// Up reports whether every kind can be read.
func (f *Follower) Up() bool { return f.up.Load() }

// Collect gives the metrics of the Follower.
func (f *Follower) Collect(ch chan<- prometheus.Metric) { f.programming.Collect(ch) }

// Describe makes Follower a prometheus.Collector.
func (f *Follower) Describe(ch chan<- *prometheus.Desc) { f.programming.Describe(ch) }

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
func (f *feed[T]) run(ctx context.Context, s *Follower, kind string, from reflector.Source) {
	// RecordAPI logs once what the reflector would log at each retry.
	from = from.Observed(func(err error) { s.RecordAPI(kind, err) })
	reflector.Run(reflector.Silent(ctx), "dns/"+kind, from, reflector.Sink[T]{
		Replace: f.replace, Set: f.update, Delete: func(o T) { f.remove(svc.NameOf(o)) },
		Version: func(text string) {
			if f.version != nil {
				f.version(barrier.Parse(text))
			}
		},
	})
}

// allowed reports whether objects of a namespace are answered.
func (f *Follower) allowed(namespace string) bool {
	return len(f.o.Namespaces) == 0 || slices.Contains(f.o.Namespaces, namespace)
}

// Run keeps the zone in step with the API until ctx ends, and returns when everything it has started has ended.
func (f *Follower) Run(ctx context.Context) {
	z, c := f.o.Zone, f.o.Client
	z.Hold()
	services := &feed[*corev1.Service]{set: f.setService, remove: z.DeleteService, have: z.Services, synced: make(chan struct{})}
	endpoints := &feed[*discoveryv1.EndpointSlice]{
		set: f.setSlice, changed: f.ObserveDelay, remove: f.deleteSlice, have: z.Slices, synced: make(chan struct{}),
	}
	services.version = func(v uint64) { f.o.Progress.Reached(barrier.DNSServices, v) }
	endpoints.version = func(v uint64) { f.o.Progress.Reached(barrier.DNSSlices, v) }
	namespaces := &feed[*corev1.Namespace]{
		set:    f.setNamespace,
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
	wg.Go(func() { services.run(ctx, f, "services", reflector.From(c.CoreV1().Services(""), everything)) })
	wg.Go(func() { namespaces.run(ctx, f, "namespaces", reflector.From(c.CoreV1().Namespaces(), everything)) })
	waits := []chan struct{}{services.synced, namespaces.synced}
	if !f.o.NoEndpoints {
		wg.Go(func() {
			endpoints.run(ctx, f, "endpointslices", reflector.From(c.DiscoveryV1().EndpointSlices(""), everything))
		})
		waits = append(waits, endpoints.synced)
	}
	if f.o.Pods {
		pods := &feed[*corev1.Pod]{set: f.setPod, remove: z.DeletePod, have: z.Pods, synced: make(chan struct{})}
		wg.Go(func() { pods.run(ctx, f, "pods", reflector.From(c.CoreV1().Pods(""), everything)) })
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
		f.synced.Store(true)
		f.o.Log.Info("dns is ready", "took", time.Since(start).Round(time.Millisecond), "services", len(z.Services()))
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

// RecordAPI logs, for each kind, when the API server cannot be read, the first time too, and when it can again.
func (f *Follower) RecordAPI(kind string, err error) {
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
	f.mu.Lock()
	before := f.api[kind]
	f.api[kind] = now
	up := true
	for _, state := range f.api {
		up = up && state == apiAnswers
	}
	f.up.Store(up)
	f.mu.Unlock()
	switch {
	case now == before:
	case now == apiRejected:
		f.o.Log.Error("the API server does not let this server read what it answers from; the cluster's names are answered from memory, "+
			"or with SERVFAIL; retrying", "kind", kind, "err", err, "remedy", "give the user of --kubeconfig the verbs list and watch")
	case now == apiAway:
		f.o.Log.Warn("cannot reach the API server; answering the cluster's names from memory and retrying", "kind", kind, "err", err)
	case before != apiUnknown:
		f.o.Log.Info("API server reachable", "kind", kind)
	}
}

func (f *Follower) setService(s *corev1.Service) {
	if f.allowed(s.Namespace) {
		f.o.Zone.SetService(s)
	}
}

func (f *Follower) setNamespace(n *corev1.Namespace) {
	if f.allowed(n.Name) {
		f.o.Zone.SetNamespace(n.Name)
	}
}

func (f *Follower) setPod(p *corev1.Pod) {
	if f.allowed(p.Namespace) {
		f.o.Zone.SetPod(p)
	}
}

func (f *Follower) setSlice(e *discoveryv1.EndpointSlice) {
	if !f.allowed(e.Namespace) {
		return
	}
	f.o.Zone.SetSlice(e)
	if f.o.Slice != nil {
		f.o.Slice(e)
	}
}

func (f *Follower) deleteSlice(n svc.Name) {
	f.o.Zone.DeleteSlice(n)
	if f.o.SliceDeleted != nil {
		f.o.SliceDeleted(n)
	}
}

// ObserveDelay measures the time from a change of endpoints, as their controller
// recorded it, to here: the "DNS programming latency" of Kubernetes.
func (f *Follower) ObserveDelay(e *discoveryv1.EndpointSlice) {
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
	f.programming.WithLabelValues(kind).Observe(time.Since(at).Seconds())
}
