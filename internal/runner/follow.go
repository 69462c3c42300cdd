package runner

import (
	"context"
	"errors"

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
	if cache.WaitForCacheSync(ctx.Done(), podsHandled.HasSynced) {
		r.dropOrphans(pods.GetStore())
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

// dropOrphans ends the pods of an earlier run whose objects are gone.
func (r *Runner) dropOrphans(store cache.Store) {
	there := map[types.UID]bool{}
	for _, o := range store.List() {
		there[o.(*corev1.Pod).UID] = true
	}
	r.each(func(w *worker) {
		if !there[w.uid] && !w.static {
			w.remove(nil)
		}
	})
}
