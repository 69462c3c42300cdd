// Package kit is what the controllers share: a connection, one set of informers, caches that know this
// process's own writes, and the writes that several of them make. It knows no controller.
package kit

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/tracing"
)

// Task runs until its context ends.
type Task func(ctx context.Context)

// Together returns a Task that runs all tasks side by side and returns when all have returned.
func Together(tasks ...Task) Task {
	return func(ctx context.Context) {
		var wg sync.WaitGroup
		for _, run := range tasks {
			wg.Go(func() { run(ctx) })
		}
		wg.Wait()
	}
}

// Kit is what the controllers of one process share. Controllers register their handlers with it
// while they are built; it does not change once they run.
type Kit struct {
	Log    *slog.Logger
	Client kubernetes.Interface
	// Informers watch all namespaces. Their objects lack what no controller reads.
	Informers informers.SharedInformerFactory
	Events    *events.Recorder
	// Workers is how many objects a controller handles at a time.
	Workers int
	// Traces sends spans; nil for none.
	Traces *tracing.Tracer

	synced []cache.InformerSynced
	narrow map[scope]informers.SharedInformerFactory
}

// scope is what the informers of a factory watch.
type scope struct{ namespace, labelSelector string }

// New returns a Kit without handlers.
func New(log *slog.Logger, client kubernetes.Interface, recorder *events.Recorder, workers int) *Kit {
	return &Kit{
		Log: log, Client: client, Events: recorder, Workers: workers,
		Informers: informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(slim)),
		narrow:    map[scope]informers.SharedInformerFactory{},
	}
}

// Handle registers handlers for one kind. The controllers start when the handlers have
// been called for every object that exists.
func (k *Kit) Handle(informer cache.SharedIndexInformer, h cache.ResourceEventHandler) error {
	r, err := informer.AddEventHandler(h)
	if err != nil {
		return err
	}
	k.Await(r.HasSynced)
	return nil
}

// Await makes the controllers start only once synced returns true.
func (k *Kit) Await(synced cache.InformerSynced) { k.synced = append(k.synced, synced) }

// Narrow returns informers of the objects in one namespace that match a label selector; "" selects all.
func (k *Kit) Narrow(namespace, labelSelector string) informers.SharedInformerFactory {
	s := scope{namespace, labelSelector}
	if f := k.narrow[s]; f != nil {
		return f
	}
	f := informers.NewSharedInformerFactoryWithOptions(k.Client, 0, informers.WithTransform(slim), informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = labelSelector }))
	k.narrow[s] = f
	return f
}

// Start starts the informers and waits until the handlers know every object. It reports whether they do; they do
// not if ctx ends before. stop ends the informers, after ctx has ended.
func (k *Kit) Start(ctx context.Context) (stop func(), synced bool) {
	factories := append(slices.Collect(maps.Values(k.narrow)), k.Informers)
	for _, f := range factories {
		f.StartWithContext(ctx)
	}
	stop = func() {
		for _, f := range factories {
			f.Shutdown()
		}
	}
	return stop, cache.WaitForCacheSync(ctx.Done(), k.synced...)
}
