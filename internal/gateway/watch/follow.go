package watch

import (
	"context"
	"maps"
	"sync"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// FollowGateways follows GatewayClasses and Gateways. Their definitions must be served.
func (w *Watch) FollowGateways(ctx context.Context, running *sync.WaitGroup) {
	w.mu.Lock()
	defer w.mu.Unlock()
	classes := reflector.From(w.o.Gateway.Classes(), metav1.ListOptions{}).Defined()
	start(ctx, w, running, "gatewayclasses", classes, func(n svc.Name, c *gwv1.GatewayClass) bool {
		if delete(w.classes, n.Name); c != nil && names.OurClass(c) {
			w.classes[n.Name] = c
		}
		w.classesChanged = true
		return true
	})
	all := reflector.From(w.o.Gateway.Gateways(""), metav1.ListOptions{}).Defined()
	start(ctx, w, running, "gateways", all, func(n svc.Name, g *gwv1.Gateway) bool {
		if !w.o.Statuses && sameSpec(w.gateways[n], g, specOfGateway) {
			return false
		}
		return setGateway(w, n, g)
	})
}

// FollowIngresses follows IngressClasses and Ingresses.
func (w *Watch) FollowIngresses(ctx context.Context, running *sync.WaitGroup) {
	w.mu.Lock()
	defer w.mu.Unlock()
	networking := w.o.Client.NetworkingV1()
	start(ctx, w, running, "ingressclasses", reflector.From(networking.IngressClasses(), metav1.ListOptions{}),
		func(n svc.Name, c *networkingv1.IngressClass) bool {
			w.ingressClassesChanged = true
			return set(w.ingressClasses, n.Name, c)
		})
	start(ctx, w, running, "ingresses", reflector.From(networking.Ingresses(""), metav1.ListOptions{}),
		func(n svc.Name, in *networkingv1.Ingress) bool {
			if have := w.ingresses[n]; !w.o.Statuses && sameSpec(have, in, specOfIngress) && maps.Equal(have.Annotations, in.Annotations) {
				return false
			}
			return setIngress(w, n, in)
		})
}

// policyKind is the kind of BackendTLSPolicies, which restrict. While a node may not read them it serves no Mesh, and clients reach the
// Services' own endpoints. Gateways are still served, since an older ClusterRole would otherwise end them: only ports whose appProtocol
// is of TLS are closed.
const policyKind = "backendtlspolicies"

// followMore follows what our objects depend on. The caller holds mu.
func (w *Watch) followMore(ctx context.Context, running *sync.WaitGroup) {
	all := metav1.ListOptions{}
	if len(w.objects.Gateways) > 0 || w.meshed {
		follow(ctx, w, running, "httproutes", reflector.From(w.o.Gateway.Routes(""), all).Defined(), true, w.setRoute)
		follow(ctx, w, running, "grpcroutes", reflector.From(w.o.Gateway.Calls(""), all).Defined(), true, w.setCall)
	}
	if len(w.objects.Gateways)+len(w.objects.Meshed) > 0 {
		w.followGrants(ctx, running, false)
		// At a Service no policy counts, but a backend that has one must not be spoken to without TLS.
		follow(ctx, w, running, policyKind, reflector.From(w.o.Gateway.Policies(""), all).Defined(), true, w.setPolicy)
	}
	if len(w.objects.Gateways) > 0 {
		w.followStreams(ctx, running)
		start(ctx, w, running, "namespaces", reflector.From(w.o.Client.CoreV1().Namespaces(), all),
			func(n svc.Name, o *corev1.Namespace) bool { return setNamespace(w, n, o) })
	}
	if len(w.objects.Gateways)+len(w.objects.Ingresses)+len(w.objects.Meshed) > 0 {
		start(ctx, w, running, "services", reflector.From(w.o.Client.CoreV1().Services(""), all), w.setService)
	}
}

const grantKind = "referencegrants"

// followGrants follows the ReferenceGrants, which are optional for Ingresses: without them these reach no other namespace. The caller
// holds mu.
func (w *Watch) followGrants(ctx context.Context, running *sync.WaitGroup, optional bool) {
	from := reflector.From(w.o.Gateway.Grants(""), metav1.ListOptions{}).Defined()
	follow(ctx, w, running, grantKind, from, optional,
		func(n svc.Name, g *gwv1.ReferenceGrant) bool { return setGrant(w, n, g) })
}

// setNamespace takes the labels of a Namespace over, nil if it has gone. If a listener takes routes of other namespaces than before, its
// front has all of them looked at. The caller holds mu.
func setNamespace(w *Watch, n svc.Name, o *corev1.Namespace) bool {
	have, known := w.objects.Namespaces[n.Name]
	if o == nil {
		delete(w.objects.Namespaces, n.Name)
	} else {
		w.objects.Namespaces[n.Name] = o.Labels
	}
	if o != nil && known && maps.Equal(have, o.Labels) {
		return false
	}
	for g := range w.fronts {
		changeBeside(w, g)
	}
	return true
}

// setGrant takes a ReferenceGrant over, nil if it has gone: it is for objects of its namespace. The caller holds mu.
func setGrant(w *Watch, n svc.Name, grant *gwv1.ReferenceGrant) bool {
	set(w.objects.Grants, n, grant)
	w.copies.grants = nil
	for g, f := range w.fronts {
		changeBeside(w, g)
		for service, routes := range f.Users.All() {
			if service.Namespace == n.Namespace {
				change(w, g, routes...)
			}
		}
	}
	w.dirtyMeshes = true
	for f, front := range w.ingressFronts {
		w.dirtyIngresses[f] = w.dirtyIngresses[f] || front.Granted()
	}
	return true
}

// set takes an object over, nil if it has gone. It reports true.
func set[K comparable, V any](to map[K]*V, key K, v *V) bool {
	if delete(to, key); v != nil {
		to[key] = v
	}
	return true
}

// start follows a kind, once. change is called with mu held, with nil for an object that has gone, and reports whether a state may have
// become another one. The caller holds mu.
func start[T any, P interface {
	*T
	metav1.Object
}](ctx context.Context, w *Watch, running *sync.WaitGroup, kind string, from reflector.Source, change func(svc.Name, *T) bool) {
	follow[T, P](ctx, w, running, kind, from, false, change)
}

// follow is start. The others do not wait for an optional kind that is not served, or may not be read: then it has no objects, and
// in the second case it is in unread.
func follow[T any, P interface {
	*T
	metav1.Object
}](
	ctx context.Context, w *Watch, running *sync.WaitGroup, kind string, from reflector.Source, optional bool, change func(svc.Name, *T) bool,
) {
	if w.started[kind] {
		return
	}
	w.started[kind] = true
	w.pending++
	locked := func(do func() bool) {
		w.mu.Lock()
		changed := do()
		w.mu.Unlock()
		if changed {
			w.o.Changed()
		}
	}
	take := func(n svc.Name, o P) bool {
		o.SetManagedFields(nil) // nobody asks for them, and an update without them leaves them as they are
		return change(n, (*T)(o))
	}
	known, listed, read := map[svc.Name]bool{}, false, false
	done := func() {
		if !listed {
			listed = true
			w.pending--
		}
	}
	if optional {
		text := map[bool]string{
			false: "a kind of the Gateway API is not served; going on without it",
			true:  "cannot read a kind of the Gateway API without the rights get, list and watch; going on without it",
		}
		from = from.Observed(func(err error) {
			forbidden := apierrors.IsForbidden(err)
			if !forbidden && !apierrors.IsNotFound(err) {
				return
			}
			locked(func() bool {
				if first := !listed || w.unread[kind] != forbidden; first && !read {
					w.o.Log.Warn(text[forbidden], "kind", kind, "err", err)
					w.unread[kind] = forbidden
				}
				done()
				return true
			})
		})
	}
	sink := reflector.Sink[P]{
		Replace: func(list []P) {
			locked(func() bool {
				next := make(map[svc.Name]bool, len(list))
				for _, o := range list {
					next[svc.NameOf(o)] = true
					take(svc.NameOf(o), o)
				}
				for n := range known {
					if !next[n] {
						change(n, nil)
					}
				}
				known = next
				read, w.unread[kind] = true, false
				done()
				return true
			})
		},
		Set: func(o P) {
			locked(func() bool {
				known[svc.NameOf(o)] = true
				return take(svc.NameOf(o), o)
			})
		},
		Delete: func(o P) {
			locked(func() bool {
				delete(known, svc.NameOf(o))
				return change(svc.NameOf(o), nil)
			})
		},
	}
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "gateway/"+kind, from, sink) })
}
