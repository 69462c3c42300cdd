package runner

import (
	"context"
	"errors"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/registration"
)

var everything = labels.Everything()

// follow hands the objects of the API to the workers until ctx ends. Workers
// run with workCtx.
func (r *Runner) follow(ctx, workCtx context.Context) {
	bound := informers.NewSharedInformerFactoryWithOptions(r.o.Client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", r.o.NodeName).String()
	}))
	all := informers.NewSharedInformerFactory(r.o.Client, 0)
	pods, nodes, services := bound.Core().V1().Pods().Informer(), all.Core().V1().Nodes().Informer(), all.Core().V1().Services()
	servicesSynced := services.Informer().HasSynced
	r.mu.Lock()
	r.services = services.Lister()
	r.mu.Unlock()
	podsHandled, err1 := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { r.podUpdated(workCtx, o.(*corev1.Pod)) },
		UpdateFunc: func(_, o any) { r.podUpdated(workCtx, o.(*corev1.Pod)) },
		DeleteFunc: func(o any) { r.podDeleted(o) },
	})
	_, err2 := nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { r.setNode(o.(*corev1.Node)) },
		UpdateFunc: func(_, o any) { r.setNode(o.(*corev1.Node)) },
		DeleteFunc: func(o any) {
			if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = d.Obj
			}
			if n, ok := o.(*corev1.Node); ok {
				r.unsetNode(n)
			}
		},
	})
	if err1 != nil || err2 != nil { // only for informers that have ended
		r.o.Log.Error("cannot follow the API", "err", errors.Join(err1, err2))
		return
	}
	bound.Start(ctx.Done())
	all.Start(ctx.Done())
	defer bound.Shutdown()
	defer all.Shutdown()
	if cache.WaitForCacheSync(ctx.Done(), servicesSynced) {
		r.mu.Lock()
		r.synced = true
		r.mu.Unlock()
		r.nudgeAll()
	}
	var orphans sync.WaitGroup
	defer orphans.Wait()
	if cache.WaitForCacheSync(ctx.Done(), podsHandled.HasSynced) {
		orphans.Go(func() { r.dropOrphans(ctx) })
		r.static.mirrorsSynced()
	}
	if cache.WaitForCacheSync(ctx.Done(), nodes.HasSynced) {
		r.network.setSynced()
	}
	<-ctx.Done()
}

func (r *Runner) setNode(n *corev1.Node) {
	r.network.set(n)
	if r.o.NodeSet != nil {
		r.o.NodeSet(n)
	}
}

func (r *Runner) unsetNode(n *corev1.Node) {
	r.network.unset(n)
	if r.o.NodeUnset != nil {
		r.o.NodeUnset(n.Name)
	}
}

// podUpdated hands an object to its worker, which it makes if there is none.
func (r *Runner) podUpdated(ctx context.Context, pod *corev1.Pod) {
	if isMirror(pod) {
		r.static.mirrorSeen(pod)
		return
	}
	if registration.Is(pod) {
		r.register(ctx, pod)
		return
	}
	r.mu.Lock()
	w := r.workers[pod.UID]
	r.mu.Unlock()
	if w == nil {
		w = newWorker(ctx, r, pod.UID, pod.Namespace, pod.Name)
		w.update(pod)
		r.start(w)
		return
	}
	w.update(pod)
}

func (r *Runner) podDeleted(o any) {
	if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = d.Obj
	}
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	r.deregister(pod)
	if isMirror(pod) {
		r.static.mirrorGone(pod)
	}
	r.mu.Lock()
	w := r.workers[pod.UID]
	r.mu.Unlock()
	if w != nil {
		w.remove(pod)
	}
}

// orphanRetry is the time between two tries to find out whether a pod's object is gone.
const orphanRetry = 5 * time.Second

// dropOrphans ends the pods of an earlier run whose objects are gone. What was listed first may
// be the last known state (package offline), so it asks for the latest.
func (r *Runner) dropOrphans(ctx context.Context) {
	var orphans []*worker
	r.each(func(w *worker) {
		if !w.static && w.unseen() {
			orphans = append(orphans, w)
		}
	})
	if len(orphans) == 0 {
		return
	}
	own := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", r.o.NodeName).String()}
	list, err := r.o.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, own)
	for ; err != nil; list, err = r.o.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, own) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(orphanRetry):
		}
	}
	there := map[types.UID]bool{}
	for i := range list.Items {
		there[list.Items[i].UID] = true
	}
	for _, w := range orphans {
		if !there[w.uid] && w.unseen() {
			w.remove(nil)
		}
	}
}
