package lb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Reasons of Events on Services; the first four are those of Kubernetes' service
// controller.
const (
	ensuring   = "EnsuringLoadBalancer"
	ensured    = "EnsuredLoadBalancer"
	deleting   = "DeletingLoadBalancer"
	deleted    = "DeletedLoadBalancer"
	syncFailed = "SyncLoadBalancerFailed"
)

// plan is what is to be done about one Service.
type plan struct {
	name    svc.Name
	service *corev1.Service // nil if it is gone
	// publish are the addresses that it is to have, in order, with the names of their pools.
	publish []netip.Addr
	pools   []string
	// surplus are to be released when they are no longer published.
	surplus []netip.Addr
	// ingress is what status.loadBalancer is to be.
	ingress []corev1.LoadBalancerIngress
	// finalize means that the finalizer has to go.
	finalize bool
}

// publishes reports whether status.loadBalancer is to change.
func (p *plan) publishes() bool {
	s := p.service
	return s != nil && s.Spec.Type == corev1.ServiceTypeLoadBalancer && !sameIngress(s.Status.LoadBalancer.Ingress, p.ingress)
}

// sync does what is left to do about one Service. The order of writes makes it safe to
// stop at any point: an address is claimed before it is published, and is no longer
// published when its claim goes.
func (c *controller) sync(ctx context.Context, name svc.Name) error {
	for range maxTries {
		p := c.plan(name)
		again, err := c.carryOut(ctx, p)
		switch {
		case err != nil && p.service != nil && !apierrors.IsConflict(err) && ctx.Err() == nil:
			c.events.Event(p.service, corev1.EventTypeWarning, syncFailed, "Error syncing load balancer: "+syncProblem(err))
			return err
		case err != nil || !again:
			return err
		}
	}
	return fmt.Errorf("addresses were claimed by others %d times in a row", maxTries)
}

// maxSyncProblem bounds what an Event has of a failure, in bytes.
const maxSyncProblem = 300

// syncProblem returns what those who can read Events of a Service are shown of a failure: not the API server's address,
// the user that asks it or names of other objects, which the log has.
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
	return "the API server cannot be asked, see the controller's log"
}

// maxTries is how many addresses are tried in one go when others claim them first.
const maxTries = 16

// carryOut writes what p says. again means that another controller was faster, and that there
// has to be another plan.
func (c *controller) carryOut(ctx context.Context, p *plan) (again bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	s := p.service
	change := p.publishes()
	if len(p.publish) > 0 {
		if change {
			c.events.Event(s, corev1.EventTypeNormal, ensuring, "Ensuring load balancer")
		}
		if s, err = c.ensureFinalizer(ctx, s); err != nil || s == nil {
			return false, err
		}
		for _, addr := range p.publish {
			ok, err := c.ensureClaim(ctx, addr, p.name)
			if err != nil || !ok {
				return !ok, err
			}
		}
	}
	gone := p.finalize && s.DeletionTimestamp != nil
	if gone && len(p.surplus) > 0 {
		c.events.Event(s, corev1.EventTypeNormal, deleting, "Deleting load balancer")
	}
	if change {
		if s, err = c.publish(ctx, s, p.ingress); err != nil || s == nil {
			return false, err
		}
		if len(p.publish) > 0 {
			c.events.Event(s, corev1.EventTypeNormal, ensured, "Ensured load balancer: "+p.text())
		}
	}
	// A Service of another type does not show any more whose finalizer it has: the claim
	// does, and goes last. One that is deleted stays until its address is released.
	early := p.finalize && s.Spec.Type != corev1.ServiceTypeLoadBalancer
	if early {
		if s, err = c.removeFinalizer(ctx, s); err != nil {
			return false, err
		}
	}
	for _, addr := range p.surplus {
		if ok, err := c.releaseClaim(ctx, addr, p.name); err != nil || !ok {
			return !ok, err
		}
	}
	if p.finalize && !early {
		if s, err = c.removeFinalizer(ctx, s); err != nil {
			return false, err
		}
	}
	if gone && len(p.surplus) > 0 && s != nil {
		c.events.Event(s, corev1.EventTypeNormal, deleted, "Deleted load balancer")
	}
	return false, nil
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

// plan decides, in memory, what is to be done about a Service.
func (c *controller) plan(name svc.Name) *plan {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.services[name]
	p := &plan{name: name, service: s}
	if c.isOurs(s) && s.DeletionTimestamp == nil {
		if c.freed && len(c.alloc.Of(name)) == 0 {
			c.retryWaiting() // those that wait come first
		}
		c.planAddresses(p)
		return p
	}
	c.waiting.remove(name)
	delete(c.problems, name)
	delete(c.findings, name)
	p.surplus = c.alloc.Of(name)
	if s == nil {
		return p
	}
	p.ingress = slices.DeleteFunc(slices.Clone(s.Status.LoadBalancer.Ingress), func(ing corev1.LoadBalancerIngress) bool {
		a, ok := ingressAddr(&ing)
		return ok && slices.Contains(p.surplus, a)
	})
	if slices.Contains(s.Finalizers, finalizer) {
		p.finalize = len(p.surplus) > 0 || c.ownsFinalizer(s)
	} else if len(p.surplus) == 0 && s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		delete(c.services, name)
		delete(c.finalizers, s.UID)
	}
	return p
}

// ownsFinalizer reports whether the finalizer of a Service that has no claim is this
// controller's. A cloud's has the same name and must stay until the cloud has removed
// what it made.
func (c *controller) ownsFinalizer(s *corev1.Service) bool {
	if class := s.Spec.LoadBalancerClass; class != nil {
		return *class == v1.Class
	}
	if ours, known := c.finalizers[s.UID]; known {
		return ours
	}
	// It may have been added by an earlier process that ended before it wrote the claim. A
	// change of type empties the status and hides what a cloud has published.
	return c.o.Default && s.Spec.Type == corev1.ServiceTypeLoadBalancer && c.othersIngress(s) == ""
}

// planAddresses decides about a Service that is to have addresses.
func (c *controller) planAddresses(p *plan) {
	s := p.service
	if held := c.alloc.Of(p.name); len(held) == 0 {
		if other := c.othersIngress(s); other != "" {
			c.waiting.remove(p.name)
			c.finalizers[s.UID] = false
			p.ingress = s.Status.LoadBalancer.Ingress
			c.recordProblems(s, []*pool.Problem{{Kind: pool.Outside, Message: "status.loadBalancer has " + other +
				", which is of no pool and was not given by this controller; it is left alone until it is removed"}}, false)
			return
		}
	}
	reading := Read(s)
	_, known := c.findings[p.name]
	c.recordReading(s, reading)
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
	if len(p.publish) == 0 && waits && c.waiting.in[p.name].name != p.name && len(p.surplus) == 0 {
		c.events.Event(s, corev1.EventTypeNormal, ensuring, "Ensuring load balancer")
	}
	if waits {
		c.waiting.add(s)
	} else {
		c.waiting.remove(p.name)
	}
	c.recordProblems(s, append(result.Problems, c.announceProblems(p.publish)...), known)
	signal(c.tidy)
}

// ipMode returns how a Service's addresses are to be published. While an annotation has a wrong value,
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

// othersIngress returns what a status shows that is not of ours, if that is all it shows.
func (c *controller) othersIngress(s *corev1.Service) string {
	var text []string
	for _, ing := range s.Status.LoadBalancer.Ingress {
		a, ok := ingressAddr(&ing)
		if ok && (c.alloc.PoolOf(a) != "" || len(c.alloc.Holders(a)) > 0) {
			return ""
		}
		text = append(text, ing.IP+ing.Hostname)
	}
	return strings.Join(text, ", ")
}

// recordProblems records what is wrong, when it has become so. known is false if this leader has not looked at the
// Service before: then the one before it may have recorded that.
func (c *controller) recordProblems(s *corev1.Service, problems []*pool.Problem, known bool) {
	record := c.events.Event
	if !known {
		record = c.events.Once
	}
	name := nameOf(s)
	before := c.problems[name]
	delete(c.problems, name)
	for _, p := range problems {
		text := string(p.Kind) + ": " + p.Message
		if p.Kind == notAnnounceable {
			text, _, _ = strings.Cut(p.Message, ": ") // the reason may change often
		}
		c.problems[name] = append(c.problems[name], text)
		if !slices.Contains(before, text) && (p.Kind != notAnnounceable || c.recorded.take(time.Now())) {
			record(s, corev1.EventTypeWarning, string(p.Kind), p.Message)
		}
	}
}

// retryWaiting gives addresses to the Services that wait, the oldest first. Those that
// get one are written by the workers.
func (c *controller) retryWaiting() {
	c.freed = false
	inVain := map[string]bool{} // what others before have not got, as a key
	for _, w := range slices.Clone(c.waiting.list) {
		s := c.services[w.name]
		if !c.isOurs(s) || s.DeletionTimestamp != nil || len(c.alloc.Of(w.name)) == 0 && c.othersIngress(s) != "" {
			continue
		}
		r, problem := c.request(s)
		key := fmt.Sprint(r.Pools, r.Families, r.Both)
		alike := len(r.Asked) == 0 && r.Key == "" && len(r.Prefer) == 0
		if problem != nil || alike && inVain[key] {
			continue
		}
		before := c.alloc.Of(w.name)
		if result := c.alloc.Assign(r); alike && len(result.Addrs) == 0 {
			inVain[key] = true
		}
		if !slices.Equal(before, c.alloc.Of(w.name)) {
			c.loop.Queue.Add(w.name)
		}
	}
}

// serveWaiting tries again for those who wait, whenever an address may have become
// free.
func (c *controller) serveWaiting(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		}
		c.mu.Lock()
		if c.freed {
			c.retryWaiting()
		}
		c.mu.Unlock()
	}
}

// ingressAddr returns the address of an item of status.loadBalancer.
func ingressAddr(ing *corev1.LoadBalancerIngress) (netip.Addr, bool) {
	a, err := netip.ParseAddr(ing.IP)
	return a.Unmap(), err == nil
}

// sameIngress reports whether two lists have the same addresses in the same way.
func sameIngress(a, b []corev1.LoadBalancerIngress) bool {
	return slices.EqualFunc(a, b, func(x, y corev1.LoadBalancerIngress) bool {
		proxied := func(m *corev1.LoadBalancerIPMode) bool { return m != nil && *m != corev1.LoadBalancerIPModeVIP }
		return x.IP == y.IP && x.Hostname == y.Hostname && proxied(x.IPMode) == proxied(y.IPMode)
	})
}

// publish writes status.loadBalancer. It fails with a conflict if the Service has changed
// since it was seen: another controller may have given away what is to be published.
func (c *controller) publish(ctx context.Context, s *corev1.Service, ingress []corev1.LoadBalancerIngress) (*corev1.Service, error) {
	body := map[string]any{
		"metadata": map[string]any{"uid": s.UID, "resourceVersion": s.ResourceVersion},
		"status":   map[string]any{"loadBalancer": map[string]any{"ingress": ingress}},
	}
	return c.patch(ctx, s, types.MergePatchType, body, "status")
}

// ensureFinalizer returns the Service with the finalizer, nil if it is gone.
func (c *controller) ensureFinalizer(ctx context.Context, s *corev1.Service) (*corev1.Service, error) {
	if slices.Contains(s.Finalizers, finalizer) {
		return s, nil
	}
	c.mu.Lock()
	c.finalizers[s.UID] = true
	c.mu.Unlock()
	return c.patch(ctx, s, types.StrategicMergePatchType, map[string]any{
		"metadata": map[string]any{"uid": s.UID, "finalizers": []string{finalizer}},
	})
}

// removeFinalizer returns the Service without the finalizer, nil if it is gone.
func (c *controller) removeFinalizer(ctx context.Context, s *corev1.Service) (*corev1.Service, error) {
	if !slices.Contains(s.Finalizers, finalizer) {
		return s, nil
	}
	return c.patch(ctx, s, types.StrategicMergePatchType, map[string]any{
		"metadata": map[string]any{"uid": s.UID, "$deleteFromPrimitiveList/finalizers": []string{finalizer}},
	})
}

// patch changes a Service, and remembers what came out. It returns nil if there is no
// such Service any more.
func (c *controller) patch(
	ctx context.Context, s *corev1.Service, kind types.PatchType, body map[string]any, subresources ...string,
) (*corev1.Service, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	out, err := c.client.CoreV1().Services(s.Namespace).Patch(ctx, s.Name, kind, text, metav1.PatchOptions{}, subresources...)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.services[nameOf(s)]; have != nil && have.UID == out.UID {
		c.keepService(out)
	}
	return out, nil
}
