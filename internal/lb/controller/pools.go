package controller

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/claim"
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

// poolRecord is an IPAddressPool with what was recorded about it.
type poolRecord struct {
	object *v1.IPAddressPool
	// events has the messages of the last Events, by reason: several conditions of a pool may hold at once.
	events map[string]string
}

// compile makes the allocator work with the current pools. Where pools overlap, the older
// one has the addresses. The caller holds mu.
func (st *state) compile() {
	objects := make([]*v1.IPAddressPool, 0, len(st.pools))
	for _, p := range st.pools {
		objects = append(objects, p.object)
	}
	slices.SortFunc(objects, func(a, b *v1.IPAddressPool) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	inUse := st.clusterRanges()
	st.usable = nil
	var pools []pool.Pool
	for _, o := range objects {
		p := compileOne(o, inUse)
		st.usable = append(st.usable, p)
		if p.wrong == "" {
			pools = append(pools, p.Pool)
		}
	}
	st.alloc.SetPools(pools)
	slices.SortStableFunc(st.usable, func(a, b *usablePool) int {
		return cmp.Or(cmp.Compare(b.object.Spec.Priority, a.object.Spec.Priority), strings.Compare(a.Name, b.Name))
	})
}

// usedRange is a range of addresses that the cluster uses for Services or Pods.
type usedRange struct {
	pool.Range
	by string
}

// clusterRanges returns the ranges that no pool may overlap. The caller holds mu.
func (st *state) clusterRanges() (out []usedRange) {
	for _, list := range st.cidrs {
		for _, r := range list {
			out = append(out, usedRange{r, "Services"})
		}
	}
	for _, n := range st.nodes.records {
		for _, r := range n.pods {
			out = append(out, usedRange{r, "Pods"})
		}
	}
	return out
}

// compileOne returns a pool as it is used, given the ranges inside of the cluster.
func compileOne(o *v1.IPAddressPool, inUse []usedRange) *usablePool {
	p := &usablePool{object: o, Pool: pool.Pool{Name: o.Name, AvoidBuggy: o.Spec.AvoidBuggyIPs}}
	for _, text := range o.Spec.Addresses {
		r, err := pool.Parse(text)
		if err != nil {
			p.wrongReason, p.wrong = "InvalidAddresses", err.Error()
			return p
		}
		p.Ranges = append(p.Ranges, r)
	}
	for _, used := range inUse {
		if i := slices.IndexFunc(p.Ranges, used.Overlaps); i >= 0 {
			p.wrongReason = "OverlapsClusterRange"
			p.wrong = fmt.Sprintf("%s overlaps the range %s of %s inside of the cluster", o.Spec.Addresses[i], used.Range, used.by)
			return p
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

// request returns what a Service wants, and why that cannot be understood. In that case the
// Service may keep what it has. The caller holds mu.
func (st *state) request(s *corev1.Service) (*pool.Request, *pool.Problem) {
	asked, err := dialect.ParseLoadBalancer(s.Annotations, s.Spec.LoadBalancerIP)
	r := &pool.Request{
		Holder: holder(s, asked.SharingKey), Families: claim.Families(s), Asked: asked.Addresses, Named: asked.Pool != "",
		Both: s.Spec.IPFamilyPolicy != nil && *s.Spec.IPFamilyPolicy == corev1.IPFamilyPolicyRequireDualStack,
	}
	for _, ing := range s.Status.LoadBalancer.Ingress {
		if a, ok := claim.Ingress(&ing); ok {
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
	for _, p := range st.usable {
		if p.wrong != "" || asked.Pool != "" && p.Name != asked.Pool {
			continue
		}
		switch allowed := p.allows(s, st.namespaces[s.Namespace], asked.Internal); {
		case allowed && (asked.Pool != "" || p.object.Spec.IsAutoAssign()):
			r.Pools = append(r.Pools, p.Name)
		case allowed:
			r.AskedOnly = append(r.AskedOnly, p.Name)
		}
	}
	if asked.Pool != "" && len(r.Pools) == 0 {
		why := "there is no such pool"
		if i := slices.IndexFunc(st.usable, func(p *usablePool) bool { return p.Name == asked.Pool }); i >= 0 {
			why = "it is not for this Service"
			if w := st.usable[i].wrong; w != "" {
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

// holder returns a Service as others that share its address see it.
func holder(s *corev1.Service, key string) pool.Holder {
	h := pool.Holder{Service: svc.NameOf(s), Key: key}
	if claim.IsLocal(s) {
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

// holderOf returns a Service by its name. An unknown Service shares its address with no other. The caller holds mu.
func (st *state) holderOf(name svc.Name) pool.Holder {
	s := st.object(name)
	if s == nil {
		return pool.Holder{Service: name}
	}
	asked, _ := dialect.ParseLoadBalancer(s.Annotations, "")
	return holder(s, asked.SharingKey)
}
