package table

import (
	"cmp"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// ownPods are the observations of this node about its Pods. Slices report the same a moment
// later, or when a server is back.
type ownPods struct {
	known map[string]svc.OwnPod // by UID
	// services have an endpoint that stands for the Pod, by its UID.
	services map[string]map[*service]struct{}
}

func newOwnPods() ownPods {
	return ownPods{services: map[string]map[*service]struct{}{}}
}

// ownEndpoint is an endpoint that stands for a Pod of this node.
type ownEndpoint struct {
	at  int // in endpointSlice.endpoints
	uid string
	// mayBeReady is unset for what gets no new connection however ready the Pod is: it is
	// terminating, or of weight 0.
	mayBeReady bool
}

// ownOf returns an endpoint's Pod of this node. Slices that were not made from a selector say
// what their author has decided, and that counts.
func ownOf(obj *discoveryv1.EndpointSlice, ep *discoveryv1.Endpoint, state State) (ownEndpoint, bool) {
	ref := ep.TargetRef
	if !state.Is(Local) || ref == nil || ref.Kind != "Pod" || ref.UID == "" ||
		obj.Labels[discoveryv1.LabelManagedBy] != svc.ManagedBySelector {
		return ownEndpoint{}, false
	}
	return ownEndpoint{uid: string(ref.UID), mayBeReady: !deref(ep.Conditions.Terminating, false)}, true
}

// SetOwnPods sets the observations of this node about its Pods, by their UIDs. They decide the
// readiness of the Pods' endpoints instead of the slices, unless the Service publishes endpoints
// that are not ready. Slices decide for other Pods. The caller does not change the map any more.
func (b *Builder) SetOwnPods(pods map[string]svc.OwnPod) {
	before := b.own.known
	b.own.known = pods
	touch := func(uid string) {
		for s := range b.own.services[uid] {
			b.touch(s)
		}
	}
	for uid, p := range pods {
		if o, was := before[uid]; !was || o.Ready != p.Ready || !slices.Equal(o.IPs, p.IPs) {
			touch(uid)
		}
	}
	for uid := range before {
		if _, is := pods[uid]; !is {
			touch(uid)
		}
	}
}

// index remembers which Pods of this node are endpoints of s.
func (o *ownPods) index(s *service) {
	for _, uid := range s.own {
		if delete(o.services[uid], s); len(o.services[uid]) == 0 {
			delete(o.services, uid)
		}
	}
	s.own = nil
	for _, slice := range s.slices {
		for _, e := range slice.own {
			if o.services[e.uid] == nil {
				o.services[e.uid] = map[*service]struct{}{}
			}
			o.services[e.uid][s] = struct{}{}
			s.own = append(s.own, e.uid)
		}
	}
}

// stateNow returns the state of an endpoint, by what this node knows itself if it stands for
// one of its Pods.
func (o *ownPods) stateNow(s *service, slice *endpointSlice, i int) State {
	ep := slice.endpoints[i]
	if !ep.Is(Local) || len(slice.own) == 0 || len(o.known) == 0 || s.obj == nil || s.obj.Spec.PublishNotReadyAddresses {
		return ep.State
	}
	at, found := slices.BinarySearchFunc(slice.own, i, func(e ownEndpoint, i int) int { return cmp.Compare(e.at, i) })
	if !found {
		return ep.State
	}
	own := slice.own[at]
	p, known := o.known[own.uid]
	switch {
	case !known:
		return ep.State
	case !p.Ready || len(p.IPs) > 0 && !slices.Contains(p.IPs, ep.addr):
		return Local
	case own.mayBeReady:
		return Ready | Serving | Local
	}
	return ep.State
}
