package runner

import (
	"context"
	"errors"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/runner/static"
)

// follow hands the objects of the API to the workers until ctx ends. Workers
// run with workCtx.
func (r *Runner) follow(ctx, workCtx context.Context) {
	core := r.o.Client.CoreV1()
	pods := reflector.Informer(reflector.From(core.Pods(metav1.NamespaceAll), r.ownPods()), &corev1.Pod{})
	nodes := reflector.Informer(reflector.From(core.Nodes(), metav1.ListOptions{}), &corev1.Node{})
	services := reflector.Informer(reflector.From(core.Services(metav1.NamespaceAll), metav1.ListOptions{}), &corev1.Service{})
	r.services.follow(corelisters.NewServiceLister(services.GetIndexer()))
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
		r.services.setSynced()
		r.nudgeAll()
	}
	if cache.WaitForCacheSync(ctx.Done(), podsHandled.HasSynced) {
		running.Go(func() { r.pods.DropOrphans(ctx, r.ownPods()) })
		r.static.MirrorsSynced()
	}
	if cache.WaitForCacheSync(ctx.Done(), nodes.HasSynced) {
		r.network.Synced()
	}
	<-ctx.Done()
}

// ownPods selects the pods of this node.
func (r *Runner) ownPods() metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", r.o.NodeName).String()}
}

func (r *Runner) setNode(n *corev1.Node) {
	r.network.Set(n)
	if n.Name == r.o.NodeName && r.schedulable.Swap(!n.Spec.Unschedulable) == n.Spec.Unschedulable {
		r.programs.Nudge()
	}
	if r.o.NodeSet != nil {
		r.o.NodeSet(n)
	}
}

func (r *Runner) unsetNode(n *corev1.Node) {
	r.network.Unset(n.Name)
	if r.o.NodeUnset != nil {
		r.o.NodeUnset(n.Name)
	}
}

// podUpdated hands an object to the part that keeps such Pods.
func (r *Runner) podUpdated(ctx context.Context, pod *corev1.Pod) {
	switch {
	case static.IsMirror(pod):
		r.static.MirrorSeen(pod)
	case registration.Is(pod):
		r.programs.Update(ctx, pod)
	default:
		r.pods.Update(pod)
	}
}

func (r *Runner) podDeleted(o any) {
	if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = d.Obj
	}
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	r.programs.Remove(pod)
	if static.IsMirror(pod) {
		r.static.MirrorGone(pod)
	}
	r.pods.Remove(pod.UID, pod)
}
