package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/pool"
	"github.com/fairlead/fairlead/internal/svc"
)

// Reasons of Events on Services; the first four are the same as of Kubernetes' service
// controller.
const (
	ensuring   = "EnsuringLoadBalancer"
	ensured    = "EnsuredLoadBalancer"
	deleting   = "DeletingLoadBalancer"
	deleted    = "DeletedLoadBalancer"
	syncFailed = "SyncLoadBalancerFailed"
)

// plan is the work left for one Service.
type plan struct {
	name    svc.Name
	service *corev1.Service // nil if it is gone
	// publish are the addresses that it gets, in order, with the names of their pools.
	publish []netip.Addr
	pools   []string
	// surplus are released when they are no longer published.
	surplus []netip.Addr
	// ingress is the desired status.loadBalancer.ingress.
	ingress []corev1.LoadBalancerIngress
	// finalize means that the finalizer must be removed.
	finalize bool
}

// publishes reports whether status.loadBalancer changes.
func (p *plan) publishes() bool {
	s := p.service
	return s != nil && s.Spec.Type == corev1.ServiceTypeLoadBalancer && !sameIngress(s.Status.LoadBalancer.Ingress, p.ingress)
}

// syncer gives addresses to Services.
type syncer struct {
	*state
	write  *writer
	report *reporter
}

// sync does the work left for one Service. The order of writes makes it safe to
// stop at any point: an address is claimed before it is published, and is no longer
// published when its claim goes.
func (c *syncer) sync(ctx context.Context, name svc.Name) error {
	for range maxTries {
		p := c.plan(name)
		again, err := c.carryOut(ctx, p)
		switch {
		case err != nil && p.service != nil && !apierrors.IsConflict(err) && ctx.Err() == nil:
			c.report.events.Event(p.service, corev1.EventTypeWarning, syncFailed, "Error syncing load balancer: "+syncProblem(err))
			return err
		case err != nil || !again:
			return err
		}
	}
	return fmt.Errorf("other controllers claimed the addresses first, %d times in a row", maxTries)
}

// maxSyncProblem bounds the description of a failure in an Event, in bytes.
const maxSyncProblem = 300

// syncProblem describes a failure for readers of a Service's Events. It leaves out the API server's address, the client's
// user and names of other objects, which the log has.
func syncProblem(err error) string {
	var timeout interface{ Timeout() bool }
	reason := apierrors.ReasonForError(err)
	switch {
	case apierrors.IsInvalid(err): // by the Service's own fields
		text := plain(err.Error())
		return strings.ToValidUTF8(text[:min(len(text), maxSyncProblem)], "")
	case reason != metav1.StatusReasonUnknown:
		return "the API server answered " + string(reason)
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "the API server did not answer in time"
	}
	return "the API server cannot be reached; see the controller's log"
}

// maxTries is how many addresses are tried in one go when others claim them first.
const maxTries = 16

// carryOut writes p. again means that another controller was faster, and that another
// plan is needed.
func (c *syncer) carryOut(ctx context.Context, p *plan) (again bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	s := p.service
	change := p.publishes()
	if len(p.publish) > 0 {
		if s, again, err = c.claimAddresses(ctx, p, change); err != nil || again || s == nil {
			return again, err
		}
	}
	gone := p.finalize && s.DeletionTimestamp != nil
	if gone && len(p.surplus) > 0 {
		c.report.events.Event(s, corev1.EventTypeNormal, deleting, "Deleting load balancer")
	}
	if change {
		if s, err = c.write.publish(ctx, s, p.ingress); err != nil || s == nil {
			return false, err
		}
		if len(p.publish) > 0 {
			c.report.events.Event(s, corev1.EventTypeNormal, ensured, "Ensured load balancer: "+p.text())
		}
	}
	// A Service of another type no longer shows whose finalizer it has: its claim does, and
	// is deleted last. A deleted Service stays until its address is released.
	early := p.finalize && s.Spec.Type != corev1.ServiceTypeLoadBalancer
	if early {
		if s, err = c.write.removeFinalizer(ctx, s); err != nil {
			return false, err
		}
	}
	for _, addr := range p.surplus {
		if ok, err := c.write.releaseClaim(ctx, addr, p.name); err != nil || !ok {
			return !ok, err
		}
	}
	if p.finalize && !early {
		if s, err = c.write.removeFinalizer(ctx, s); err != nil {
			return false, err
		}
	}
	if gone && len(p.surplus) > 0 && s != nil {
		c.report.events.Event(s, corev1.EventTypeNormal, deleted, "Deleted load balancer")
	}
	return false, nil
}

// claimAddresses writes the finalizer and the claims of the addresses that p publishes, with an Event if announce. The
// Service is nil if it no longer exists; again is as for carryOut.
func (c *syncer) claimAddresses(ctx context.Context, p *plan, announce bool) (s *corev1.Service, again bool, err error) {
	s = p.service
	if announce {
		c.report.events.Event(s, corev1.EventTypeNormal, ensuring, "Ensuring load balancer")
	}
	if s, err = c.write.ensureFinalizer(ctx, s); err != nil || s == nil {
		return nil, false, err
	}
	for _, addr := range p.publish {
		ok, err := c.write.ensureClaim(ctx, addr, p.name)
		if err != nil || !ok {
			return s, !ok, err
		}
	}
	return s, false, nil
}

func (p *plan) text() string {
	var out []string
	for i, a := range p.publish {
		text := a.String()
		if p.pools[i] != "" {
			text += " of pool " + p.pools[i]
		}
		out = append(out, text)
	}
	return strings.Join(out, ", ")
}

// plan decides, in memory, which work is left for a Service.
func (c *syncer) plan(name svc.Name) *plan {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.object(name)
	p := &plan{name: name, service: s}
	if c.isOurs(s) && s.DeletionTimestamp == nil {
		if c.freed && len(c.alloc.Of(name)) == 0 {
			c.retryWaiting() // Services that wait come first
		}
		c.planAddresses(p)
		return p
	}
	c.waiting.remove(name)
	p.surplus = c.alloc.Of(name)
	if s == nil {
		return p
	}
	record := c.services[name]
	record.problems, record.recorded, record.findings = nil, nil, nil
	p.ingress = slices.DeleteFunc(slices.Clone(s.Status.LoadBalancer.Ingress), func(ing corev1.LoadBalancerIngress) bool {
		a, ok := claim.Ingress(&ing)
		return ok && slices.Contains(p.surplus, a)
	})
	if slices.Contains(s.Finalizers, finalizer) {
		p.finalize = len(p.surplus) > 0 || c.ownsFinalizer(s)
	} else if len(p.surplus) == 0 && s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		delete(c.services, name)
	}
	return p
}

// ownsFinalizer reports whether the finalizer of a Service that has no claim is this
// controller's. A cloud's finalizer has the same name and must stay until the cloud has
// released its resources. The caller holds mu.
func (c *syncer) ownsFinalizer(s *corev1.Service) bool {
	if class := s.Spec.LoadBalancerClass; class != nil {
		return *class == svc.LoadBalancerClass
	}
	if owner := c.services[svc.NameOf(s)].finalizer; owner != unknownOwner {
		return owner == ownFinalizer
	}
	// It may have been added by an earlier process that ended before it wrote the claim. A
	// change of type empties the status and hides what a cloud has published.
	return c.byDefault && s.Spec.Type == corev1.ServiceTypeLoadBalancer && c.othersIngress(s) == ""
}

// planAddresses decides about a Service that gets addresses. The caller holds mu.
func (c *syncer) planAddresses(p *plan) {
	s, record := p.service, c.services[p.name]
	if held := c.alloc.Of(p.name); len(held) == 0 {
		if other := c.othersIngress(s); other != "" {
			c.waiting.remove(p.name)
			record.finalizer = othersFinalizer
			p.ingress = s.Status.LoadBalancer.Ingress
			c.report.problems(record, []*pool.Problem{{Kind: pool.Outside, Message: "status.loadBalancer has " + other +
				", which is in no pool and was not given by this controller; it stays until it is removed"}})
			return
		}
	}
	reading := claim.Read(s)
	c.report.reading(record, reading)
	mode := ipMode(s, reading)
	r, problem := c.request(s)
	result := c.alloc.Assign(r)
	if problem != nil {
		result.Problems = []*pool.Problem{problem}
	}
	p.publish, p.surplus = result.Addrs, result.Surplus
	for _, a := range p.publish {
		p.pools = append(p.pools, c.alloc.PoolOf(a))
		p.ingress = append(p.ingress, corev1.LoadBalancerIngress{IP: a.String(), IPMode: new(mode)})
	}
	waits := slices.ContainsFunc(result.Problems, func(p *pool.Problem) bool { return p.Kind != pool.Outside })
	if len(p.publish) == 0 && waits && !c.waiting.has(p.name) && len(p.surplus) == 0 {
		c.report.events.Event(s, corev1.EventTypeNormal, ensuring, "Ensuring load balancer")
	}
	if waits {
		c.waiting.add(s)
	} else {
		c.waiting.remove(p.name)
	}
	c.report.problems(record, append(result.Problems, c.announceProblems(p.publish)...))
	c.tidy.Set()
}

// ipMode returns how a Service's addresses are published. While an annotation has a wrong value,
// the way stays what it is.
func ipMode(s *corev1.Service, r *dialect.Reading) corev1.LoadBalancerIPMode {
	if in := s.Status.LoadBalancer.Ingress; r.Invalid() && len(in) > 0 && in[0].IPMode != nil {
		return *in[0].IPMode
	}
	if r.Way == dialect.Proxied {
		return corev1.LoadBalancerIPModeProxy
	}
	return corev1.LoadBalancerIPModeVIP
}

// othersIngress returns the addresses in a status if none of them is ours, else "". The caller holds mu.
func (st *state) othersIngress(s *corev1.Service) string {
	var text []string
	for _, ing := range s.Status.LoadBalancer.Ingress {
		a, ok := claim.Ingress(&ing)
		if ok && (st.alloc.PoolOf(a) != "" || len(st.alloc.Holders(a)) > 0) {
			return ""
		}
		text = append(text, ing.IP+ing.Hostname)
	}
	return strings.Join(text, ", ")
}

// sameIngress reports whether two lists have the same addresses in the same way.
func sameIngress(a, b []corev1.LoadBalancerIngress) bool {
	return slices.EqualFunc(a, b, func(x, y corev1.LoadBalancerIngress) bool {
		proxied := func(m *corev1.LoadBalancerIPMode) bool { return m != nil && *m != corev1.LoadBalancerIPModeVIP }
		return x.IP == y.IP && x.Hostname == y.Hostname && proxied(x.IPMode) == proxied(y.IPMode)
	})
}
