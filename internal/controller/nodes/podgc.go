package nodes

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

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/selection"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// podGC deletes Pods that no agent will remove: Pods of Nodes that no longer
// exist, those deleted before they had a Node, and the oldest finished ones when
// there are too many.
type podGC struct {
	*kit.Kit
	podGCOptions
	loop *loop.Loop[string] // Nodes

	mu       sync.Mutex
	missing  map[string]time.Time // Nodes that do not exist, since when
	finished map[svc.Name]ended
	unbound  *loop.Loop[svc.Name]
	surplus  *loop.Loop[string] // of finished Pods; it has one key
}

// podGCOptions are what newPodGC needs beside a Kit.
type podGCOptions struct {
	Index *selection.Index
	// Delay is how long Pods outlive their Node.
	Delay time.Duration
	// TerminatedPodLimit is how many finished Pods are kept.
	TerminatedPodLimit int
}

type ended struct {
	uid types.UID
	at  time.Time
}

func newPodGC(k *kit.Kit, o podGCOptions) (*podGC, error) {
	c := &podGC{Kit: k, podGCOptions: o, missing: map[string]time.Time{}, finished: map[svc.Name]ended{}}
	c.loop = loop.New(k.Log, "podgc", 2, c.sync)
	c.unbound = loop.New(k.Log, "podgc-unbound", 2, c.syncUnbound)
	c.surplus = loop.New(k.Log, "podgc-finished", 1, func(ctx context.Context, _ string) error { return c.trim(ctx) })
	if err := k.Handle(k.Informers.Core().V1().Pods().Informer(), kit.Handlers(c.podChanged, c.podDeleted)); err != nil {
		return nil, err
	}
	return c, k.Handle(k.Informers.Core().V1().Nodes().Informer(), cache.ResourceEventHandlerFuncs{
		DeleteFunc: func(o any) {
			if node, ok := kit.Final[*corev1.Node](o); ok {
				c.loop.Queue.Add(node.Name)
			}
		},
	})
}

// trimDelay is how long finished Pods beyond the limit are collected before
// they are deleted together.
const trimDelay = time.Second

func (c *podGC) run(ctx context.Context) { kit.Together(c.loop.Run, c.unbound.Run, c.surplus.Run)(ctx) }

func (c *podGC) podDeleted(pod *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.finished, svc.NameOf(pod))
}

func (c *podGC) podChanged(pod *corev1.Pod) {
	name := svc.NameOf(pod)
	c.mu.Lock()
	if kit.Finished(pod) {
		if c.finished[name].uid != pod.UID {
			c.finished[name] = ended{pod.UID, pod.CreationTimestamp.Time}
		}
		if len(c.finished) > c.TerminatedPodLimit {
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
		if _, err := c.Informers.Core().V1().Nodes().Lister().Get(pod.Spec.NodeName); err != nil {
			c.loop.Queue.Add(pod.Spec.NodeName)
		}
	}
}

// sync deletes the Pods of a Node that has been missing for PodGCDelay.
func (c *podGC) sync(ctx context.Context, node string) error {
	pods := c.Index.PodsOn(node)
	_, err := c.Informers.Core().V1().Nodes().Lister().Get(node)
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
	if left := c.Delay - time.Since(since); left > 0 {
		c.loop.Queue.AddAfter(node, left)
		return nil
	}
	if _, err := c.Client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return err
	}
	for _, pod := range pods {
		if err := c.delete(ctx, svc.NameOf(pod), pod.UID); err != nil {
			return err
		}
		c.Log.Info("deleted a pod of a node that does not exist", "pod", svc.NameOf(pod), "node", node)
	}
	// A Node of that name that comes and goes again has the whole delay.
	c.mu.Lock()
	delete(c.missing, node)
	c.mu.Unlock()
	return nil
}

func (c *podGC) syncUnbound(ctx context.Context, name svc.Name) error {
	pod, err := c.Informers.Core().V1().Pods().Lister().Pods(name.Namespace).Get(name.Name)
	if err != nil || pod.Spec.NodeName != "" || pod.DeletionTimestamp == nil {
		return nil
	}
	return c.delete(ctx, name, pod.UID)
}

// trim deletes the oldest finished Pods beyond the limit.
func (c *podGC) trim(ctx context.Context) error {
	c.mu.Lock()
	surplus := len(c.finished) - c.TerminatedPodLimit
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
		c.Log.Info("deleted a finished pod: there are more than the limit", "pod", name, "limit", c.TerminatedPodLimit)
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
	options := kit.OnlyUID(uid)
	options.GracePeriodSeconds = new(int64(0))
	if err := kit.IgnoreReplaced(c.Client.CoreV1().Pods(name.Namespace).Delete(ctx, name.Name, options)); err != nil {
		return fmt.Errorf("delete pod %s: %w", name, err)
	}
	return nil
}
