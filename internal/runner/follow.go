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
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/registration"
)

var everything = labels.Everything()

// follow hands the objects of the API to the workers until ctx ends. Workers
// run with workCtx.
func (r *Runner) follow(ctx, workCtx context.Context) {
	core := r.o.Client.CoreV1()
	pods := reflector.Informer(reflector.From(core.Pods(metav1.NamespaceAll), r.ownPods()), &corev1.Pod{})
	nodes := reflector.Informer(reflector.From(core.Nodes(), metav1.ListOptions{}), &corev1.Node{})
	services := reflector.Informer(reflector.From(core.Services(metav1.NamespaceAll), metav1.ListOptions{}), &corev1.Service{})
	r.mu.Lock()
	r.services = corelisters.NewServiceLister(services.GetIndexer())
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
	var running sync.WaitGroup
	defer running.Wait()
	for _, i := range []cache.SharedIndexInformer{pods, nodes, services} {
		running.Go(func() { i.RunWithContext(ctx) })
	}
	if cache.WaitForCacheSync(ctx.Done(), services.HasSynced) {
		r.mu.Lock()
		r.synced = true
		r.mu.Unlock()
		r.nudgeAll()
	}
	if cache.WaitForCacheSync(ctx.Done(), podsHandled.HasSynced) {
		running.Go(func() { r.dropOrphans(ctx) })
		r.static.mirrorsSynced()
	}
	if cache.WaitForCacheSync(ctx.Done(), nodes.HasSynced) {
		r.network.setSynced()
	}
	<-ctx.Done()
}

// ownPods selects the pods of this node.
func (r *Runner) ownPods() metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", r.o.NodeName).String()}
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
	own := r.ownPods()
	logged := ""
	list, err := r.o.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, own)
	for ; err != nil; list, err = r.o.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, own) {
		if logged != err.Error() {
			logged = err.Error()
			r.o.Log.Warn("cannot list this node's pods; keeping those without an object; retrying in "+orphanRetry.String(), "err", err)
		}
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
