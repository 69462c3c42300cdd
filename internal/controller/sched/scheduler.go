// Package sched binds Pods to Nodes.
package sched

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/placement"
	"github.com/fairlead/fairlead/internal/svc"
)

// scheduler binds each Pod to the Node that suits it best, as package placement decides.
type scheduler struct {
	*kit.Kit
	loop *loop.Loop[svc.Name]

	mu      sync.Mutex
	cluster *placement.Cluster // with bindings in flight
	// placed is where each Pod counts. A binding in flight counts from its
	// decision on, so that the next decision sees it.
	placed  map[svc.Name]assignment
	ports   heldPorts
	waiting map[svc.Name]waitingPod // Pods that fit on no Node
	wakes   wakes
}

// waitingPod is a Pod that fits on no Node. others is set if its own rules about other Pods
// may be the reason, so that any Pod that comes or goes may change that.
type waitingPod struct {
	pod    *corev1.Pod
	others bool
}

type assignment struct {
	uid  types.UID
	node string
}

// New returns the scheduler.
func New(k *kit.Kit, name string) (kit.Task, error) {
	c := &scheduler{
		Kit: k, placed: map[svc.Name]assignment{}, ports: heldPorts{}, waiting: map[svc.Name]waitingPod{},
	}
	namespaces := k.Informers.Core().V1().Namespaces()
	c.cluster = placement.NewCluster(func(name string) labels.Set {
		if ns, err := namespaces.Lister().Get(name); err == nil {
			return ns.Labels
		}
		return nil
	})
	k.Await(namespaces.Informer().HasSynced)
	c.loop = loop.New(k.Log, name, k.Workers, c.sync)
	if err := k.Handle(k.Informers.Core().V1().Pods().Informer(), kit.Handlers(c.podChanged, c.podDeleted)); err != nil {
		return nil, err
	}
	return c.loop.Run, k.Handle(k.Informers.Core().V1().Nodes().Informer(), kit.Handlers(c.nodeChanged, c.nodeDeleted))
}

func (c *scheduler) nodeDeleted(node *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cluster.DeleteNode(node.Name)
}

// ours reports whether the Pod waits for this scheduler.
func ours(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && !kit.Finished(pod) && len(pod.Spec.SchedulingGates) == 0 &&
		(pod.Spec.SchedulerName == "" || pod.Spec.SchedulerName == corev1.DefaultSchedulerName)
}

func (c *scheduler) podChanged(pod *corev1.Pod) {
	name := svc.NameOf(pod)
	c.mu.Lock()
	old, ok := c.placed[name]
	switch {
	case pod.Spec.NodeName != "" && !kit.Finished(pod):
		c.place(name, pod, pod.Spec.NodeName)
	case ok && (old.uid != pod.UID || kit.Finished(pod)):
		c.unplace(name)
	}
	if pod.Spec.NodeName != "" {
		delete(c.waiting, name)
	}
	c.mu.Unlock()
	if ours(pod) {
		c.loop.Queue.Add(name)
	}
}

func (c *scheduler) podDeleted(pod *corev1.Pod) {
	name := svc.NameOf(pod)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, name)
	if c.placed[name].uid == pod.UID {
		c.unplace(name)
	}
}

// place and unplace are called with mu held.
func (c *scheduler) place(name svc.Name, pod *corev1.Pod, node string) {
	p := assignment{pod.UID, node}
	same := c.placed[name] == p
	if !same {
		c.unplace(name)
		c.placed[name] = p
		c.ports.take(node, name, hostPorts(pod))
	}
	c.cluster.Put(name.String(), pod, node)
	if !same {
		c.wakeSoon("", false)
	}
}

func (c *scheduler) unplace(name svc.Name) {
	p, ok := c.placed[name]
	if !ok {
		return
	}
	delete(c.placed, name)
	repels := c.cluster.Repels(name.String())
	c.cluster.Remove(name.String())
	c.ports.release(p.node, name)
	c.wakeSoon(p.node, repels)
}

// nodeChanged lets waiting Pods try again if the Node may now take some.
func (c *scheduler) nodeChanged(node *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.cluster.SetNode(node); old == nil || kit.PlacesDiffer(old, node) {
		// Other labels may change what is together with what.
		c.wakeSoon(node.Name, old != nil && !maps.Equal(old.Labels, node.Labels))
	}
}

func (c *scheduler) sync(ctx context.Context, name svc.Name) error {
	pod, err := c.Informers.Core().V1().Pods().Lister().Pods(name.Namespace).Get(name.Name)
	if err != nil || !ours(pod) || c.decided(pod) {
		return nil
	}
	node, why := c.choose(pod)
	if node == "" {
		return c.unschedulable(ctx, pod, why)
	}
	err = c.Client.CoreV1().Pods(pod.Namespace).Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	switch {
	case err == nil:
		c.Events.Event(pod, corev1.EventTypeNormal, "Scheduled", fmt.Sprintf("Successfully assigned %s to %s", name, node))
		return nil
	case apierrors.IsNotFound(err):
		c.release(name, pod.UID, node)
		return nil
	}
	// The answer may have been lost after the Pod was bound.
	now, getErr := c.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if getErr == nil && now.UID == pod.UID && now.Spec.NodeName != "" {
		c.podChanged(now)
		return nil
	}
	c.release(name, pod.UID, node)
	return fmt.Errorf("bind pod %s to node %s: %w", name, node, err)
}

// decided reports whether the Pod has been bound already, which the informer has
// not delivered yet.
func (c *scheduler) decided(pod *corev1.Pod) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p, ok := c.placed[svc.NameOf(pod)]
	return ok && p.uid == pod.UID
}

func (c *scheduler) release(name svc.Name, uid types.UID, node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.placed[name] == (assignment{uid, node}) {
		c.unplace(name)
	}
}

// choose decides on a Node and counts the Pod there, or returns why none fits.
func (c *scheduler) choose(pod *corev1.Pod) (node, why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name, ports := svc.NameOf(pod), hostPorts(pod)
	node, reasons := c.cluster.Choose(pod, func(candidate string) bool { return c.ports.free(candidate, ports) })
	if node == "" {
		c.waiting[name] = waitingPod{pod, concernsOthers(&pod.Spec)}
		var parts []string
		for _, r := range slices.Sorted(maps.Keys(reasons)) {
			parts = append(parts, fmt.Sprintf("%d %s", reasons[r], r))
		}
		if len(parts) == 0 {
			return "", "no nodes available to schedule pods"
		}
		return "", fmt.Sprintf("0/%d nodes are available: %s.", c.cluster.Nodes(), strings.Join(parts, ", "))
	}
	delete(c.waiting, name)
	c.place(name, pod, node)
	return node, ""
}

// unschedulable writes the reasons into the Pod's status and records them as an Event, once for
// the same reasons: the numbers of nodes are from the first time.
func (c *scheduler) unschedulable(ctx context.Context, pod *corev1.Pod, why string) error {
	for i := range pod.Status.Conditions {
		if p := &pod.Status.Conditions[i]; p.Type == corev1.PodScheduled && p.Status == corev1.ConditionFalse &&
			withoutCounts(p.Message) == withoutCounts(why) {
			return nil
		}
	}
	err := c.PatchPodCondition(ctx, pod, corev1.PodCondition{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: why,
	})
	if err != nil {
		return err
	}
	c.Events.Event(pod, corev1.EventTypeWarning, "FailedScheduling", why)
	return nil
}
