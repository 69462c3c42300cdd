package networking

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
)

const (
	// DefaultName is the ServiceCIDR that the servers make from their flags.
	DefaultName = "kubernetes"
	// ManagedBy is the value of the label ipaddress.kubernetes.io/managed-by of
	// the IPAddresses that belong to Services.
	ManagedBy = "ipallocator.fairlead.dev"
	// finalizer keeps a ServiceCIDR until no Service has an address of it.
	finalizer = "networking.k8s.io/service-cidr-finalizer"
	// DefaultDrain is the time that a deleted ServiceCIDR stays at least: other
	// servers may not have heard of the deletion yet and take addresses of it.
	DefaultDrain = 10 * time.Second
	// recheck is the time between two looks at what is still waited for.
	recheck = 5 * time.Second
	// makeRetry is the time before the default is tried again.
	makeRetry = 100 * time.Millisecond
	// writeTimeout bounds each write.
	writeTimeout = 10 * time.Second
)

// Controller makes the default ServiceCIDR, gives every ServiceCIDR its
// finalizer and its Ready condition, and lets a deleted one go when no Service
// needs it. Any number of servers may run one: each step is an idempotent write.
type Controller struct {
	storage  Storage
	defaults []netip.Prefix
	drain    time.Duration
	log      *slog.Logger

	mu    sync.Mutex
	known map[string]*networkingv1.ServiceCIDR
	wake  loop.Signal
}

// NewController makes a controller; defaults are the ranges of the ServiceCIDR
// "kubernetes", drain is DefaultDrain if 0.
func NewController(s Storage, defaults []netip.Prefix, drain time.Duration, log *slog.Logger) *Controller {
	return &Controller{storage: s, defaults: defaults, drain: cmp.Or(drain, DefaultDrain), log: log,
		known: map[string]*networkingv1.ServiceCIDR{}, wake: loop.NewSignal()}
}

// Run works until ctx ends. After every change it calls apply with all ranges
// and whether addresses may be taken from them.
func (c *Controller) Run(ctx context.Context, apply func(map[netip.Prefix]bool)) {
	ctx = genericrequest.WithNamespace(ctx, metav1.NamespaceNone)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { Feed(ctx, "servicecidrs", c.storage.ServiceCIDR, c.sink()) })
	timer := time.NewTicker(recheck)
	defer timer.Stop()
	made := false
	for {
		// A server that has just started may not reach its store yet.
		var remake <-chan time.Time
		if !made {
			err := c.ensureDefault(ctx)
			if made = err == nil; !made && ctx.Err() == nil {
				c.log.Warn("cannot create the default ServiceCIDR; retrying", "after", makeRetry, "err", err)
				remake = time.After(makeRetry)
			}
		}
		cidrs := c.list()
		apply(ranges(cidrs))
		for _, s := range cidrs {
			if err := c.sync(ctx, s, cidrs); err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
				c.log.Warn("cannot update a ServiceCIDR; retrying", "after", recheck, "servicecidr", s.Name, "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-remake:
		case <-timer.C:
		}
	}
}

func (c *Controller) sink() reflector.Sink[*networkingv1.ServiceCIDR] {
	change := func(f func()) {
		c.mu.Lock()
		f()
		c.mu.Unlock()
		c.wake.Set()
	}
	put := func(s *networkingv1.ServiceCIDR) { c.known[s.Name] = s }
	return reflector.Sink[*networkingv1.ServiceCIDR]{
		Replace: func(list []*networkingv1.ServiceCIDR) {
			change(func() {
				clear(c.known)
				for _, s := range list {
					put(s)
				}
			})
		},
		Set:    func(s *networkingv1.ServiceCIDR) { change(func() { put(s) }) },
		Delete: func(s *networkingv1.ServiceCIDR) { change(func() { delete(c.known, s.Name) }) },
	}
}

// list returns the known ServiceCIDRs, ordered by name.
func (c *Controller) list() []*networkingv1.ServiceCIDR {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []*networkingv1.ServiceCIDR
	for _, s := range c.known {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b *networkingv1.ServiceCIDR) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return out
}

// prefixes returns the ranges of s; unreadable ones are left out,
// validation has seen to it that there are none.
func prefixes(s *networkingv1.ServiceCIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range s.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// ranges returns the ranges of all objects; one is ready if any object with it is.
func ranges(cidrs []*networkingv1.ServiceCIDR) map[netip.Prefix]bool {
	out := map[netip.Prefix]bool{}
	for _, s := range cidrs {
		ready := s.DeletionTimestamp == nil && meta.IsStatusConditionTrue(s.Status.Conditions, networkingv1.ServiceCIDRConditionReady)
		for _, p := range prefixes(s) {
			out[p] = out[p] || ready
		}
	}
	return out
}

// ensureDefault makes the default ServiceCIDR unless it is there. One with other
// ranges is left as it is: addresses of it are in use.
func (c *Controller) ensureDefault(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	want := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: DefaultName, Finalizers: []string{finalizer}}}
	for _, p := range c.defaults {
		want.Spec.CIDRs = append(want.Spec.CIDRs, p.Masked().String())
	}
	_, err := c.storage.ServiceCIDR.Create(ctx, want, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	obj, err := c.storage.ServiceCIDR.Get(ctx, DefaultName, &metav1.GetOptions{})
	if err != nil {
		return err
	}
	if have := obj.(*networkingv1.ServiceCIDR).Spec.CIDRs; !slices.Equal(have, want.Spec.CIDRs) {
		c.log.Warn("the ServiceCIDR \"kubernetes\" is not the range of --service-cluster-ip-range; the object counts. "+
			"Create another ServiceCIDR to add a range",
			"cidrs", have, "flag", want.Spec.CIDRs)
	}
	return nil
}

// sync brings one ServiceCIDR a step further.
func (c *Controller) sync(ctx context.Context, s *networkingv1.ServiceCIDR, all []*networkingv1.ServiceCIDR) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if s.DeletionTimestamp == nil {
		reason, message := "NetworkReady", "Kubernetes Service CIDR is ready"
		if s.Name == DefaultName {
			reason, message = "", "Kubernetes default Service CIDR is ready"
		}
		return errors.Join(c.setFinalizer(ctx, s, true), c.setReady(ctx, s, metav1.ConditionTrue, reason, message))
	}
	if !slices.Contains(s.Finalizers, finalizer) {
		return nil // another finalizer holds it
	}
	used, err := c.used(ctx, s, all)
	if err != nil {
		return err
	}
	if used {
		return c.setReady(ctx, s, metav1.ConditionFalse, networkingv1.ServiceCIDRReasonTerminating,
			"There are still IPAddresses referencing the ServiceCIDR, please remove them or create a new ServiceCIDR")
	}
	if time.Since(s.DeletionTimestamp.Time) < c.drain {
		return c.setReady(ctx, s, metav1.ConditionFalse, networkingv1.ServiceCIDRReasonTerminating, "The ServiceCIDR is being deleted")
	}
	return c.setFinalizer(ctx, s, false)
}

// used reports whether a Service has an address that lies in s and in no other
// ServiceCIDR that stays.
func (c *Controller) used(ctx context.Context, s *networkingv1.ServiceCIDR, all []*networkingv1.ServiceCIDR) (bool, error) {
	managed := labels.SelectorFromSet(labels.Set{networkingv1.LabelManagedBy: ManagedBy})
	list, err := c.storage.IPAddress.List(ctx, &metainternal.ListOptions{LabelSelector: managed})
	if err != nil {
		return false, fmt.Errorf("cannot list IPAddresses: %w", err)
	}
	var mine, others []netip.Prefix
	for _, o := range all {
		switch {
		case o.Name == s.Name:
			mine = prefixes(s)
		case o.DeletionTimestamp == nil:
			others = append(others, prefixes(o)...)
		}
	}
	for _, a := range list.(*networkingv1.IPAddressList).Items {
		ip, err := netip.ParseAddr(a.Name)
		in := func(p netip.Prefix) bool { return p.Contains(ip) }
		if err == nil && slices.ContainsFunc(mine, in) && !slices.ContainsFunc(others, in) {
			return true, nil
		}
	}
	return false, nil
}

func (c *Controller) setFinalizer(ctx context.Context, s *networkingv1.ServiceCIDR, want bool) error {
	if slices.Contains(s.Finalizers, finalizer) == want {
		return nil
	}
	c2 := s.DeepCopy()
	if want {
		c2.Finalizers = append(c2.Finalizers, finalizer)
	} else {
		c2.Finalizers = slices.DeleteFunc(c2.Finalizers, func(f string) bool { return f == finalizer })
	}
	_, _, err := c.storage.ServiceCIDR.Update(ctx, s.Name, rest.DefaultUpdatedObjectInfo(c2),
		rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	return err
}

func (c *Controller) setReady(ctx context.Context, s *networkingv1.ServiceCIDR, status metav1.ConditionStatus,
	reason, message string) error {
	cond := metav1.Condition{Type: networkingv1.ServiceCIDRConditionReady, Status: status, Reason: reason, Message: message}
	if !meta.SetStatusCondition(&s.DeepCopy().Status.Conditions, cond) {
		return nil
	}
	// The finalizer may just have been written: change the stored object.
	change := func(_ context.Context, _, old runtime.Object) (runtime.Object, error) {
		stored := old.DeepCopyObject().(*networkingv1.ServiceCIDR)
		meta.SetStatusCondition(&stored.Status.Conditions, cond)
		return stored, nil
	}
	_, _, err := c.storage.ServiceCIDRStatus.Update(ctx, s.Name, rest.DefaultUpdatedObjectInfo(nil, change),
		rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	return err
}
