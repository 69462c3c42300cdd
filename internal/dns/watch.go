package dns

import (
	"context"
	"errors"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	clientcache "k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/zone"
)

// feed brings the objects of one kind into the zone. It is a store for a
// reflector that keeps nothing itself: the zone has what is needed, in a
// tenth of the space.
type feed[T metav1.Object] struct {
	set    func(T)
	remove func(svc.Name)
	// changed, if there, is told of each change that the watch brings, once set
	// has returned. What is in lists may be old.
	changed func(T)
	// have are the objects the zone has, to find those that went unseen.
	have   func() []svc.Name
	synced chan struct{}
	once   sync.Once
}

var errWrongKind = errors.New("an object of another kind came from the watch")

// Add enters an object.
func (f *feed[T]) Add(obj any) error {
	o, ok := obj.(T)
	if !ok {
		return errWrongKind
	}
	f.set(o)
	if f.changed != nil {
		f.changed(o)
	}
	return nil
}

// Update enters an object.
func (f *feed[T]) Update(obj any) error { return f.Add(obj) }

// Delete takes an object out.
func (f *feed[T]) Delete(obj any) error {
	o, ok := obj.(T)
	if !ok {
		return errWrongKind
	}
	f.remove(nameOf(o))
	return nil
}

// Replace enters all objects and takes out those that are not among them.
// Names that do not change are answered without a gap.
func (f *feed[T]) Replace(objs []any, _ string) error {
	there := make(map[svc.Name]struct{}, len(objs))
	for _, obj := range objs {
		o, ok := obj.(T)
		if !ok {
			return errWrongKind
		}
		there[nameOf(o)] = struct{}{}
		f.set(o)
	}
	for _, n := range f.have() {
		if _, ok := there[n]; !ok {
			f.remove(n)
		}
	}
	f.once.Do(func() { close(f.synced) })
	return nil
}

// Resync does nothing: there is nobody to remind.
func (f *feed[T]) Resync() error { return nil }

func nameOf(o metav1.Object) svc.Name {
	return svc.Name{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// client is the part of a typed client that a feed needs.
type client[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// watch keeps the zone as the API says until ctx ends.
func (s *Server) watch(ctx context.Context) {
	z, c := s.zone, s.options.Client
	z.Hold()
	services := &feed[*corev1.Service]{set: z.SetService, remove: z.DeleteService, have: z.Services, synced: make(chan struct{})}
	slices := &feed[*discoveryv1.EndpointSlice]{set: s.setSlice, changed: s.noteDelay, remove: s.deleteSlice, have: z.Slices, synced: make(chan struct{})}
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
	var wg sync.WaitGroup
	wg.Go(func() {
		reflect(ctx, s, "services", c.CoreV1().Services(metav1.NamespaceAll), &corev1.Service{}, services)
	})
	wg.Go(func() {
		reflect(ctx, s, "endpointslices", c.DiscoveryV1().EndpointSlices(metav1.NamespaceAll), &discoveryv1.EndpointSlice{}, slices)
	})
	wg.Go(func() {
		reflect(ctx, s, "namespaces", c.CoreV1().Namespaces(), &corev1.Namespace{}, namespaces)
	})
	waits := []chan struct{}{services.synced, slices.synced, namespaces.synced}
	if s.options.Pods == zone.PodsVerified {
		pods := &feed[*corev1.Pod]{set: z.SetPod, remove: z.DeletePod, have: z.Pods, synced: make(chan struct{})}
		wg.Go(func() { reflect(ctx, s, "pods", c.CoreV1().Pods(metav1.NamespaceAll), &corev1.Pod{}, pods) })
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

// wholeLists asks for a list in one answer, from the API server's memory, and
// not for a stream of events: those would cost us a fifth more and the API
// server three times as much, and would have to wait until it has heard from
// etcd that nothing is newer. What is newer comes by the watch.
type wholeLists struct{ *clientcache.ListWatch }

// IsWatchListSemanticsUnSupported is for the reflector.
func (wholeLists) IsWatchListSemanticsUnSupported() bool { return true }

// While the API is away it is tried this often, first and later.
const (
	apiRetry    = 250 * time.Millisecond
	apiRetryMax = 5 * time.Second
)

// reflect runs the reflector of one feed and notes whether the API answers.
func reflect[T metav1.Object, L runtime.Object](ctx context.Context, s *Server, what string, c client[L], kind runtime.Object, f *feed[T]) {
	lw := &clientcache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := c.List(ctx, o)
			s.noteAPI(what, err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := c.Watch(ctx, o)
			s.noteAPI(what, err)
			return w, err
		},
	}
	// noteAPI says once what the reflector would say at each try.
	ctx = klog.NewContext(ctx, klog.Logger{})
	r := clientcache.NewReflectorWithOptions(wholeLists{lw}, kind, f,
		clientcache.ReflectorOptions{Name: "dns/" + what, Backoff: &wait.Backoff{
			Duration: apiRetry, Factor: 2, Jitter: 0.5, Steps: 10, Cap: apiRetryMax,
		}})
	r.RunWithContext(ctx)
}

// noteAPI says in the log and the metrics when the API goes and comes.
func (s *Server) noteAPI(what string, err error) {
	if errors.Is(err, context.Canceled) {
		return
	}
	up := err == nil
	if s.apiUp.Swap(up) == up {
		return
	}
	if up {
		s.log.Info("the API answers", "kind", what)
	} else {
		s.log.Warn("the API does not answer; the cluster's names are answered from memory", "kind", what, "err", err)
	}
}

func (s *Server) setSlice(e *discoveryv1.EndpointSlice) {
	s.zone.SetSlice(e)
	s.checkOwn(nameOf(e))
	if isServers(e) {
		s.servers.set(e)
	} else if e.Namespace == ServiceName().Namespace {
		s.servers.remove(e.Name)
	}
}

// noteDelay measures how long the change that a slice tells of took to get
// here: the "DNS programming latency" of Kubernetes.
func (s *Server) noteDelay(e *discoveryv1.EndpointSlice) {
	text, ok := e.Annotations[corev1.EndpointsLastChangeTriggerTime]
	if !ok {
		return
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return // somebody else's annotation
	}
	kind := "cluster_ip"
	if _, ok := e.Labels[corev1.IsHeadlessService]; ok {
		kind = "headless_with_selector"
	}
	s.programming.WithLabelValues(kind).Observe(time.Since(at).Seconds())
}

func (s *Server) deleteSlice(n svc.Name) {
	s.zone.DeleteSlice(n)
	s.checkOwn(n)
	if n.Namespace == ServiceName().Namespace {
		s.servers.remove(n.Name)
	}
}

// checkOwn wakes publish when a slice of this server has changed.
func (s *Server) checkOwn(n svc.Name) {
	p := s.options.Publish
	if p == nil || n.Namespace != ServiceName().Namespace || !p.owns(n.Name) {
		return
	}
	poke(s.reassert)
}
