package service

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/tools/events"

	"github.com/fairlead/fairlead/internal/registry/networking"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// DefaultRepairPeriod is the time between two repairs.
	DefaultRepairPeriod = time.Minute
	// repairTimeout bounds one repair.
	repairTimeout = 5 * time.Minute
)

// Finding is one thing that a repair found wrong (behaviour 163).
type Finding struct {
	// Service is the one it was found on; for a claim without a Service it is
	// the one that the claim names.
	Service svc.Name
	// Reason is the reason of the Event, such as ClusterIPNotAllocated, and
	// ClaimWithoutService where no Service is left for an Event.
	Reason string
	// Claim is the address or port.
	Claim string
	// Message says what was found and what was done.
	Message string
}

// String returns the finding as one line.
func (f Finding) String() string { return f.Service.String() + ": " + f.Reason + ": " + f.Message }

// repairer compares claims with Services.
type repairer struct {
	services *REST
	alloc    *allocators
	period   time.Duration
	grace    time.Duration
	// certain is the time before which no claim can belong to a write that is
	// still on the way; zero if there is none.
	certain time.Time
}

func newRepairer(r *REST, o Options) *repairer {
	out := &repairer{services: r, alloc: r.alloc, period: o.RepairPeriod, grace: o.ClaimGrace}
	if o.Alone {
		// Creation times have whole seconds.
		out.certain = time.Now().Truncate(time.Second)
	}
	if out.period <= 0 {
		out.period = DefaultRepairPeriod
	}
	if out.grace <= 0 {
		out.grace = 3 * r.writeTimeout
	}
	return out
}

// run repairs once now and then in every period, until ctx ends. Servers that
// started together spread out.
func (r *repairer) run(ctx context.Context, recorder events.EventRecorder) {
	for {
		rctx, cancel := context.WithTimeout(ctx, repairTimeout)
		findings, err := r.repair(rctx, recorder)
		cancel()
		for _, f := range findings {
			r.alloc.log.Warn("allocation repaired", "service", f.Service.String(), "reason", f.Reason, "claim", f.Claim, "msg", f.Message)
		}
		if err != nil && ctx.Err() == nil {
			r.alloc.log.Warn("allocation repair incomplete; it is tried again", "err", err)
		}
		timer := time.NewTimer(r.period + rand.N(r.period/10+1))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// Repair compares all claims with all Services once: claims without a Service
// are freed when they are older than the grace, Services without a claim get
// one, and what is used twice is reported on both. It returns what it found,
// also when it returns an error.
func (s Storage) Repair(ctx context.Context) ([]Finding, error) { return s.repair.repair(ctx, nil) }

// pass is one comparison.
type pass struct {
	*repairer
	recorder events.EventRecorder
	findings []Finding
	errs     []error
	services map[svc.Name]*corev1.Service
}

// kindOf is what differs between addresses and ports.
type kindOf struct {
	what, action string
	claims       *claims
	// uses returns the names that a Service uses.
	uses func(*corev1.Service) []string
	// inRange says whether a name can be claimed at all.
	inRange func(name string) bool
	// ours says whether a claim without a Service may be freed.
	ours func(runtime.Object) bool
	// text is the name as messages have it.
	text func(name string) string
}

func (r *repairer) kinds() []kindOf {
	return []kindOf{{
		what: "ClusterIP", action: "ClusterIPAllocation", claims: r.alloc.addrs.claims,
		uses: func(s *corev1.Service) []string {
			var out []string
			for _, ip := range s.Spec.ClusterIPs {
				if a, ok := parseClusterIP(ip); ok && needsClusterIP(s) {
					out = append(out, a.String())
				}
			}
			return out
		},
		inRange: func(name string) bool {
			a, err := netip.ParseAddr(name)
			return err == nil && r.alloc.addrs.contains(a)
		},
		ours: func(obj runtime.Object) bool {
			return obj.(*networkingv1.IPAddress).Labels[networkingv1.LabelManagedBy] == networking.ManagedBy
		},
		text: func(name string) string { return fmt.Sprintf("Cluster IP [%s]: %s", familyOf(name), name) },
	}, {
		what: "Port", action: "PortAllocation", claims: r.alloc.ports.claims,
		uses: func(s *corev1.Service) []string {
			ports := nodePorts(s)
			if s.Spec.HealthCheckNodePort != 0 {
				ports[s.Spec.HealthCheckNodePort] = true
			}
			var out []string
			for n := range ports {
				out = append(out, strconv.Itoa(int(n)))
			}
			slices.Sort(out)
			return out
		},
		inRange: func(name string) bool { return r.alloc.ports.check(name) == nil },
		ours:    func(runtime.Object) bool { return true },
		text:    func(name string) string { return "Port " + name },
	}}
}

func (r *repairer) repair(ctx context.Context, recorder events.EventRecorder) ([]Finding, error) {
	p := &pass{repairer: r, recorder: recorder, services: map[svc.Name]*corev1.Service{}}
	// Claims before Services: whoever made a claim that is listed has also made
	// its Service by the time the Services are listed, or is about to.
	kinds := r.kinds()
	listed := make([]map[string]runtime.Object, len(kinds))
	for i, k := range kinds {
		var err error
		if listed[i], err = k.claims.list(ctx); err != nil {
			return nil, fmt.Errorf("cannot list claims: %w", err)
		}
	}
	all := genericrequest.WithNamespace(ctx, metav1.NamespaceAll)
	obj, err := r.services.List(all, &metainternal.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, fmt.Errorf("cannot list Services: %w", err)
	}
	list := obj.(*corev1.ServiceList)
	for i := range list.Items {
		p.services[ownerOf(&list.Items[i])] = &list.Items[i]
	}
	for i, k := range kinds {
		p.compare(ctx, k, listed[i])
	}
	return p.findings, errors.Join(p.errs...)
}

// list returns the claims by name, from the watch cache: what a repair does is
// checked against the store before.
func (c *claims) list(ctx context.Context) (map[string]runtime.Object, error) {
	list, err := c.store.List(clusterContext(ctx), &metainternal.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, err
	}
	out := map[string]runtime.Object{}
	return out, meta.EachListItem(list, func(obj runtime.Object) error {
		out[nameOf(obj)] = obj
		return nil
	})
}

// compare repairs one kind of claims.
func (p *pass) compare(ctx context.Context, k kindOf, listed map[string]runtime.Object) {
	users := map[string][]*corev1.Service{}
	for _, s := range p.services {
		for _, name := range k.uses(s) {
			users[name] = append(users[name], s)
		}
	}
	for _, name := range sortedKeys(users) {
		using := users[name]
		slices.SortFunc(using, func(a, b *corev1.Service) int { return ownerOf(a).Compare(ownerOf(b)) })
		switch {
		case !k.inRange(name):
			for _, s := range using {
				p.report(k, s, "OutOfRange", name, "%s is not within any configured range; please recreate service")
			}
		case len(using) > 1:
			for _, s := range using {
				p.report(k, s, "AlreadyAllocated", name, "%s was assigned to multiple services; please recreate service")
			}
		default:
			claim := listed[name]
			if claim != nil {
				if owner, ok := k.claims.owner(claim); ok && owner == ownerOf(using[0]) {
					continue
				}
			}
			p.claimFor(ctx, k, using[0], name)
		}
	}
	for _, name := range sortedKeys(listed) {
		if len(users[name]) == 0 {
			p.free(ctx, k, name, listed[name])
		}
	}
}

func sortedKeys[V any](m map[string]V) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// claimFor gives a Service the claim that it lacks.
func (p *pass) claimFor(ctx context.Context, k kindOf, s *corev1.Service, name string) {
	if cur, err := p.fresh(ctx, ownerOf(s)); err != nil || cur == nil || !slices.Contains(k.uses(cur), name) {
		p.fail(err)
		return // gone or changed meanwhile
	}
	claim, err := k.claims.get(ctx, name)
	switch {
	case apierrors.IsNotFound(err):
		p.report(k, s, "NotAllocated", name, "%s is not allocated; repairing")
		if err := k.claims.create(ctx, name, ownerOf(s)); err != nil && !errors.Is(err, errClaimed) {
			p.fail(err)
		}
		return
	case err != nil:
		p.fail(err)
		return
	}
	owner, ok := k.claims.owner(claim)
	if ok && owner == ownerOf(s) {
		return // made meanwhile
	}
	if ok {
		other, err := p.fresh(ctx, owner)
		if err != nil {
			p.fail(err)
			return
		}
		if other != nil && slices.Contains(k.uses(other), name) {
			p.report(k, s, "AlreadyAllocated", name, "%s was assigned to multiple services; please recreate service")
			p.report(k, other, "AlreadyAllocated", name, "%s was assigned to multiple services; please recreate service")
			return
		}
		if p.young(claim) {
			return // that Service may be on its way
		}
	}
	p.report(k, s, "WrongReference", name, "%s is claimed for something else that does not use it; repairing")
	if err := k.claims.removeExactly(ctx, claim); err != nil {
		p.fail(err)
		return
	}
	if err := k.claims.create(ctx, name, ownerOf(s)); err != nil && !errors.Is(err, errClaimed) {
		p.fail(err)
	}
}

// free removes a claim that no Service has, if it is old enough that no write
// can still be on the way, and of this system.
func (p *pass) free(ctx context.Context, k kindOf, name string, claim runtime.Object) {
	owner, ok := k.claims.owner(claim)
	if !ok || !k.ours(claim) || p.young(claim) {
		return
	}
	s, err := p.fresh(ctx, owner)
	if err != nil || s != nil && slices.Contains(k.uses(s), name) {
		p.fail(err)
		return
	}
	if err := k.claims.removeExactly(ctx, claim); err != nil {
		p.fail(err)
		return
	}
	p.findings = append(p.findings, Finding{Service: owner, Reason: "ClaimWithoutService", Claim: name,
		Message: k.text(name) + " was claimed and not used by its service; freed"})
}

func (p *pass) young(claim runtime.Object) bool {
	m, err := meta.Accessor(claim)
	if err != nil {
		return true
	}
	made := m.GetCreationTimestamp().Time
	return time.Since(made) < p.grace && !made.Before(p.certain)
}

func (p *pass) fail(err error) {
	if err != nil {
		p.errs = append(p.errs, err)
	}
}

// fresh reads a Service from the store itself; nil means that it is not there.
func (p *pass) fresh(ctx context.Context, n svc.Name) (*corev1.Service, error) {
	obj, err := p.repairer.services.Get(genericrequest.WithNamespace(ctx, n.Namespace), n.Name, &metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return obj.(*corev1.Service), nil
}

// removeExactly deletes the claim if it is still the object that was read.
func (c *claims) removeExactly(ctx context.Context, claim runtime.Object) error {
	m, err := meta.Accessor(claim)
	if err != nil {
		return err
	}
	return c.remove(ctx, m.GetName(), func(obj runtime.Object) error {
		if cur, err := meta.Accessor(obj); err != nil || cur.GetUID() != m.GetUID() {
			return errOwner
		}
		return nil
	})
}

// report records a finding and its Event on the Service.
func (p *pass) report(k kindOf, s *corev1.Service, reason, name, format string) {
	f := Finding{Service: ownerOf(s), Reason: k.what + reason, Claim: name, Message: fmt.Sprintf(format, k.text(name))}
	p.findings = append(p.findings, f)
	if p.recorder != nil {
		p.recorder.Eventf(s, nil, corev1.EventTypeWarning, f.Reason, k.action, "%s", f.Message)
	}
}
