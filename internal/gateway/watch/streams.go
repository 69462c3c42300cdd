package watch

import (
	"context"
	"reflect"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// followStreams follows the routes of connections and of datagrams, and the ListenerSets. A bundle of the Gateway API that is older
// than v1.6 may lack them. The caller holds mu.
func (w *Watch) followStreams(ctx context.Context, running *sync.WaitGroup) {
	all := metav1.ListOptions{}
	follow(ctx, w, running, "tlsroutes", reflector.From(w.o.Gateway.TLSRoutes(""), all).Defined(), true,
		func(n svc.Name, r *gwv1.TLSRoute) bool {
			return setStream(w, kinds.Route{Kind: kinds.TLSRoute, Name: n}, r, kinds.StreamOfTLS)
		})
	follow(ctx, w, running, "tcproutes", reflector.From(w.o.Gateway.TCPRoutes(""), all).Defined(), true,
		func(n svc.Name, r *gwv1.TCPRoute) bool {
			return setStream(w, kinds.Route{Kind: kinds.TCPRoute, Name: n}, r, kinds.StreamOfTCP)
		})
	follow(ctx, w, running, "udproutes", reflector.From(w.o.Gateway.UDPRoutes(""), all).Defined(), true,
		func(n svc.Name, r *gwv1.UDPRoute) bool {
			return setStream(w, kinds.Route{Kind: kinds.UDPRoute, Name: n}, r, kinds.StreamOfUDP)
		})
	follow(ctx, w, running, "listenersets", reflector.From(w.o.Gateway.Sets(""), all).Defined(), true, w.setListenerSet)
}

// setStream takes a route over, nil if it has gone. The Gateways that it names, or has named before, are built again. The caller
// holds mu.
func setStream[T any](w *Watch, key kinds.Route, r *T, read func(*T) *kinds.Stream) bool {
	have := w.objects.Streams[key]
	var next *kinds.Stream
	if r != nil {
		next = read(r)
	}
	same := have != nil && next != nil && sameStream(have, next)
	for _, s := range []*kinds.Stream{have, next} {
		if s != nil && !same {
			for _, g := range parents.Gateways(w.objects.Sets, key.Namespace, s.Parents) {
				w.dirty[g] = true
			}
		}
	}
	if same && !w.o.Statuses {
		return false
	}
	w.touch(key)
	var before, now []gwv1.ParentReference
	if have != nil {
		before = have.Parents
	}
	if next != nil {
		now = next.Parents
	}
	w.objects.Named.SetRoute(key, key.Namespace, before, now)
	w.copies.streams = nil
	return set(w.objects.Streams, key, next)
}

// sameStream is sameSpec of the routes of streams.
func sameStream(a, b *kinds.Stream) bool {
	return a.Object.GetUID() == b.Object.GetUID() && a.Object.GetGeneration() == b.Object.GetGeneration() &&
		reflect.DeepEqual(a.Parents, b.Parents) && slices.Equal(a.Hostnames, b.Hostnames) && reflect.DeepEqual(a.Backends, b.Backends)
}

// setListenerSet takes a ListenerSet over, nil if it has gone. The Gateway that it names, or has named before, is built again.
// The caller holds mu.
func (w *Watch) setListenerSet(n svc.Name, s *gwv1.ListenerSet) bool {
	have := w.objects.Sets[n]
	same := sameSpec(have, s, specOfSet)
	if !w.o.Statuses && same {
		return false
	}
	for _, o := range []*gwv1.ListenerSet{have, s} {
		if o != nil && !same {
			w.dirty[parents.OfSet(o)] = true
		}
	}
	w.objects.Named.SetListenerSet(have, s)
	w.copies.sets = nil
	return set(w.objects.Sets, n, s)
}
