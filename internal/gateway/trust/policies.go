package trust

import (
	"cmp"
	"maps"
	"reflect"
	"slices"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Policies are the BackendTLSPolicies by the Services that they target. A nil pointer has none.
type Policies struct {
	all      map[svc.Name]*gwv1.BackendTLSPolicy
	services map[svc.Name]*Targeting
}

// NewPolicies returns a list without policies.
func NewPolicies() *Policies {
	return &Policies{map[svc.Name]*gwv1.BackendTLSPolicy{}, map[svc.Name]*Targeting{}}
}

// Targeting is the policies of one Service. It does not change: another one takes its place.
type Targeting struct {
	// sections has the policies of a port by its name, and of the whole Service by "", the one that counts first.
	sections map[string][]*gwv1.BackendTLSPolicy
}

// Set takes a policy over, nil if it has gone. It returns the Services that it targets, or has targeted before, unless only its status
// has changed.
func (p *Policies) Set(n svc.Name, policy *gwv1.BackendTLSPolicy) []svc.Name {
	have := p.all[n]
	if have != nil && policy != nil && have.UID == policy.UID && have.Generation == policy.Generation &&
		reflect.DeepEqual(&have.Spec, &policy.Spec) { // of the same generation it has other fields after another definition of its kind
		p.all[n] = policy
		return nil
	}
	concerned := map[svc.Name]bool{}
	for _, o := range []*gwv1.BackendTLSPolicy{have, policy} {
		for service := range targetsOf(o) {
			concerned[service] = true
		}
	}
	if policy == nil {
		delete(p.all, n)
	} else {
		p.all[n] = policy
	}
	for service := range concerned {
		p.retarget(service, n, policy)
	}
	return slices.SortedFunc(maps.Keys(concerned), svc.Name.Compare)
}

// retarget replaces a policy among the ones of a Service.
func (p *Policies) retarget(service, n svc.Name, policy *gwv1.BackendTLSPolicy) {
	next := &Targeting{sections: map[string][]*gwv1.BackendTLSPolicy{}}
	if have := p.services[service]; have != nil {
		for section, list := range have.sections {
			for _, o := range list {
				if svc.NameOf(o) != n {
					next.sections[section] = append(next.sections[section], o)
				}
			}
		}
	}
	for _, section := range targetsOf(policy)[service] {
		next.sections[section] = append(next.sections[section], policy)
	}
	if delete(p.services, service); len(next.sections) == 0 {
		return
	}
	for _, list := range next.sections {
		slices.SortFunc(list, older)
	}
	p.services[service] = next
}

// older orders policies by the precedence of the specification: the older one, then the one whose name comes first.
func older(a, b *gwv1.BackendTLSPolicy) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), svc.NameOf(a).Compare(svc.NameOf(b)))
}

// targetsOf returns the sections of the Services that a policy targets. They are of its namespace.
func targetsOf(policy *gwv1.BackendTLSPolicy) map[svc.Name][]string {
	if policy == nil {
		return nil
	}
	out := map[svc.Name][]string{}
	for _, r := range policy.Spec.TargetRefs {
		if r.Group != "" || r.Kind != "Service" {
			continue
		}
		section := ""
		if r.SectionName != nil {
			section = string(*r.SectionName)
		}
		n := svc.Name{Namespace: policy.Namespace, Name: string(r.Name)}
		if !slices.Contains(out[n], section) {
			out[n] = append(out[n], section)
		}
	}
	return out
}

// All returns the policies. The map is the caller's.
func (p *Policies) All() map[svc.Name]*gwv1.BackendTLSPolicy { return maps.Clone(p.all) }

// At returns the policies of a Service, nil if it has none.
func (p *Policies) At(service svc.Name) *Targeting {
	if p == nil {
		return nil
	}
	return p.services[service]
}

// For returns the policy that counts for a port by its name: one for the port comes before one for the whole Service. It is the
// zero Name if there is none.
func (t *Targeting) For(port string) svc.Name {
	if t == nil {
		return svc.Name{}
	}
	for _, section := range []string{port, ""} {
		if list := t.sections[section]; len(list) > 0 {
			return svc.NameOf(list[0])
		}
	}
	return svc.Name{}
}

// Names returns the policies of the Service, also the ones that do not count, in no order.
func (t *Targeting) Names() (out []svc.Name) {
	if t == nil {
		return nil
	}
	for _, list := range t.sections {
		for _, policy := range list {
			out = append(out, svc.NameOf(policy))
		}
	}
	return out
}
