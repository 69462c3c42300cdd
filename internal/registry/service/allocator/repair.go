package allocator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/events"
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
	// Message describes the finding and the repair.
	Message string
}

// String returns the finding on one line.
func (f Finding) String() string { return f.Service.String() + ": " + f.Reason + ": " + f.Message }

// Services reads the Services that the claims are compared with.
type Services interface {
	rest.Getter
	rest.Lister
}

// repairer compares claims with Services.
type repairer struct {
	services Services
	kinds    []kind
	period   time.Duration
	grace    time.Duration
	// start is the start of the only server on its store, else zero:
	// no claim from before it can belong to a write in flight.
	start time.Time
	log   *slog.Logger
}

// run repairs once at once and then in every period, until ctx ends. Servers that
// started together spread out.
func (r *repairer) run(ctx context.Context, recorder *events.Recorder) {
	for {
		rctx, cancel := context.WithTimeout(ctx, repairTimeout)
		findings, err := r.repair(rctx, recorder, r.grace)
		cancel()
		for _, f := range findings {
			r.log.Warn("allocation repaired", "service", f.Service.String(), "reason", f.Reason, "claim", f.Claim, "detail", f.Message)
		}
		if err != nil && ctx.Err() == nil {
			r.log.Warn("cannot repair all allocations; retrying in the next period", "period", r.period, "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(r.period + rand.N(r.period/10+1)):
		}
	}
}

// pass is one comparison.
type pass struct {
	*repairer
	recorder *events.Recorder
	grace    time.Duration
	findings []Finding
	errs     []error
	services map[svc.Name]*corev1.Service
}

// kind is what differs between addresses and ports.
type kind struct {
	what   string
	claims *claims
	// uses returns the names that a Service uses.
	uses func(*corev1.Service) []string
	// inRange reports whether a name can be claimed at all.
	inRange func(name string) bool
	// ours reports whether a claim without a Service may be freed.
	ours func(runtime.Object) bool
	// text is the name as messages have it.
	text func(name string) string
}

func addressKind(c *claims, contains func(netip.Addr) bool) kind {
	return kind{
		what: "ClusterIP", claims: c,
		uses: func(s *corev1.Service) []string {
			return names(s, func(c claim) bool { return c.resource != nodePort })
		},
		inRange: func(name string) bool {
			ip, ok := parseAddr(name)
			return ok && contains(ip)
		},
		ours: func(obj runtime.Object) bool {
			return obj.(*networkingv1.IPAddress).Labels[networkingv1.LabelManagedBy] == networking.ManagedBy
		},
		text: func(name string) string { return fmt.Sprintf("Cluster IP [%s]: %s", familyOf(name), name) },
	}
}

func portKind(ports *keyPool[uint16]) kind {
	return kind{
		what: "Port", claims: ports.claims,
		uses: func(s *corev1.Service) []string {
			return names(s, func(c claim) bool { return c.resource == nodePort })
		},
		inRange: func(name string) bool {
			_, err := ports.check(name)
			return err == nil
		},
		ours: func(runtime.Object) bool { return true },
		text: func(name string) string { return "Port " + name },
	}
}

// names returns those claims of s that of selects, sorted.
func names(s *corev1.Service, of func(claim) bool) []string {
	var out []string
	for _, c := range claimsOf(s) {
		if of(c) {
			out = append(out, c.name)
		}
	}
	slices.Sort(out)
	return out
}

func (r *repairer) repair(ctx context.Context, recorder *events.Recorder, grace time.Duration) ([]Finding, error) {
	p := &pass{repairer: r, recorder: recorder, grace: grace, services: map[svc.Name]*corev1.Service{}}
	// Claims before Services: the Service of a claim that is listed exists by the
	// time the Services are listed, or its write is in flight.
	listed := make([]map[string]runtime.Object, len(r.kinds))
	for i, k := range r.kinds {
		var err error
		if listed[i], err = k.claims.list(ctx); err != nil {
			return nil, fmt.Errorf("cannot list claims: %w", err)
		}
	}
	obj, err := listCached(genericrequest.WithNamespace(ctx, metav1.NamespaceAll), r.services)
	if err != nil {
		return nil, fmt.Errorf("cannot list Services: %w", err)
	}
	list := obj.(*corev1.ServiceList)
	for i := range list.Items {
		p.services[ownerOf(&list.Items[i])] = &list.Items[i]
	}
	for i, k := range r.kinds {
		p.compare(ctx, k, listed[i])
	}
	return p.findings, errors.Join(p.errs...)
}

// compare repairs one kind of claims.
func (p *pass) compare(ctx context.Context, k kind, listed map[string]runtime.Object) {
	users := map[string][]*corev1.Service{}
	for _, s := range p.services {
		for _, name := range k.uses(s) {
			users[name] = append(users[name], s)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(users)) {
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
	for _, name := range slices.Sorted(maps.Keys(listed)) {
		if len(users[name]) == 0 {
			p.free(ctx, k, name, listed[name])
		}
	}
}

// claimFor gives a Service the claim that it lacks.
func (p *pass) claimFor(ctx context.Context, k kind, s *corev1.Service, name string) {
	if !p.uses(ctx, k, s, name) {
		return // deleted or changed in between
	}
	claim, err := k.claims.get(ctx, name)
	switch {
	case apierrors.IsNotFound(err):
		// A deleted Service releases its claims after it is gone.
		if !p.uses(ctx, k, s, name) {
			return
		}
		p.report(k, s, "NotAllocated", name, "%s is not allocated; repairing")
		p.create(ctx, k, name, s)
		return
	case err != nil:
		p.fail(err)
		return
	}
	owner, ok := k.claims.owner(claim)
	if ok && owner == ownerOf(s) {
		return // created in between
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
			return // the write of that Service may be in flight
		}
	}
	p.report(k, s, "WrongReference", name, "%s is claimed for something else that does not use it; repairing")
	if _, err := k.claims.removeExactly(ctx, claim); err != nil {
		p.fail(err)
		return
	}
	p.create(ctx, k, name, s)
}

// uses reports whether the store has s, the same object, and it uses name.
func (p *pass) uses(ctx context.Context, k kind, s *corev1.Service, name string) bool {
	cur, err := p.fresh(ctx, ownerOf(s))
	p.fail(err)
	return cur != nil && cur.UID == s.UID && slices.Contains(k.uses(cur), name)
}

// create makes the claim of s unless another server has made one, which the
// next repair finds.
func (p *pass) create(ctx context.Context, k kind, name string, s *corev1.Service) {
	if err := k.claims.create(ctx, name, ownerOf(s)); !errors.Is(err, errClaimed) {
		p.fail(err)
	}
}

// free removes a claim that no Service has, if it is old enough that no write
// can still be in flight, and was made by this system.
func (p *pass) free(ctx context.Context, k kind, name string, claim runtime.Object) {
	owner, ok := k.claims.owner(claim)
	if !ok || !k.ours(claim) || p.young(claim) {
		return
	}
	s, err := p.fresh(ctx, owner)
	if err != nil || s != nil && slices.Contains(k.uses(s), name) {
		p.fail(err)
		return
	}
	// The claim is from a cache; one that its own Service has released is
	// not a finding.
	removed, err := k.claims.removeExactly(ctx, claim)
	if err != nil || !removed {
		p.fail(err)
		return
	}
	p.findings = append(p.findings, Finding{Service: owner, Reason: "ClaimWithoutService", Claim: name,
		Message: k.text(name) + " was claimed and not used by its service; freed"})
}

// young reports whether claim may belong to a write in flight.
func (p *pass) young(claim runtime.Object) bool {
	m, err := meta.Accessor(claim)
	if err != nil {
		return true
	}
	made := m.GetCreationTimestamp().Time
	return time.Since(made) < p.grace && !made.Before(p.start)
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

// report records a finding and its Event on the Service.
func (p *pass) report(k kind, s *corev1.Service, reason, name, format string) {
	f := Finding{Service: ownerOf(s), Reason: k.what + reason, Claim: name, Message: fmt.Sprintf(format, k.text(name))}
	p.findings = append(p.findings, f)
	if p.recorder != nil {
		p.recorder.Event(s, corev1.EventTypeWarning, f.Reason, f.Message)
	}
}
