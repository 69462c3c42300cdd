package lb

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// proxying serves the Services of the proxied way on this node
// (docs/design/009-proxied-load-balancer.md).
type proxying struct {
	node   string
	client kubernetes.Interface
	log    *slog.Logger
	events *events.Recorder
	server *proxied.Server
	upload *logship.Uploader // nil without an endpoint
	// served is called when a Service may have become ready, or not.
	served func()
	// listed reports whether Services and claims have been listed.
	listed func() bool
	wake   chan struct{}
	// rulesDirty is set when rules may not be what is wanted.
	rulesDirty atomic.Bool
	// What follows is used by run alone.

	vips      []netip.Addr   // that were made local last
	filter    *filter.Filter // what of them can be reached
	filterErr string         // why the filter could not be set, as logged last
	rules     *filter.Groups
	rulesErr  string // why rules could not be set, as logged last

	mu       sync.Mutex
	services map[svc.Name]*proxiedService
	ruled    map[svc.Name]*ruledService
	claims   map[netip.Addr][]svc.Name
	secrets  map[secretKey]*namedSecret
	zone     string // of this node, empty if it is unknown
	nodes    nodes
	roots    map[objectName]*podAuthority
}

// proxiedService is a Service of the proxied way.
type proxiedService struct {
	object *corev1.Service
	// spec is the last good one, nil if there was none, and selector that of its BackendNodes.
	spec     *dialect.Spec
	selector labels.Selector
	slices   map[string]*discoveryv1.EndpointSlice
	listed   bool // slices has been
	stop     context.CancelFunc
	// built is what the server is to do, nil when that has changed.
	built   *proxied.Service
	failure string // as recorded last
	ready   bool
	// unstored is why its access logs cannot be uploaded, and logFailure what was recorded of that last.
	unstored, logFailure string
}

func newProxying(o SpeakerOptions, client kubernetes.Interface) *proxying {
	server := proxied.New(proxied.Options{Log: o.Log, AccessLogs: o.AccessLogs, Node: o.NodeName, Store: o.Store})
	p := &proxying{
		node: o.NodeName, client: client, log: o.Log, server: server, wake: make(chan struct{}, 1),
		services: map[svc.Name]*proxiedService{}, ruled: map[svc.Name]*ruledService{},
		claims: map[netip.Addr][]svc.Name{}, secrets: map[secretKey]*namedSecret{},
		roots: map[objectName]*podAuthority{},
	}
	p.filter = filter.New(func() { signal(p.wake) })
	p.rules = filter.NewGroups(p.rulesChanged)
	p.rulesDirty.Store(true) // what an earlier process has left is unknown
	p.upload = p.newUploader(o)
	return p
}

// setService takes a Service of type LoadBalancer over.
func (p *proxying) setService(o *corev1.Service) {
	n := nameOf(o)
	r := Read(o)
	class := o.Spec.LoadBalancerClass
	if class != nil && *class != v1.Class {
		p.dropService(n)
		return
	}
	p.setRules(o, r)
	if r.Way != dialect.Proxied && !r.Invalid() || !v1.Proxied(o) {
		p.dropProxied(n)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.services[n]
	if v == nil {
		v = &proxiedService{slices: map[string]*discoveryv1.EndpointSlice{}}
		p.services[n] = v
	}
	v.object, v.built = o, nil
	if !r.Invalid() {
		v.spec = &r.Spec
		v.selector, _ = labels.Parse(v.spec.BackendNodes) // it was parsed when it was read
	} else if v.spec == nil {
		p.fail(v, "an annotation has a wrong value, and there is no earlier configuration to go on with")
	}
	signal(p.wake)
}

func (p *proxying) dropService(n svc.Name) {
	p.dropProxied(n)
	p.dropRules(n)
}

func (p *proxying) dropProxied(n svc.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if v := p.services[n]; v != nil {
		if v.stop != nil {
			v.stop()
		}
		delete(p.services, n)
		signal(p.wake)
	}
}

// setClaim takes over for which Services an address was claimed, none if it was not: others do not have
// it, whatever their status says.
func (p *proxying) setClaim(a netip.Addr, services []svc.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, n := range slices.Concat(p.claims[a], services) {
		if v := p.services[n]; v != nil {
			v.built = nil
			signal(p.wake)
		}
		if p.ruled[n] != nil {
			p.rulesChanged()
		}
	}
	if p.claims[a] = services; len(services) == 0 {
		delete(p.claims, a)
	}
}

// setNode takes over in which zone this node is.
func (p *proxying) setNode(o *corev1.Node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	zone := ""
	if o != nil {
		zone = o.Labels[corev1.LabelTopologyZone]
	}
	if zone == p.zone {
		return
	}
	p.zone = zone
	for _, v := range p.services {
		v.built = nil
	}
	signal(p.wake)
}

// serves reports whether a Service takes the proxied way.
func (p *proxying) serves(n svc.Name) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.services[n] != nil
}

// ready reports whether a Service can be announced, as far as the proxied way is
// concerned.
func (p *proxying) ready(n svc.Name) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.services[n]
	return v == nil || v.ready
}

const (
	// retryPeriod is how often what failed is retried, and local routes are repaired.
	retryPeriod = 10 * time.Second
	// stopGrace is how long connections may go on after another node has taken the addresses over.
	stopGrace = 2 * time.Second
)

// run serves until ctx ends, in the network namespace of the process.
func (p *proxying) run(ctx context.Context) {
	tick := time.NewTicker(retryPeriod)
	defer tick.Stop()
	var running sync.WaitGroup
	defer running.Wait()
	defer func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
		defer cancel()
		p.release(p.server.Close(grace))
	}()
	if p.upload != nil {
		running.Go(func() { p.upload.Run(ctx) })
	}
	p.vips = []netip.Addr{{}} // what an earlier process has left is unknown
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			p.expireStaples(time.Now())
			if len(p.vips) > 0 {
				p.vips = []netip.Addr{{}}
			}
		case <-p.wake:
		}
		p.followSlices(ctx, &running)
		p.followSecrets(ctx, &running)
		p.followAuthorities(ctx, &running)
		p.followNodes(ctx, &running)
		p.apply()
		p.applyRules()
		if to := p.uploads(); p.upload != nil {
			p.upload.Set(to)
		}
	}
}

// release takes the addresses back from this node, but for those of kept listeners: what comes there waits for the next
// process.
func (p *proxying) release(kept []netip.AddrPort) {
	listeners := tcpListeners(kept)
	vips := addressesOf(listeners)
	if err := link.SetVIPs(vips); err != nil {
		p.log.Error("cannot remove the local routes of load balancers", "err", err)
	}
	if err := errors.Join(p.filter.Set(vips, listeners), p.filter.Close()); err != nil {
		p.log.Error("cannot remove the packet filter of load balancers", "err", err)
	}
	var err error
	if len(kept) == 0 {
		err = p.rules.Set(nil, nil)
	}
	if err = errors.Join(err, p.rules.Close()); err != nil {
		p.log.Error("cannot remove the rules of Network Load Balancers", "err", err)
	}
}

// changed calls f with the lock held, and wakes run.
func (p *proxying) changed(f func()) {
	p.mu.Lock()
	f()
	p.mu.Unlock()
	signal(p.wake)
}

// followSlices starts to follow the EndpointSlices of Services that are new.
func (p *proxying) followSlices(ctx context.Context, running *sync.WaitGroup) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for n, v := range p.services {
		if v.stop != nil {
			continue
		}
		var of context.Context
		of, v.stop = context.WithCancel(reflector.Quiet(ctx))
		change := func(f func()) { p.changed(func() { f(); v.built = nil }) }
		sink := reflector.Sink[*discoveryv1.EndpointSlice]{
			Replace: func(list []*discoveryv1.EndpointSlice) {
				change(func() {
					clear(v.slices)
					for _, s := range list {
						v.slices[s.Name] = s
					}
					v.listed = true
				})
			},
			Set:    func(s *discoveryv1.EndpointSlice) { change(func() { v.slices[s.Name] = s }) },
			Delete: func(s *discoveryv1.EndpointSlice) { change(func() { delete(v.slices, s.Name) }) },
		}
		from := reflector.From(p.client.DiscoveryV1().EndpointSlices(n.Namespace),
			metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + n.Name})
		running.Go(func() { reflector.Run(of, "lb-speaker/proxied", from, sink) })
	}
}

// fail records why a Service is not served as it asks for, once for each change.
func (p *proxying) fail(v *proxiedService, why string) {
	if v.failure == why {
		return
	}
	v.failure = why
	if why != "" {
		p.events.Event(v.object, corev1.EventTypeWarning, "ProxiedLoadBalancerFailed", "node "+p.node+": "+why)
		p.log.Warn("cannot serve a load balancer; retrying", "service", nameOf(v.object), "err", why)
	}
}

// apply makes the server do what is wanted.
func (p *proxying) apply() {
	p.mu.Lock()
	var want []*proxied.Service
	asked := map[svc.Name]bool{}
	for n, v := range p.services {
		if v.built == nil {
			v.built = p.build(n, v)
		}
		if v.built != nil {
			want = append(want, v.built)
			asked[n] = true
		}
	}
	p.mu.Unlock()
	err := p.setAddresses(want)
	failed := p.server.Set(want)
	p.mu.Lock()
	changed := false
	for n, v := range p.services {
		ready := asked[n] && failed[n] == nil && err == nil
		if failed[n] != nil {
			p.fail(v, failed[n].Error())
		} else if ready {
			p.fail(v, cmp.Or(p.secretProblem(n, v), p.authorityProblem(n, v)))
		}
		changed = changed || ready != v.ready
		v.ready = ready
	}
	p.mu.Unlock()
	if changed {
		p.served()
	}
}

// setAddresses makes the addresses of services, and of listeners that wait for theirs, and no others, addresses of this node,
// of which the listeners can be reached alone. An address is filtered before it is local, and until it is no more.
func (p *proxying) setAddresses(services []*proxied.Service) error {
	listeners := tcpListeners(p.server.Inherited())
	for _, v := range services {
		for _, l := range v.Spec.Listeners {
			protocol := svc.TCP
			if l.Protocol == dialect.UDP {
				protocol = svc.UDP
			}
			for _, a := range v.Addrs {
				listeners = append(listeners, filter.Listener{Protocol: protocol, At: netip.AddrPortFrom(a, l.Port)})
			}
		}
	}
	vips := addressesOf(listeners)
	had := slices.DeleteFunc(slices.Clone(p.vips), func(a netip.Addr) bool { return !a.IsValid() })
	p.setFilter(append(had, vips...), listeners)
	if slices.Equal(vips, p.vips) {
		return nil
	}
	if err := link.SetVIPs(vips); err != nil {
		p.log.Error("cannot make addresses of load balancers local; retrying", "err", err)
		p.vips = []netip.Addr{{}}
		return err
	}
	p.vips = vips
	p.setFilter(vips, listeners)
	return nil
}

// tcpListeners returns what the filter is to let pass.
func tcpListeners(at []netip.AddrPort) (out []filter.Listener) {
	for _, a := range at {
		out = append(out, filter.Listener{Protocol: svc.TCP, At: a})
	}
	return out
}

// addressesOf returns the addresses of listeners, in their order.
func addressesOf(listeners []filter.Listener) (out []netip.Addr) {
	for _, l := range listeners {
		out = append(out, l.At.Addr())
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// setFilter sets the filter. Without one, as on a kernel that has no nf_tables, the load balancer works on.
func (p *proxying) setFilter(vips []netip.Addr, listeners []filter.Listener) {
	failure := ""
	if err := p.filter.Set(vips, listeners); err != nil {
		failure = err.Error()
	}
	if failure != p.filterErr && failure != "" {
		p.log.Warn("cannot filter what is sent to addresses of load balancers; until a retry succeeds every port of this node "+
			"can be reached there", "err", failure)
	}
	p.filterErr = failure
}
