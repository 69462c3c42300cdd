package programmed

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/tracing"
)

// ask is a Service that asks for the condition Programmed.
type ask struct {
	// service is the newest known, of the informer or of an own write.
	service *corev1.Service
	// since is the version of the Service in which its spec was seen first as it is: what
	// comes later may be no more than a new status.
	since uint64
	// begun is when this process saw it first.
	begun time.Time
	// seen is when this process saw since, and told the version of which it has sent a span.
	seen time.Time
	told uint64
	// need is what nodes have to have reached.
	need barrier.Versions
}

// The reasons of the condition Programmed.
const (
	reasonProgrammed = "Programmed"
	reasonPending    = "Pending"
	reasonRejected   = "Rejected"
	reasonNoNodes    = "NoNodes"
	reasonUnknown    = "Unknown"
)

// pendingPeriod is how often the message of a Service that is not programmed is brought up
// to date.
const pendingPeriod = 2 * time.Second

func asks(service *corev1.Service) bool { return service.Annotations[barrier.AskAnnotation] == "true" }

func (c *programmed) serviceChanged(service *corev1.Service) {
	name := svc.NameOf(service)
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.services[name]
	switch {
	case !asks(service):
		delete(c.services, name)
		delete(c.pending, name)
		if condition(service) == nil {
			return
		}
	case a == nil || a.service.UID != service.UID:
		now := time.Now()
		a = &ask{service: service, since: barrier.Of(service), begun: now, seen: now}
		if k := condition(service); k != nil && k.Status == metav1.ConditionTrue && k.ObservedGeneration == service.Generation {
			a.told = a.since // by an earlier leader
		}
		c.services[name] = a
	case !a.learn(service):
		return
	}
	c.asks.Queue.Add(name)
}

// learn takes a newer version of the Service.
func (a *ask) learn(service *corev1.Service) bool {
	if !kit.Newer(service.ResourceVersion, a.service.ResourceVersion) {
		return false
	}
	if barrier.Proxied(a.service.Labels) != barrier.Proxied(service.Labels) || !reflect.DeepEqual(a.service.Spec, service.Spec) {
		a.since, a.begun, a.seen = barrier.Of(service), time.Time{}, time.Now()
	}
	a.service = service
	return true
}

func condition(service *corev1.Service) *metav1.Condition {
	return meta.FindStatusCondition(service.Status.Conditions, barrier.Programmed)
}

func (c *programmed) serviceDeleted(service *corev1.Service) {
	name := svc.NameOf(service)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.services, name)
	delete(c.pending, name)
	if c.byService[name] == nil {
		delete(c.deleted, name)
	}
}

// needs returns what nodes have to have reached for a Service to be programmed.
func (c *programmed) needs(service *corev1.Service, since uint64) barrier.Versions {
	need := c.present(service)
	need[barrier.DNSServices] = since
	if barrier.Proxied(service.Labels) &&
		service.Spec.ClusterIP != corev1.ClusterIPNone && service.Spec.Type != corev1.ServiceTypeExternalName {
		need[barrier.ProxyServices] = since
	}
	return need
}

// syncService brings the condition of a Service up to date.
func (c *programmed) syncService(ctx context.Context, name svc.Name) error {
	c.mu.Lock()
	a := c.services[name]
	if a == nil {
		c.mu.Unlock()
		return c.unask(ctx, name)
	}
	service, since := a.service, a.since
	c.mu.Unlock()
	need := c.needs(service, since)
	c.mu.Lock()
	a.need = need
	now, begun := c.judge(name, need), a.begun
	pending := now.Status != metav1.ConditionTrue
	if !pending && a.since == since {
		c.acknowledged(a)
	}
	all, _, any := c.floors(time.Now())
	waits := any && !all.Covers(need)
	if waits && c.services[name] == a {
		c.pending[name] = a
	} else {
		delete(c.pending, name)
	}
	c.mu.Unlock()
	if waits {
		c.wake.Set() // it may be something new to wait for
	}
	if pending {
		c.asks.Queue.AddAfter(name, pendingPeriod)
	}
	now.ObservedGeneration, now.LastTransitionTime = service.Generation, metav1.Now()
	if had := condition(service); had != nil && had.ObservedGeneration == now.ObservedGeneration && had.Status == now.Status {
		now.LastTransitionTime = had.LastTransitionTime
		if had.Reason == now.Reason && (had.Message == now.Message || time.Since(had.LastTransitionTime.Time) < pendingPeriod) {
			return nil
		}
	} else if had != nil && pending && had.ObservedGeneration == now.ObservedGeneration && time.Since(begun) < pendingPeriod {
		return nil // a new leader does not know yet how far the nodes are
	}
	return c.patchService(ctx, service, now, a)
}

// acknowledged sends the span of a Service that all nodes have programmed, once. It is called with mu held.
func (c *programmed) acknowledged(a *ask) {
	if c.Traces == nil || a.told == a.since {
		return
	}
	a.told = a.since
	change := tracing.ChangeOf(tracing.Service, a.service)
	change.ResourceVersion = strconv.FormatUint(a.since, 10)
	_, nodes := c.lagging(a.need)
	c.Traces.Acknowledged(change, a.seen, time.Now(), nodes)
}

// unask removes the condition of a Service that does not ask for it any more.
func (c *programmed) unask(ctx context.Context, name svc.Name) error {
	// The informer's own store: the index may be a moment behind it.
	service, err := c.Informers.Core().V1().Services().Lister().Services(name.Namespace).Get(name.Name)
	if err != nil || asks(service) || condition(service) == nil {
		return nil
	}
	return c.patchService(ctx, service, map[string]any{"$patch": "delete", "type": barrier.Programmed}, nil)
}

// judge returns the condition of a Service that needs what nodes have to have reached. It
// is called with mu held.
func (c *programmed) judge(name svc.Name, need barrier.Versions) metav1.Condition {
	k := metav1.Condition{Type: barrier.Programmed, Status: metav1.ConditionFalse}
	lagging, of := c.lagging(need)
	var rejecting, unsure []string
	for node, n := range c.nodes {
		switch {
		case !n.counts(time.Now()):
		case slices.Contains(n.rejected, name.String()):
			rejecting = append(rejecting, node)
		case n.more:
			unsure = append(unsure, node)
		}
	}
	slices.Sort(rejecting)
	slices.Sort(unsure)
	switch {
	case of == 0:
		k.Status, k.Reason, k.Message = metav1.ConditionUnknown, reasonNoNodes, "no node reports what it has programmed"
	case len(rejecting) > 0:
		k.Reason, k.Message = reasonRejected, "a port of the Service cannot be programmed on "+listNodes(rejecting)
	case len(lagging) > 0:
		k.Reason = reasonPending
		k.Message = fmt.Sprintf("%d of %d nodes have programmed it; waiting for %s", of-len(lagging), of, listNodes(lagging))
	case len(unsure) > 0:
		k.Status, k.Reason = metav1.ConditionUnknown, reasonUnknown
		k.Message = fmt.Sprintf("ports of more than %d Services cannot be programmed on %s", barrier.MaxRejected, listNodes(unsure))
	default:
		k.Status, k.Reason, k.Message = metav1.ConditionTrue, reasonProgrammed, "all nodes have programmed the Service and its endpoints"
	}
	return k
}

// patchService writes one condition of a Service, which a, if not nil, asks for.
func (c *programmed) patchService(ctx context.Context, service *corev1.Service, condition any, a *ask) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": service.UID},
		"status":   map[string]any{"conditions": []any{condition}},
	})
	if err != nil {
		return err
	}
	wrote, err := c.Client.CoreV1().Services(service.Namespace).Patch(ctx, service.Name, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone, or another one of its name
	}
	if err != nil {
		return fmt.Errorf("status of service %s: %w", svc.NameOf(service), err)
	}
	if a != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		a.learn(wrote)
	}
	return nil
}
