package controller

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/parents"
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
	if why := c.unsupported.Load(); why != nil && *why != "" {
		want[1].Status, want[1].Reason, want[1].Message = metav1.ConditionFalse, string(gwv1.GatewayClassReasonUnsupportedVersion), *why
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
	if equality.Semantic.DeepEqual(uncounted(want), uncounted(g.Status)) && c.postpones(g) {
		return nil
	}
	next := g.DeepCopy()
	next.Status = want
	_, err := c.api.Gateways(g.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	if err == nil {
		c.announcer.gateway(g, &want)
	}
	return err
}

// postpones reports whether a write that only counts the routes of an object again waits, since there was another one within
// countPeriod. Under many changes of routes a write for each would cost the server as much as the routes do.
func (c *controller) postpones(o metav1.Object) bool {
	now := time.Now()
	maps.DeleteFunc(c.counted, func(_ types.UID, at time.Time) bool { return now.Sub(at) >= countPeriod })
	if _, recent := c.counted[o.GetUID()]; recent {
		c.postponed = true
		return true
	}
	c.counted[o.GetUID()] = now
	return false
}

// uncounted returns a status without the numbers of routes.
func uncounted(s gwv1.GatewayStatus) gwv1.GatewayStatus {
	s.Listeners = slices.Clone(s.Listeners)
	for i := range s.Listeners {
		s.Listeners[i].AttachedRoutes = 0
	}
	return s
}

// routed is a route of any kind, as it was read.
type routed struct {
	key    kinds.Route
	object metav1.Object
	refs   []gwv1.ParentReference
	have   []gwv1.RouteParentStatus
	write  func(ctx context.Context, want []gwv1.RouteParentStatus) error
}

// settled is what was compared when a route had the status that it should have.
type settled struct {
	object  metav1.Object
	parents []*gwv1.RouteParentStatus // the first ones of what each front has of the route
}

// take makes the routes due whose statuses may have to change. unserved is why nodes do not serve routes at Services, "" if all do.
func (c *controller) take(s *watch.State, unserved string) {
	maps.Copy(c.due, s.Touched)
	c.looping.changed(s.Fronts, func(key kinds.Route) {
		c.due[key] = true
		delete(c.settled, key)
	})
	if !s.AllTouched && unserved == c.unservedBefore || !s.Listed {
		return
	}
	c.unservedBefore = unserved
	for key := range c.settled { // also what has been deleted
		c.due[key] = true
	}
	for n := range s.Routes {
		c.due[kinds.Route{Kind: kinds.HTTPRoute, Name: n}] = true
	}
	for n := range s.Calls {
		c.due[kinds.Route{Kind: kinds.GRPCRoute, Name: n}] = true
	}
	for key := range s.Streams {
		c.due[key] = true
	}
}

// writeRoutes writes the parts of the statuses of routes that are due and ours, if they differ. A route stays due if its write fails.
func (c *controller) writeRoutes(s *watch.State, attempt func(func(context.Context) error) (done bool)) {
	for key := range c.due {
		r := c.routed(s, key)
		if r == nil {
			delete(c.settled, key)
			delete(c.looping, key)
		}
		if r == nil || c.writeRoute(s, attempt, r) {
			delete(c.due, key)
		}
	}
}

// routed returns a route, nil if it does not exist.
func (c *controller) routed(s *watch.State, key kinds.Route) *routed {
	switch key.Kind {
	case kinds.HTTPRoute:
		if r := s.Routes[key.Name]; r != nil {
			return &routed{key, r, r.Spec.ParentRefs, r.Status.Parents, func(ctx context.Context, want []gwv1.RouteParentStatus) error {
				next := r.DeepCopy()
				next.Status.Parents = want
				_, err := c.api.Routes(key.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
				return err
			}}
		}
	case kinds.GRPCRoute:
		if r := s.Calls[key.Name]; r != nil {
			return &routed{key, r, r.Spec.ParentRefs, r.Status.Parents, func(ctx context.Context, want []gwv1.RouteParentStatus) error {
				next := r.DeepCopy()
				next.Status.Parents = want
				_, err := c.api.Calls(key.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
				return err
			}}
		}
	default:
		if r := s.Streams[key]; r != nil {
			return &routed{key, r.Object, r.Parents, r.Status, func(ctx context.Context, want []gwv1.RouteParentStatus) error {
				return c.writeStream(ctx, r, want)
			}}
		}
	}
	return nil
}

// writeRoute writes the status of a route if it differs, and reports false if it could not. A status that was as it should be is not
// compared again before the route, or what a front has of it, changes.
func (c *controller) writeRoute(s *watch.State, attempt func(func(context.Context) error) (done bool), r *routed) (done bool) {
	var all []gwv1.RouteParentStatus
	var parts []part
	now := settled{object: r.object}
	seen := map[svc.Name]bool{}
	for _, g := range parents.Gateways(s.Sets, r.key.Namespace, r.refs) {
		if f := s.Fronts[g]; f != nil && !seen[g] {
			seen[g] = true
			if of := f.Parents(r.key); len(of) > 0 {
				all, now.parents, parts = append(all, of...), append(now.parents, &of[0]), append(parts, part{g, f, len(of)})
			}
		}
	}
	services := parents.Services(r.key.Namespace, r.refs)
	if s.NoMeshes != "" && len(services) > 0 { // nothing is known of these parents: their statuses stay
		return true
	}
	if was, known := c.settled[r.key]; known && len(services) == 0 && was.object == now.object && slices.Equal(was.parents, now.parents) {
		return true
	}
	c.looping.add(all, r.key, r.object, parts)
	for _, n := range services {
		if m := s.Meshes[n]; m != nil {
			all = append(all, m.Parents(r.key)...)
		}
	}
	want, differs := parentsOf(all, c.unservedBefore, r)
	if !differs {
		c.settled[r.key] = now
		return true
	}
	return attempt(func(ctx context.Context) error {
		err := r.write(ctx, want)
		if err == nil {
			c.announcer.route(r, want)
		}
		return err
	})
}

// parentsOf returns the statuses that a route should have for its parents, and whether they differ from its present ones. all are
// the ones that are ours; the ones of other controllers stay.
func parentsOf(all []gwv1.RouteParentStatus, unserved string, r *routed) (want []gwv1.RouteParentStatus, differs bool) {
	want = []gwv1.RouteParentStatus{}
	for _, p := range r.have {
		if p.ControllerName != names.ControllerName {
			want = append(want, p)
		}
	}
	for _, p := range all {
		p.Conditions = slices.Clone(p.Conditions) // the front's do not change
		if parents.Service(r.key.Namespace, &p.ParentRef) != (svc.Name{}) {
			p.Conditions = withUnserved(p.Conditions, unserved)
		}
		keepTimes(p.Conditions, conditionsOf(r.have, &p.ParentRef))
		want = append(want, p)
	}
	return want, len(want)+len(r.have) > 0 && !equality.Semantic.DeepEqual(want, r.have)
}

func conditionsOf(have []gwv1.RouteParentStatus, ref *gwv1.ParentReference) []metav1.Condition {
	for i := range have {
		p := &have[i]
		if p.ControllerName == names.ControllerName && equality.Semantic.DeepEqual(&p.ParentRef, ref) {
			return p.Conditions
		}
	}
	return nil
}
