package lb

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// usablePool is an IPAddressPool as it is used.
type usablePool struct {
	object *v1.IPAddressPool
	pool.Pool
	namespaces, services labels.Selector // nil for all
	// wrong is why no address of the pool is given out: a reason and a message.
	wrongReason, wrong string
}

// allows reports whether the pool is for s.
func (p *usablePool) allows(s *corev1.Service, namespace labels.Set, internal bool) bool {
	spec := &p.object.Spec
	if spec.Internal != internal || p.services != nil && !p.services.Matches(labels.Set(s.Labels)) {
		return false
	}
	if len(spec.Namespaces) == 0 && p.namespaces == nil {
		return true
	}
	return slices.Contains(spec.Namespaces, s.Namespace) || p.namespaces != nil && p.namespaces.Matches(namespace)
}

// compile makes the allocator work with the pools that there are. Where pools overlap,
// the older one has the addresses.
func (c *controller) compile() {
	objects := make([]*v1.IPAddressPool, 0, len(c.pools))
	for _, p := range c.pools {
		objects = append(objects, p)
	}
	slices.SortFunc(objects, func(a, b *v1.IPAddressPool) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	c.compiled = nil
	var pools []pool.Pool
	for _, o := range objects {
		p := c.compileOne(o)
		c.compiled = append(c.compiled, p)
		if p.wrong == "" {
			pools = append(pools, p.Pool)
		}
	}
	c.alloc.SetPools(pools)
	slices.SortStableFunc(c.compiled, func(a, b *usablePool) int {
		return cmp.Or(cmp.Compare(b.object.Spec.Priority, a.object.Spec.Priority), strings.Compare(a.Name, b.Name))
	})
}

func (c *controller) compileOne(o *v1.IPAddressPool) *usablePool {
	p := &usablePool{object: o, Pool: pool.Pool{Name: o.Name, AvoidBuggy: o.Spec.AvoidBuggyIPs}}
	for _, text := range o.Spec.Addresses {
		r, err := pool.Parse(text)
		if err != nil {
			p.wrongReason, p.wrong = "InvalidAddresses", err.Error()
			return p
		}
		p.Ranges = append(p.Ranges, r)
	}
	for what, ranges := range map[string]map[string][]pool.Range{"Services": c.cidrs, "Pods": c.nodePods} {
		for _, list := range ranges {
			for _, used := range list {
				if i := slices.IndexFunc(p.Ranges, used.Overlaps); i >= 0 {
					p.wrongReason = "OverlapsClusterRange"
					p.wrong = fmt.Sprintf("%s overlaps the range %s of %s inside of the cluster", o.Spec.Addresses[i], used, what)
					return p
				}
			}
		}
	}
	for _, s := range []struct {
		from *metav1.LabelSelector
		to   *labels.Selector
		name string
	}{{o.Spec.NamespaceSelector, &p.namespaces, "namespaceSelector"}, {o.Spec.ServiceSelector, &p.services, "serviceSelector"}} {
		if s.from == nil {
			continue
		}
		selector, err := metav1.LabelSelectorAsSelector(s.from)
		if err != nil {
			p.wrongReason, p.wrong = "InvalidSelector", s.name+": "+err.Error()
			return p
		}
		*s.to = selector
	}
	return p
}

// request returns what a Service wants, and why that cannot be understood. Then it may
// keep what it has.
func (c *controller) request(s *corev1.Service) (*pool.Request, *pool.Problem) {
	asked, err := dialect.ParseLoadBalancer(s.Annotations, s.Spec.LoadBalancerIP)
	r := &pool.Request{
		Holder: holder(s, asked.SharingKey), Families: familiesOf(s), Asked: asked.Addresses, Named: asked.Pool != "",
		Both: s.Spec.IPFamilyPolicy != nil && *s.Spec.IPFamilyPolicy == corev1.IPFamilyPolicyRequireDualStack,
	}
	for _, ing := range s.Status.LoadBalancer.Ingress {
		if a, ok := ingressAddr(&ing); ok {
			r.Prefer = append(r.Prefer, a)
		}
	}
	if err != nil {
		r.Asked = nil
		return r, &pool.Problem{Kind: invalidRequest, Message: err.Error()}
	}
	for _, a := range r.Asked {
		if !slices.Contains(r.Families, svc.FamilyOf(a)) {
			r.Asked = nil
			return r, &pool.Problem{Kind: invalidRequest,
				Message: fmt.Sprintf("the Service asks for %s, but has no %s among its spec.ipFamilies", a, svc.FamilyOf(a))}
		}
	}
	for _, p := range c.compiled {
		if p.wrong != "" || asked.Pool != "" && p.Name != asked.Pool {
			continue
		}
		switch allowed := p.allows(s, c.namespaces[s.Namespace], asked.Internal); {
		case allowed && (asked.Pool != "" || p.object.Spec.IsAutoAssign()):
			r.Pools = append(r.Pools, p.Name)
		case allowed:
			r.AskedOnly = append(r.AskedOnly, p.Name)
		}
	}
	if asked.Pool != "" && len(r.Pools) == 0 {
		why := "there is no such pool"
		if i := slices.IndexFunc(c.compiled, func(p *usablePool) bool { return p.Name == asked.Pool }); i >= 0 {
			why = "it is not for this Service"
			if w := c.compiled[i].wrong; w != "" {
				why = "it cannot be used: " + w
			}
		}
		r.Asked = nil
		return r, &pool.Problem{Kind: pool.NotAllowed, Message: fmt.Sprintf("the Service names the pool %.100q: %s", asked.Pool, why)}
	}
	return r, nil
}

// invalidRequest is the reason of the Event about an annotation or field that cannot be
// understood.
const invalidRequest pool.Kind = "InvalidLoadBalancerRequest"

// familiesOf returns the families of a Service's addresses, the first preferred.
func familiesOf(s *corev1.Service) []svc.Family {
	var out []svc.Family
	for _, f := range s.Spec.IPFamilies {
		if f == corev1.IPv6Protocol {
			out = append(out, svc.IPv6)
		} else {
			out = append(out, svc.IPv4)
		}
	}
	if len(out) == 0 {
		out = append(out, svc.IPv4)
	}
	return out
}

// holder returns a Service as others that share its address see it.
func holder(s *corev1.Service, key string) pool.Holder {
	h := pool.Holder{Service: nameOf(s), Key: key}
	if s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		// The address is where both have endpoints only if they have the same ones.
		h.Backend = s.Namespace + " " + labels.FormatLabels(s.Spec.Selector)
	}
	for _, p := range s.Spec.Ports {
		protocol, err := svc.ParseProtocol(string(p.Protocol))
		if err == nil {
			h.Ports = append(h.Ports, pool.Port{Protocol: protocol, Number: uint16(p.Port)})
		}
	}
	return h
}

// holderOf returns a Service by its name; one that is not known shares with no other.
func (c *controller) holderOf(name svc.Name) pool.Holder {
	s := c.services[name]
	if s == nil {
		return pool.Holder{Service: name}
	}
	asked, _ := dialect.ParseLoadBalancer(s.Annotations, "")
	return holder(s, asked.SharingKey)
}
