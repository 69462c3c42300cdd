package programmed

import (
	"cmp"
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/svc"
)

// drain is a Pod that waits until no node sends it new connections.
type drain struct {
	pod      *corev1.Pod
	services []svc.Name // that select it
	// out is set when its endpoints are terminating in all slices, or gone from them, or, if its
	// node asks, not ready in any; need is the version of those.
	out  bool
	need barrier.Versions
}

// asked returns what a node wants to know of a Pod that is not being deleted: the message of
// its condition Drained, "" for nothing.
func asked(pod *corev1.Pod) string {
	i := slices.IndexFunc(pod.Status.Conditions, func(k corev1.PodCondition) bool { return k.Type == barrier.Drained })
	if i < 0 || pod.DeletionTimestamp != nil || epslice.Ready(pod) || pod.Status.Conditions[i].Status != corev1.ConditionFalse {
		return ""
	}
	return pod.Status.Conditions[i].Message
}

// podChanged begins to wait for a Pod that is being deleted, or that its node asks about.
func (c *programmed) podChanged(pod *corev1.Pod) {
	name := svc.NameOf(pod)
	if pod.DeletionTimestamp == nil && asked(pod) == "" || pod.Spec.NodeName == "" || kit.Finished(pod) || hasDrained(pod) {
		c.forget(name, "")
		return
	}
	c.mu.Lock()
	d := c.drains[name]
	c.mu.Unlock()
	if d != nil && d.pod.UID == pod.UID && asked(d.pod) == asked(pod) {
		return
	}
	c.forget(name, "")
	d = &drain{pod: pod, services: c.index.Selecting(pod)}
	if len(d.services) == 0 {
		return // its node does not wait
	}
	c.mu.Lock()
	c.drains[name] = d
	for _, s := range d.services {
		if c.byService[s] == nil {
			c.byService[s] = map[svc.Name]bool{}
		}
		c.byService[s][name] = true
	}
	c.mu.Unlock()
	c.locate(d)
}

func (c *programmed) podDeleted(pod *corev1.Pod) { c.forget(svc.NameOf(pod), pod.UID) }

// forget ends the wait of the Pod with a UID, "" for any.
func (c *programmed) forget(name svc.Name, uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := c.drains[name]
	if d == nil || uid != "" && d.pod.UID != uid {
		return
	}
	delete(c.drains, name)
	for _, s := range d.services {
		delete(c.byService[s], name)
		if len(c.byService[s]) > 0 {
			continue
		}
		delete(c.byService, s)
		if c.services[s] == nil {
			delete(c.deleted, s)
		}
	}
}

// locate finds out which versions of slices no longer lead new connections to the Pod.
func (c *programmed) locate(d *drain) {
	c.mu.Lock()
	out := d.out
	c.mu.Unlock()
	if out {
		return // what changes later does not concern it
	}
	var need barrier.Versions
	for _, name := range d.services {
		service := c.index.Service(name)
		if service == nil {
			continue
		}
		if slices.ContainsFunc(c.slicesOf(name), func(s *discoveryv1.EndpointSlice) bool { return leads(s, d.pod) }) {
			return // sliceChanged comes here again
		}
		need = need.Max(c.present(service))
	}
	c.mu.Lock()
	d.out, d.need = true, need
	c.mu.Unlock()
	c.wake.Set()
}

// leads reports whether a slice has an endpoint of the Pod that is not terminating, or not
// unready if the Pod is not being deleted.
func leads(s *discoveryv1.EndpointSlice, pod *corev1.Pod) bool {
	return slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
		switch {
		case e.TargetRef == nil || e.TargetRef.UID != pod.UID:
			return false
		case pod.DeletionTimestamp == nil:
			return e.Conditions.Ready == nil || *e.Conditions.Ready
		}
		return e.Conditions.Terminating == nil || !*e.Conditions.Terminating
	})
}

func hasDrained(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(k corev1.PodCondition) bool {
		return k.Type == barrier.Drained && k.Status == corev1.ConditionTrue
	})
}

// syncPod writes the condition of a Pod that no node sends new connections to.
func (c *programmed) syncPod(ctx context.Context, name svc.Name) error {
	c.mu.Lock()
	d := c.drains[name]
	c.mu.Unlock()
	if d == nil {
		return nil
	}
	err := c.PatchPodCondition(ctx, d.pod, corev1.PodCondition{
		Type: barrier.Drained, Status: corev1.ConditionTrue, Reason: "Programmed",
		Message: cmp.Or(asked(d.pod), "no node sends new connections to this Pod"),
	})
	if err == nil {
		c.forget(name, d.pod.UID)
	}
	return err
}
