package controller

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxAncestors is how many Gateways the status of a policy can have.
const maxAncestors = 16

// syncPolicy keeps the Service of a BackendTLSPolicy, if nodes need one, and writes the policy's status. wanted gets the name of
// the Service.
func (c *controller) syncPolicy(ctx context.Context, n svc.Name, policy *gwv1.BackendTLSPolicy, s *watch.State,
	services map[svc.Name]*corev1.Service, wanted map[svc.Name]bool,
) error {
	var opened []trust.Ref
	for _, f := range s.Fronts {
		if refs := f.OpenedByPolicies()[n]; len(refs) > 0 {
			opened = refs
		}
	}
	problem := ""
	if name := gateway.ServiceOfPolicy(n); len(opened) > 0 {
		wanted[name] = true
		var err error
		if problem, err = c.keepService(ctx, serviceOfPolicy(policy, opened), services[name]); err != nil {
			return err
		}
	}
	return c.writePolicy(ctx, policy, ancestorsOf(n, policy, s, problem))
}

// ancestorsOf returns the statuses of a policy for the Gateways whose routes lead to what it targets. The ones of other controllers
// stay. problem is why nodes cannot read its authorities, "" if they can.
func ancestorsOf(n svc.Name, policy *gwv1.BackendTLSPolicy, s *watch.State, problem string) []gwv1.PolicyAncestorStatus {
	out := []gwv1.PolicyAncestorStatus{}
	for _, a := range policy.Status.Ancestors {
		if a.ControllerName != gateway.ControllerName {
			out = append(out, a)
		}
	}
	for _, g := range slices.SortedFunc(maps.Keys(s.Fronts), svc.Name.Compare) {
		conditions := slices.Clone(s.Fronts[g].PolicyStatus(n)) // the front's do not change
		if conditions == nil || len(out) == maxAncestors {
			continue
		}
		if problem != "" && g.Namespace != n.Namespace {
			for i := range conditions {
				if conditions[i].Type == string(gwv1.BackendTLSPolicyConditionResolvedRefs) {
					conditions[i].Status, conditions[i].Message = metav1.ConditionFalse, problem
					conditions[i].Reason = string(gwv1.BackendTLSPolicyReasonInvalidCACertificateRef)
				}
			}
		}
		ref := gwv1.ParentReference{
			Group: new(gwv1.Group(gwv1.GroupName)), Kind: new(gwv1.Kind("Gateway")), Namespace: new(gwv1.Namespace(g.Namespace)),
			Name: gwv1.ObjectName(g.Name),
		}
		var had []metav1.Condition
		for i := range policy.Status.Ancestors {
			if a := &policy.Status.Ancestors[i]; a.ControllerName == gateway.ControllerName && equality.Semantic.DeepEqual(a.AncestorRef, ref) {
				had = a.Conditions
			}
		}
		keepTimes(conditions, had)
		out = append(out, gwv1.PolicyAncestorStatus{AncestorRef: ref, ControllerName: gateway.ControllerName, Conditions: conditions})
	}
	return out
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
