package controller

import (
	"context"
	"errors"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxAncestors is how many Gateways the status of a policy can have.
const maxAncestors = 16

// policyUse is what the Gateways make of a BackendTLSPolicy.
type policyUse struct {
	gateways []svc.Name // with a route to what it targets, by name
	// opened are the objects that nodes may read by the Service of the policy.
	opened []trust.Ref
}

// usesOf returns what the Gateways make of the policies.
func usesOf(s *watch.State) map[svc.Name]*policyUse {
	out := map[svc.Name]*policyUse{}
	for _, g := range slices.SortedFunc(maps.Keys(s.Fronts), svc.Name.Compare) {
		for n := range s.Fronts[g].PolicyStatuses() {
			if out[n] == nil {
				out[n] = &policyUse{}
			}
			out[n].gateways = append(out[n].gateways, g)
		}
		for n, refs := range s.Fronts[g].OpenedByPolicies() {
			out[n].opened = refs
		}
	}
	return out
}

// syncPolicies keeps the Services of BackendTLSPolicies that nodes need, and writes the statuses.
func (c *controller) syncPolicies(s *watch.State, services holders, step func(func(context.Context) error)) {
	uses := usesOf(s)
	for n, policy := range s.Policies {
		use := uses[n]
		if use == nil {
			use = &policyUse{}
		}
		if len(use.opened) > 0 {
			services.claim(names.ServiceOfPolicy(n), kindPolicy, policy)
		}
		step(func(ctx context.Context) (err error) {
			problem := ""
			if len(use.opened) > 0 {
				problem, err = c.keepService(ctx, serviceOfPolicy(policy, use.opened), services.have[names.ServiceOfPolicy(n)])
			}
			return errors.Join(ignoreRaces(err), c.writePolicy(ctx, policy, ancestorsOf(policy, use.gateways, s, problem)))
		})
	}
}

// ancestorsOf returns the statuses of a policy for Gateways. The ones of other controllers stay. problem is why nodes cannot read its
// authorities, "" if they can.
func ancestorsOf(policy *gwv1.BackendTLSPolicy, gateways []svc.Name, s *watch.State, problem string) []gwv1.PolicyAncestorStatus {
	out := []gwv1.PolicyAncestorStatus{}
	for _, a := range policy.Status.Ancestors {
		if a.ControllerName != names.ControllerName {
			out = append(out, a)
		}
	}
	for _, g := range gateways[:min(len(gateways), max(0, maxAncestors-len(out)))] {
		conditions := slices.Clone(s.Fronts[g].PolicyStatuses()[svc.NameOf(policy)]) // the front's do not change
		if problem != "" && g.Namespace != policy.Namespace {
			unread(conditions, problem)
		}
		ref := gwv1.ParentReference{
			Group: new(gwv1.Group(gwv1.GroupName)), Kind: new(gwv1.Kind(kindGateway)), Namespace: new(gwv1.Namespace(g.Namespace)),
			Name: gwv1.ObjectName(g.Name),
		}
		keepTimes(conditions, hadFor(policy, &ref))
		out = append(out, gwv1.PolicyAncestorStatus{AncestorRef: ref, ControllerName: names.ControllerName, Conditions: conditions})
	}
	return out
}

// unread sets ResolvedRefs to False, with the reason that nodes cannot read the authorities.
func unread(conditions []metav1.Condition, problem string) {
	for i := range conditions {
		if conditions[i].Type == string(gwv1.BackendTLSPolicyConditionResolvedRefs) {
			conditions[i].Status, conditions[i].Message = metav1.ConditionFalse, problem
			conditions[i].Reason = string(gwv1.BackendTLSPolicyReasonInvalidCACertificateRef)
		}
	}
}

// hadFor returns the conditions that a policy has for a Gateway.
func hadFor(policy *gwv1.BackendTLSPolicy, ref *gwv1.ParentReference) []metav1.Condition {
	for i := range policy.Status.Ancestors {
		if a := &policy.Status.Ancestors[i]; a.ControllerName == names.ControllerName && equality.Semantic.DeepEqual(&a.AncestorRef, ref) {
			return a.Conditions
		}
	}
	return nil
}

// writePolicy writes the status of a policy if it differs.
func (c *controller) writePolicy(ctx context.Context, policy *gwv1.BackendTLSPolicy, want []gwv1.PolicyAncestorStatus) error {
	if len(want)+len(policy.Status.Ancestors) == 0 || equality.Semantic.DeepEqual(want, policy.Status.Ancestors) {
		return nil
	}
	next := policy.DeepCopy()
	next.Status.Ancestors = want
	_, err := c.api.Policies(policy.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	return err
}
