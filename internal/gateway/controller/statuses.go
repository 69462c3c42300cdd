package controller

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// ignoreRaces returns an error unless an object has changed or gone: then its watch brings the new state.
func ignoreRaces(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// keepTimes gives conditions their earlier times, and the present time if their status has changed.
func keepTimes(want, have []metav1.Condition) {
	now := metav1.Now()
	for i := range want {
		c := &want[i]
		c.LastTransitionTime = now
		for _, h := range have {
			if h.Type == c.Type && h.Status == c.Status {
				c.LastTransitionTime = h.LastTransitionTime
			}
		}
	}
}

// writeClass accepts a GatewayClass.
func (c *controller) writeClass(ctx context.Context, class *gwv1.GatewayClass) error {
	want := []metav1.Condition{
		{Type: string(gwv1.GatewayClassConditionStatusAccepted), Reason: string(gwv1.GatewayClassReasonAccepted), Status: metav1.ConditionTrue},
		{
			Type: string(gwv1.GatewayClassConditionStatusSupportedVersion), Reason: string(gwv1.GatewayClassReasonSupportedVersion),
			Status: metav1.ConditionTrue,
		},
	}
	if class.Spec.ParametersRef != nil {
		want[0].Status, want[0].Reason = metav1.ConditionFalse, string(gwv1.GatewayClassReasonInvalidParameters)
		want[0].Message = "parametersRef: there are no parameters of a GatewayClass"
	}
	for i := range want {
		want[i].ObservedGeneration = class.Generation
	}
	keepTimes(want, class.Status.Conditions)
	features := c.features()
	if equality.Semantic.DeepEqual(want, class.Status.Conditions) && equality.Semantic.DeepEqual(features, class.Status.SupportedFeatures) {
		return nil
	}
	next := class.DeepCopy()
	next.Status.Conditions, next.Status.SupportedFeatures = want, features
	_, err := c.api.Classes().UpdateStatus(ctx, next, metav1.UpdateOptions{})
	return err
}

// writeGateway writes the status of a Gateway if it differs.
func (c *controller) writeGateway(ctx context.Context, g *gwv1.Gateway, want gwv1.GatewayStatus) error {
	keepTimes(want.Conditions, g.Status.Conditions)
	for i := range want.Listeners {
		for j := range g.Status.Listeners {
			if g.Status.Listeners[j].Name == want.Listeners[i].Name {
				keepTimes(want.Listeners[i].Conditions, g.Status.Listeners[j].Conditions)
				break
			}
		}
		if cs := want.Listeners[i].Conditions; cs[0].LastTransitionTime.IsZero() {
			keepTimes(cs, nil)
		}
	}
	if equality.Semantic.DeepEqual(want, g.Status) {
		return nil
	}
	next := g.DeepCopy()
	next.Status = want
	_, err := c.api.Gateways(g.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	return err
}

// writeRoute writes the parts of a route's status that are ours, if they differ.
func (c *controller) writeRoute(ctx context.Context, r *gwv1.HTTPRoute, s *watch.State) error {
	key := gateway.StreamKey{Kind: gateway.KindHTTPRoute, Name: svc.NameOf(r)}
	want, differs := parentsOf(s, c.unserved, key, r.Spec.ParentRefs, r.Status.Parents)
	if !differs {
		return nil
	}
	next := r.DeepCopy()
	next.Status.Parents = want
	_, err := c.api.Routes(r.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	return err
}

// parentsOf returns the statuses that a route should have for its parents, and whether they differ from those that it has. The
// ones of other controllers stay.
func parentsOf(s *watch.State, nodes *unserved, route gateway.StreamKey, refs []gwv1.ParentReference, have []gwv1.RouteParentStatus) (
	want []gwv1.RouteParentStatus, differs bool,
) {
	want = []gwv1.RouteParentStatus{}
	for _, p := range have {
		if p.ControllerName != gateway.ControllerName {
			want = append(want, p)
		}
	}
	add := func(some []gwv1.RouteParentStatus) {
		for _, p := range some {
			p.Conditions = slices.Clone(p.Conditions) // the front's do not change
			if gateway.ServiceParent(route.Namespace, &p.ParentRef) != (svc.Name{}) {
				p.Conditions = nodes.add(p.Conditions)
			}
			keepTimes(p.Conditions, conditionsOf(have, &p.ParentRef))
			want = append(want, p)
		}
	}
	seen := map[svc.Name]bool{}
	for _, g := range gateway.ParentsOf(s.Sets, route.Namespace, refs) {
		if f := s.Fronts[g]; f != nil && !seen[g] {
			seen[g] = true
			add(f.Parents(route))
		}
	}
	for _, n := range gateway.ServiceParents(route.Namespace, refs) {
		if m := s.Meshes[n]; m != nil {
			add(m.Parents(route))
		}
	}
	return want, len(want)+len(have) > 0 && !equality.Semantic.DeepEqual(want, have)
}

func conditionsOf(have []gwv1.RouteParentStatus, ref *gwv1.ParentReference) []metav1.Condition {
	for i := range have {
		p := &have[i]
		if p.ControllerName == gateway.ControllerName && equality.Semantic.DeepEqual(&p.ParentRef, ref) {
			return p.Conditions
		}
	}
	return nil
}

// syncIngresses keeps the Service of all Ingresses, writes their statuses, and records what is wrong with them.
func (c *controller) syncIngresses(ctx context.Context, s *watch.State, have *corev1.Service, errs *[]error) error {
	ports := map[gateway.PortKey]string{{Number: gateway.IngressHTTP}: "http"}
	if s.Ingress.Table.Ports[gateway.IngressHTTPS] != nil {
		ports[gateway.PortKey{Number: gateway.IngressHTTPS}] = "https"
	}
	want := front(gateway.IngressService(), ports)
	want.Labels[gateway.FrontLabel] = gateway.FrontIngress
	open(want, gateway.SecretRefs(s.Ingress.Secrets))
	problem, err := c.keepService(ctx, want, have)
	if problem != "" {
		c.o.Log.Warn("cannot serve Ingresses", "err", problem)
	}
	var numbers []uint16
	for p := range ports {
		numbers = append(numbers, p.Number)
	}
	slices.Sort(numbers)
	status := gateway.IngressStatus(addressesOf(have), numbers)
	for n, in := range s.Ingresses {
		if !equality.Semantic.DeepEqual(in.Status.LoadBalancer.Ingress, status) {
			next := in.DeepCopy()
			next.Status.LoadBalancer.Ingress = status
			_, err := c.client.NetworkingV1().Ingresses(n.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
			*errs = append(*errs, ignoreRaces(err))
		}
		c.problems.record(c.o.Events, in, "IngressNotServed", s.Ingress.Problems[n])
		c.ignored.record(c.o.Events, in, "IngressAnnotationIgnored", s.Ingress.Ignored[n])
	}
	c.problems.keep(s.Ingresses)
	c.ignored.keep(s.Ingresses)
	return err
}

// recorded are the texts of the last Events of a kind about Ingresses.
type recorded map[svc.Name]string

// record records an Event about an Ingress, once for each change of its text, none for "".
func (r recorded) record(events Recorder, in *networkingv1.Ingress, reason, text string) {
	if n := svc.NameOf(in); r[n] != text {
		if r[n] = text; text != "" {
			events.Event(in, corev1.EventTypeWarning, reason, text)
		}
	}
}

// keep forgets the Ingresses that are gone.
func (r recorded) keep(have map[svc.Name]*networkingv1.Ingress) {
	for n := range r {
		if have[n] == nil {
			delete(r, n)
		}
	}
}
