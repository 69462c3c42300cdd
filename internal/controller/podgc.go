package controller

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// podGC deletes Pods that no agent will remove: those of Nodes that no longer
// exist, those deleted before they had a Node, and the oldest finished ones when
// there are too many.
type podGC struct {
	*controllerContext
	index *selection
	loop  *loop.Loop[string] // Nodes

	mu       sync.Mutex
	missing  map[string]time.Time // Nodes that do not exist, since when
	finished map[svc.Name]ended
	unbound  *loop.Loop[svc.Name]
	surplus  *loop.Loop[string] // of finished Pods; it has one key
}

type ended struct {
	uid types.UID
	at  time.Time
}

func newPodGC(s *controllerContext, x *selection) (*podGC, error) {
	c := &podGC{controllerContext: s, index: x, missing: map[string]time.Time{}, finished: map[svc.Name]ended{}}
	c.loop = loop.New(s.log, "podgc", 2, c.sync)
	c.unbound = loop.New(s.log, "podgc-unbound", 2, c.syncUnbound)
	c.surplus = loop.New(s.log, "podgc-finished", 1, func(ctx context.Context, _ string) error { return c.trim(ctx) })
	if err := s.handle(s.informers.Core().V1().Pods().Informer(), handlers(c.podChanged, c.podDeleted)); err != nil {
		return nil, err
	}
	return c, s.handle(s.informers.Core().V1().Nodes().Informer(), cache.ResourceEventHandlerFuncs{
		DeleteFunc: func(o any) {
			if node, ok := final[*corev1.Node](o); ok {
				c.loop.Queue.Add(node.Name)
			}
		},
	})
}

// trimDelay is how long finished Pods beyond the limit are collected before
// they are deleted together.
const trimDelay = time.Second

func (c *podGC) run(ctx context.Context) {
	var t tasks
	t.add(c.loop.Run)
	t.add(c.unbound.Run)
	t.add(c.surplus.Run)
	t.run(ctx)
}

func (c *podGC) podDeleted(pod *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.finished, nameOf(pod))
}

func (c *podGC) podChanged(pod *corev1.Pod) {
	name := nameOf(pod)
	c.mu.Lock()
	if finished(pod) {
		if c.finished[name].uid != pod.UID {
			c.finished[name] = ended{pod.UID, pod.CreationTimestamp.Time}
		}
		if len(c.finished) > c.options.TerminatedPodLimit {
			c.surplus.Queue.AddAfter("", trimDelay)
		}
	} else {
		delete(c.finished, name)
	}
	c.mu.Unlock()
	switch {
	case pod.Spec.NodeName == "":
		if pod.DeletionTimestamp != nil {
			c.unbound.Queue.Add(name)
		}
	default:
		if _, err := c.informers.Core().V1().Nodes().Lister().Get(pod.Spec.NodeName); err != nil {
			c.loop.Queue.Add(pod.Spec.NodeName)
		}
	}
}

// sync deletes the Pods of a Node that has been missing for PodGCDelay.
func (c *podGC) sync(ctx context.Context, node string) error {
	pods := c.index.podsOn(node)
	_, err := c.informers.Core().V1().Nodes().Lister().Get(node)
	c.mu.Lock()
	if err == nil || len(pods) == 0 {
		delete(c.missing, node)
		c.mu.Unlock()
		return nil
	}
	since, ok := c.missing[node]
	if !ok {
		since = time.Now()
		c.missing[node] = since
	}
	c.mu.Unlock()
	if left := c.options.PodGCDelay - time.Since(since); left > 0 {
		c.loop.Queue.AddAfter(node, left)
		return nil
	}
	if _, err := c.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return err
	}
	for _, pod := range pods {
		if err := c.delete(ctx, nameOf(pod), pod.UID); err != nil {
			return err
		}
		c.log.Info("deleted a pod of a node that does not exist", "pod", nameOf(pod), "node", node)
	}
	// A Node of that name that comes and goes again has the whole delay.
	c.mu.Lock()
	delete(c.missing, node)
	c.mu.Unlock()
	return nil
}

func (c *podGC) syncUnbound(ctx context.Context, name svc.Name) error {
	pod, err := c.informers.Core().V1().Pods().Lister().Pods(name.Namespace).Get(name.Name)
	if err != nil || pod.Spec.NodeName != "" || pod.DeletionTimestamp == nil {
		return nil
	}
	return c.delete(ctx, name, pod.UID)
}

// trim deletes the oldest finished Pods beyond the limit.
func (c *podGC) trim(ctx context.Context) error {
	c.mu.Lock()
	surplus := len(c.finished) - c.options.TerminatedPodLimit
	all := maps.Clone(c.finished)
	c.mu.Unlock()
	if surplus <= 0 {
		return nil
	}
	oldest := slices.SortedFunc(maps.Keys(all), func(a, b svc.Name) int {
		return cmp.Or(all[a].at.Compare(all[b].at), a.Compare(b))
	})
	for _, name := range oldest[:surplus] {
		if err := c.delete(ctx, name, all[name].uid); err != nil {
			return err
		}
		c.log.Info("deleted a finished pod: there are more than the limit", "pod", name, "limit", c.options.TerminatedPodLimit)
		c.mu.Lock()
		if c.finished[name].uid == all[name].uid {
			delete(c.finished, name)
		}
		c.mu.Unlock()
	}
	return nil
}

// delete removes a Pod at once: there is no agent to stop it gracefully.
func (c *podGC) delete(ctx context.Context, name svc.Name, uid types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, loop.Timeout)
	defer cancel()
	options := onlyUID(uid)
	options.GracePeriodSeconds = new(int64(0))
	if err := ignoreReplaced(c.client.CoreV1().Pods(name.Namespace).Delete(ctx, name.Name, options)); err != nil {
		return fmt.Errorf("delete pod %s: %w", name, err)
	}
	return nil
}
