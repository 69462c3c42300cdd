package front

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// service is a Service of the proxied way. The Front's mu guards it.
type service struct {
	object *corev1.Service
	// spec is the last valid configuration, nil before the first one, and selector that of its BackendNodes.
	spec     *dialect.Spec
	selector labels.Selector
	wrong    string // in the present configuration, empty if it is valid
	// slices are the EndpointSlices by name, once they are listed.
	slices map[string]*discoveryv1.EndpointSlice
	listed bool
	stop   context.CancelFunc // ends following them
	// built is for the server, nil if it must be built again.
	built *proxied.Service
	// table is that of a front, as it was built from last, and last is what was built: it is served until the endpoints of new
	// targets have been read.
	table   *gateway.Table
	last    *proxied.Service
	unread  time.Time // since when endpoints of a target have not been read; zero if all have
	pools   pools     // of its policies and clients, as it was built last
	served  listeners // of a Gateway
	failure string    // the last recorded one
	ready   bool
	// unstored is why access logs cannot be uploaded, and logFailure the last recorded reason.
	unstored, logFailure string
}

// SetService takes a Service of type LoadBalancer over.
func (f *Front) SetService(o *corev1.Service) {
	n := svc.NameOf(o)
	class := o.Spec.LoadBalancerClass
	if class != nil && *class != svc.LoadBalancerClass {
		f.DropService(n)
		return
	}
	r := claim.Read(o)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules.setLocked(o, r)
	if r.Way != dialect.Proxied && !r.Invalid() || !v1.Proxied(o) {
		f.dropLocked(n)
		return
	}
	s := f.services[n]
	if s == nil {
		s = &service{slices: map[string]*discoveryv1.EndpointSlice{}}
		f.services[n] = s
	}
	s.object, s.built, s.wrong = o, nil, r.Wrong()
	if s.wrong == "" {
		s.spec = &r.Spec
		s.selector, _ = labels.Parse(s.spec.BackendNodes) // claim.Read has parsed it
	}
	f.wake.Set()
}

// DropService forgets a Service.
func (f *Front) DropService(n svc.Name) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dropLocked(n)
	f.rules.dropLocked(n)
}

// dropLocked ends serving a Service.
func (f *Front) dropLocked(n svc.Name) {
	s := f.services[n]
	if s == nil {
		return
	}
	if s.stop != nil {
		s.stop()
	}
	delete(f.services, n)
	f.wake.Set()
}

// SetClaim records for which Services an address is claimed, none if it is not claimed. A Service without a claim does
// not get an address, whatever its status contains.
func (f *Front) SetClaim(a netip.Addr, services []svc.Name) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range slices.Concat(f.claims[a], services) {
		if s := f.services[n]; s != nil {
			s.built = nil
			f.wake.Set()
		}
		if f.rules.services[n] != nil {
			f.rules.changed()
		}
	}
	if len(f.meshing.all) > 0 && (len(services) > 0) != (len(f.claims[a]) > 0) { // endpoints at claimed addresses do not count
		f.meshing.rebuild(f.routing.leadsTo(map[netip.Addr]bool{a: true}))
		f.wake.Set()
	}
	f.claims[a] = services
	if len(services) == 0 {
		delete(f.claims, a)
	}
}

// sourcesOf returns the addresses of the node of a Front.
func sourcesOf(f *Front) []netip.Addr {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.addrs
}

// SetNode takes over the zone and the addresses of this node's Node object, nil if there is none.
func (f *Front) SetNode(o *corev1.Node) {
	zone, addrs := "", []netip.Addr(nil)
	if o != nil {
		zone = o.Labels[corev1.LabelTopologyZone]
		addrs = readNode(o).addrs
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.Equal(addrs, f.addrs) {
		f.addrs = addrs
		f.wake.Set()
	}
	if zone == f.zone {
		return
	}
	f.routing.setZone()
	f.zone = zone
	for _, s := range f.services {
		s.built = nil
	}
	f.wake.Set()
}

// followSlices starts to follow the EndpointSlices of new Services.
func (f *Front) followSlices(ctx context.Context, running *sync.WaitGroup) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for n, s := range f.services {
		if s.stop != nil {
			continue
		}
		var of context.Context
		of, s.stop = context.WithCancel(reflector.Quiet(ctx))
		change := func(do func()) { f.changed(func() { do(); s.built = nil }) }
		sink := reflector.Sink[*discoveryv1.EndpointSlice]{
			Replace: func(list []*discoveryv1.EndpointSlice) {
				change(func() {
					clear(s.slices)
					for _, o := range list {
						s.slices[o.Name] = o
					}
					s.listed = true
				})
			},
			Set:    func(o *discoveryv1.EndpointSlice) { change(func() { s.slices[o.Name] = o }) },
			Delete: func(o *discoveryv1.EndpointSlice) { change(func() { delete(s.slices, o.Name) }) },
		}
		from := reflector.From(f.client.DiscoveryV1().EndpointSlices(n.Namespace),
			metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + n.Name})
		running.Go(func() { reflector.Run(of, "lb-speaker/proxied", from, sink) })
	}
}
