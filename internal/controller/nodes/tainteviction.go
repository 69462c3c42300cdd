package nodes

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/selection"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// evictionPause is the time between two looks while too many nodes are unreachable or not Ready.
const evictionPause = 10 * time.Second

// taintEviction deletes Pods whose Node has a taint with the effect NoExecute that they do
// not tolerate, or no longer
// (https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/). A Pod that
// says nothing of unreachable Nodes stays for Options.UnreachableToleration if a controller
// will replace it, and else for good: the processes may still run, and nothing else would
// start them.
type taintEviction struct {
	*kit.Kit
	index       *selection.Index
	unreachable time.Duration
	loop        *loop.Loop[svc.Name]

	mu   sync.Mutex
	seen map[svc.Name]seenTaints
	// evicted are Pods that were deleted, of which the informer does not know that yet.
	evicted map[svc.Name]types.UID
}

// seenTaints is when each taint of a Pod's Node was first seen beside the Pod. The taints are
// without TimeAdded.
type seenTaints struct {
	pod   types.UID
	first map[corev1.Taint]time.Time
}

// EvictionOptions are what NewTaintEviction needs beside a Kit.
type EvictionOptions struct {
	Index *selection.Index
	// UnreachableToleration is how long Pods that a controller replaces stay on an unreachable Node,
	// unless their tolerations say otherwise.
	UnreachableToleration time.Duration
}

// NewTaintEviction returns the controller that deletes Pods which do not tolerate the NoExecute taints of their Node.
func NewTaintEviction(k *kit.Kit, name string, o EvictionOptions) (kit.Task, error) {
	c := &taintEviction{Kit: k, index: o.Index, unreachable: o.UnreachableToleration, seen: map[svc.Name]seenTaints{},
		evicted: map[svc.Name]types.UID{}}
	c.loop = loop.New(k.Log, name, 2, c.sync)
	changed := func(pod *corev1.Pod) {
		if c.taints(pod.Spec.NodeName) != nil {
			c.loop.Queue.Add(svc.NameOf(pod))
		}
	}
	deleted := func(pod *corev1.Pod) { c.loop.Queue.Add(svc.NameOf(pod)) } // its times are to be forgotten
	if err := k.Handle(k.Informers.Core().V1().Pods().Informer(), kit.Handlers(changed, deleted)); err != nil {
		return nil, err
	}
	return c.loop.Run, k.Handle(k.Informers.Core().V1().Nodes().Informer(), cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			if n := o.(*corev1.Node); len(evicting(n)) > 0 {
				c.node(n)
			}
		},
		UpdateFunc: func(before, now any) {
			old, n := before.(*corev1.Node), now.(*corev1.Node)
			if len(evicting(old))+len(evicting(n)) > 0 && kit.PlacesDiffer(old, n) {
				c.node(n)
			}
		},
	})
}

// node looks at the Pods of a Node that has taints, or has had some.
func (c *taintEviction) node(node *corev1.Node) {
	for _, pod := range c.index.PodsOn(node.Name) {
		c.loop.Queue.Add(svc.NameOf(pod))
	}
}

// evicting returns the taints of a Node because of which Pods leave it.
func evicting(node *corev1.Node) (out []corev1.Taint) {
	for _, t := range node.Spec.Taints {
		if t.Effect == corev1.TaintEffectNoExecute {
			out = append(out, t)
		}
	}
	return out
}

func (c *taintEviction) taints(node string) []corev1.Taint {
	if node == "" {
		return nil
	}
	n, err := c.Informers.Core().V1().Nodes().Lister().Get(node)
	if err != nil {
		return nil
	}
	return evicting(n)
}

func (c *taintEviction) sync(ctx context.Context, name svc.Name) error {
	pod, err := c.Informers.Core().V1().Pods().Lister().Pods(name.Namespace).Get(name.Name)
	if err != nil || pod.DeletionTimestamp != nil || kit.Finished(pod) {
		c.forget(name)
		return nil
	}
	if c.wasEvicted(pod) {
		return nil
	}
	now := time.Now()
	taints := c.taints(pod.Spec.NodeName)
	since := c.since(pod, taints, now)
	for i, t := range taints {
		left, forever := c.tolerated(pod, t, since[i], now)
		switch {
		case forever:
		case left > 0:
			c.loop.Queue.AddAfter(name, left)
		case isHealthTaint(t) && c.isolated():
			c.loop.Queue.AddAfter(name, evictionPause)
		default:
			return c.evict(ctx, pod, t)
		}
	}
	return nil
}

// since returns from when on the time that a Pod tolerates each taint counts: from when the
// taint was added, or first seen where it has no time, but not from before the Pod was on its
// Node. What it remembers of the Pod's other taints it forgets.
func (c *taintEviction) since(pod *corev1.Pod, taints []corev1.Taint, now time.Time) []time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := svc.NameOf(pod)
	old := c.seen[name]
	first := map[corev1.Taint]time.Time{}
	out := make([]time.Time, len(taints))
	for i, t := range taints {
		if t.TimeAdded != nil {
			out[i] = latest(t.TimeAdded.Time, arrival(pod))
			continue
		}
		at, ok := old.first[t]
		if !ok || old.pod != pod.UID {
			at = now
		}
		first[t] = at
		out[i] = latest(at, arrival(pod))
	}
	if len(first) > 0 {
		c.seen[name] = seenTaints{pod.UID, first}
	} else {
		delete(c.seen, name)
	}
	return out
}

func (c *taintEviction) forget(name svc.Name) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.seen, name)
	delete(c.evicted, name)
}

func (c *taintEviction) wasEvicted(pod *corev1.Pod) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.evicted[svc.NameOf(pod)] == pod.UID
}

// arrival is when a Pod was bound to its Node, or created if its conditions do not have that.
func arrival(pod *corev1.Pod) time.Time {
	for i := range pod.Status.Conditions {
		if s := &pod.Status.Conditions[i]; s.Type == corev1.PodScheduled && s.Status == corev1.ConditionTrue {
			return latest(pod.CreationTimestamp.Time, s.LastTransitionTime.Time)
		}
	}
	return pod.CreationTimestamp.Time
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// tolerated returns for how long a Pod still tolerates a taint; since is as of the function of
// that name.
func (c *taintEviction) tolerated(pod *corev1.Pod, t corev1.Taint, since, now time.Time) (left time.Duration, forever bool) {
	shortest, found := time.Duration(0), false
	for i := range pod.Spec.Tolerations {
		o := &pod.Spec.Tolerations[i]
		if !o.ToleratesTaint(klog.Background(), &t, false) {
			continue
		}
		if o.TolerationSeconds == nil {
			if !found {
				forever = true
			}
			continue
		}
		if d := time.Duration(*o.TolerationSeconds) * time.Second; !found || d < shortest {
			shortest, found = d, true
		}
	}
	switch {
	case found: // the shortest counts
		return since.Add(shortest).Sub(now), false
	case forever:
		return 0, true
	case t.Key != corev1.TaintNodeUnreachable && t.Key != corev1.TaintNodeNotReady:
		return 0, false
	case metav1.GetControllerOfNoCopy(pod) == nil:
		return 0, true
	}
	return since.Add(c.unreachable).Sub(now), false
}

// isolated reports whether so many Nodes are unreachable or not Ready that the fault is rather one that they share, such as
// the way to the API server: all, or more than two and 55%, as for kube-controller-manager.
func (c *taintEviction) isolated() bool {
	nodes, err := c.Informers.Core().V1().Nodes().Lister().List(labels.Everything())
	if err != nil {
		return true
	}
	gone := 0
	for _, n := range nodes {
		if isUnknown(n) || isNotReady(n) {
			gone++
		}
	}
	return gone == len(nodes) || gone > 2 && gone*100 >= 55*len(nodes)
}

func (c *taintEviction) evict(ctx context.Context, pod *corev1.Pod, t corev1.Taint) error {
	err := c.PatchPodCondition(ctx, pod, corev1.PodCondition{
		Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "DeletionByTaintManager",
		Message: "Taint manager: deleting due to NoExecute taint",
	})
	if err != nil {
		return err
	}
	c.Events.Event(pod, corev1.EventTypeNormal, "TaintManagerEviction", "Marking for deletion Pod "+svc.NameOf(pod).String())
	c.Log.Info("evicting a pod from its node", "pod", svc.NameOf(pod), "node", pod.Spec.NodeName, "taint", t.ToString())
	if err := kit.IgnoreReplaced(c.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, kit.OnlyUID(pod.UID))); err != nil {
		return fmt.Errorf("evict pod %s: %w", svc.NameOf(pod), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.evicted[svc.NameOf(pod)] = pod.UID
	return nil
}
