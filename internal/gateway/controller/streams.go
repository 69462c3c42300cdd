package controller

import (
	"cmp"
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// writeStream writes the status of a route of connections or of datagrams.
func (c *controller) writeStream(ctx context.Context, r *kinds.Stream, want []gwv1.RouteParentStatus) error {
	namespace := r.Object.GetNamespace()
	var err error
	switch o := r.Object.(type) {
	case *gwv1.TLSRoute:
		next := o.DeepCopy()
		next.Status.Parents = want
		_, err = c.api.TLSRoutes(namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	case *gwv1.TCPRoute:
		next := o.DeepCopy()
		next.Status.Parents = want
		_, err = c.api.TCPRoutes(namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	case *gwv1.UDPRoute:
		next := o.DeepCopy()
		next.Status.Parents = want
		_, err = c.api.UDPRoutes(namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	}
	return err
}

// writeSet writes the status of a ListenerSet of one of our Gateways if it differs.
func (c *controller) writeSet(ctx context.Context, set *gwv1.ListenerSet, want gwv1.ListenerSetStatus) error {
	keepTimes(want.Conditions, set.Status.Conditions)
	for i := range want.Listeners {
		l := &want.Listeners[i]
		at := slices.IndexFunc(set.Status.Listeners, func(h gwv1.ListenerEntryStatus) bool { return h.Name == l.Name })
		if at < 0 {
			keepTimes(l.Conditions, nil)
		} else {
			keepTimes(l.Conditions, set.Status.Listeners[at].Conditions)
		}
	}
	if equality.Semantic.DeepEqual(want, set.Status) {
		return nil
	}
	if equality.Semantic.DeepEqual(uncountedSet(want), uncountedSet(set.Status)) && c.postpones(set) {
		return nil
	}
	next := set.DeepCopy()
	next.Status = want
	_, err := c.api.Sets(set.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	if err == nil {
		c.announcer.set(set, &want)
	}
	return err
}

// uncountedSet returns a status without the numbers of routes.
func uncountedSet(s gwv1.ListenerSetStatus) gwv1.ListenerSetStatus {
	s.Listeners = slices.Clone(s.Listeners)
	for i := range s.Listeners {
		s.Listeners[i].AttachedRoutes = 0
	}
	return s
}

// orphanStatus returns the status of a ListenerSet whose Gateway does not exist, and whether it differs from the one that the set has:
// one that nothing has accepted keeps its own.
func orphanStatus(s *gwv1.ListenerSet) (out gwv1.ListenerSetStatus, differs bool) {
	for _, kind := range []gwv1.ListenerSetConditionType{gwv1.ListenerSetConditionAccepted, gwv1.ListenerSetConditionProgrammed} {
		out.Conditions = append(out.Conditions, metav1.Condition{
			Type: string(kind), Status: metav1.ConditionFalse, Reason: string(gwv1.ListenerSetReasonParentNotAccepted),
			Message: "the Gateway does not exist", ObservedGeneration: s.Generation,
		})
		differs = differs || meta.IsStatusConditionTrue(s.Status.Conditions, string(kind))
	}
	return out, differs
}

// setsOf is what the ListenerSets of a Gateway are written with.
type setsOf struct {
	unprogrammed string // why the Gateway is not, "" if it is
	hold         bool   // statuses stay as they are
	addressed    bool   // the Gateway has an address
	services     map[svc.Name]*corev1.Service
	taken        map[svc.Name]string // the ReferenceGrants that cannot have their Services, and why
}

// syncSets keeps the Services of the ListenerSets of a Gateway, and writes their statuses. A Service that one of them cannot
// have, for itself or for a ReferenceGrant, does not concern the others.
func (c *controller) syncSets(ctx context.Context, s *watch.State, f *gateway.Front, with setsOf, errs *[]error) {
	for _, n := range f.Sets() {
		set, why := s.Sets[n], cmp.Or(with.unprogrammed, problemOf(f.GrantsOf(n), with.taken))
		if set == nil {
			continue
		}
		if secrets, orders := f.SetSecrets(n), orderedBy(f, n); len(secrets)+len(orders) > 0 {
			problem, err := c.keepService(ctx, serviceOfSet(set, secrets, orders), with.services[names.ServiceOfSet(n)])
			*errs = append(*errs, ignoreRaces(err))
			why = cmp.Or(why, problem)
		}
		if !with.hold {
			status := f.SetStatus(n, why)
			c.certifier.certifySet(&status, f, n, set.Generation, with.addressed)
			*errs = append(*errs, ignoreRaces(c.writeSet(ctx, set, status)))
		}
	}
}
