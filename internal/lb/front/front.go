// Package front serves Services of type LoadBalancer in the proxied way on one node
// (docs/design/009-proxied-load-balancer.md): it turns each Service with its EndpointSlices, Secrets and Nodes into a
// proxied.Service, and makes their addresses local.
package front

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// Server accepts the connections of Services (proxied.Server).
type Server interface {
	BindInside()
	Set(services []*proxied.Service) (failed map[svc.Name]error)
	Serves(svc.Name) bool
	Doors() []proxied.Door
	FinishLogs(now time.Time)
	// Close returns the listeners that wait for the next process.
	Close(ctx context.Context) (kept []proxied.Door)
	Rejected() uint64
	Panics() uint64
	DroppedLogs() uint64
	DroppedLines() uint64
	// Watch has changed called when Absences may differ: it must not wait.
	Watch(changed func())
	Absences() []pods.Absence
	Collector() prometheus.Collector
}

// Recorder records Events (events.Recorder).
type Recorder interface {
	Event(object runtime.Object, eventType, reason, message string)
}

// Network is what a Front changes of its node's network.
type Network struct {
	// SetVIPs makes addresses local, and no others, which the node calls from the given addresses (link.SetVIPs). SetClusterIPs is
	// the same for ClusterIPs (link.SetClusterIPs). ClusterIPs returns the ones that are local (link.ClusterIPs).
	SetVIPs       func(addrs, from []netip.Addr) error
	SetClusterIPs func(addrs, from []netip.Addr) error
	ClusterIPs    func() ([]netip.Addr, error)
	Filter        interface { // filter.Filter
		Redirects() bool
		Firsts() bool
		SetBound(addrs []netip.Addr, listeners []filter.Bound) error
		Settle()
		Close() error
	}
	Rules interface { // filter.Groups
		Set(nodes []netip.Prefix, groups []filter.Group) error
		Close() error
	}
}

// Options are the options of a Front.
type Options struct {
	// NodeName names this node.
	NodeName string
	// Client reads what Services name: EndpointSlices, Secrets, ConfigMaps and Nodes.
	Client kubernetes.Interface
	// Gateway reads the objects of the Gateway API. Without it no fronts of Gateways and Ingresses are served.
	Gateway *api.Client
	Events  Recorder
	Log     *slog.Logger
	// Server accepts the connections. The Front closes it.
	Server Server
	// Served, if not nil, is called after Ready may have changed.
	Served func()
	// Listed reports whether Services and claims have been listed; nil: they have.
	Listed func() bool
	// NoMesh is why connections to the ClusterIPs of this node cannot be led here, "" if they can.
	NoMesh string
	// Network is the kernel's, unless a test wants another one.
	Network *Network
	// AccessLogs is the directory of the access logs, and UploadLogs where they are uploaded to. Without either nothing is
	// uploaded.
	AccessLogs string
	UploadLogs *LogUpload
}

// Front serves the Services of the proxied way on a node. Its methods are safe for concurrent use; Run is called once.
type Front struct {
	node    string
	client  kubernetes.Interface
	events  Recorder
	log     *slog.Logger
	server  Server
	served  func()
	listed  func() bool
	upload  *logship.Uploader // nil if nothing is uploaded
	wake    loop.Signal
	network *Network
	local   *localAddresses // only Run uses it
	rules   *rules
	*absentees
	*meshing
	*gateways

	// mu guards the state below and that of the Services, Secrets, authorities, Nodes and rules.
	mu          sync.Mutex
	services    map[svc.Name]*service
	claims      map[netip.Addr][]svc.Name
	zone        string       // of this node, empty if it is unknown
	addrs       []netip.Addr // of this node
	secrets     map[secretKey]*namedSecret
	authorities map[objectName]*authority
	nodes       nodes
	routing     routing
}

// New returns a Front that does nothing before Run.
func New(o Options) *Front {
	f := &Front{
		node: o.NodeName, client: o.Client, events: o.Events, log: o.Log, server: o.Server, served: o.Served, listed: o.Listed,
		wake: loop.NewSignal(), services: map[svc.Name]*service{}, claims: map[netip.Addr][]svc.Name{},
		secrets: map[secretKey]*namedSecret{}, authorities: map[objectName]*authority{},
	}
	if f.log == nil {
		f.log = slog.New(slog.DiscardHandler)
	}
	if f.served == nil {
		f.served = func() {}
	}
	if f.listed == nil {
		f.listed = func() bool { return true }
	}
	f.routing = routing{
		client: f.client, changed: f.changed, mu: &f.mu, services: f.services, backends: map[svc.Name]*target{}, wide: map[string]*sliceWatch{},
	}
	f.meshing = newMeshing(f, o)
	f.routing.meshing = f.meshing
	if o.Gateway != nil {
		f.routing.watch = watch.New(watch.Options{Client: f.client, Gateway: o.Gateway, Log: f.log, Changed: f.wake.Set})
	}
	f.gateways = &gateways{mu: &f.mu, services: f.services}
	f.rules = newRules(f.log, f.wake.Set)
	network := o.Network
	if network == nil {
		network = &Network{
			SetVIPs: link.SetVIPs, SetClusterIPs: link.SetClusterIPs, ClusterIPs: link.ClusterIPs,
			Filter: filter.New(f.wake.Set), Rules: filter.NewGroups(f.rules.changed),
		}
	}
	f.meshing.firsts = network.Filter.Firsts
	f.local = newLocalAddresses(f.log, network)
	f.rules.network, f.network = network, network
	f.upload = f.newUploader(o)
	f.absentees = &absentees{
		front: absentOf{f.node, &f.mu, f.services, f.events, f.server}, changed: f.served, turned: loop.NewSignal(),
	}
	if f.server != nil { // a test of what is built has none
		f.server.Watch(f.turned.Set)
	}
	return f
}

// Wake makes Run look again, as after Options.Listed has changed.
func (f *Front) Wake() { f.wake.Set() }

// Serves reports whether a Service takes the proxied way.
func (f *Front) Serves(n svc.Name) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.services[n] != nil
}

// Ready reports whether a Service may be announced: it is served, or does not take the proxied way.
func (f *Front) Ready(n svc.Name) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.services[n]
	return s == nil || s.ready
}

const (
	// retryPeriod is how often failures are retried and local routes are repaired.
	retryPeriod = 10 * time.Second
	// stopGrace is how long connections may continue after another node has taken over the addresses.
	stopGrace = 2 * time.Second
)

// Run serves until ctx ends, in the network namespace of the process.
func (f *Front) Run(ctx context.Context) {
	if f.network.Filter.Redirects() {
		f.server.BindInside()
	} else {
		f.log.Warn("this kernel leads no packets to sockets that are bound elsewhere (nf_tables with tproxy): listeners of load balancers " +
			"take their ports from other programs of this node, and other programs theirs")
	}
	tick := time.NewTicker(retryPeriod)
	defer tick.Stop()
	var running sync.WaitGroup
	defer running.Wait()
	defer func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
		defer cancel()
		kept := f.server.Close(grace)
		f.local.release(kept)
		f.rules.release(len(kept) > 0)
	}()
	if f.upload != nil {
		running.Go(func() { f.upload.Run(ctx) })
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f.expireStaples(time.Now())
			f.local.repair()
			f.reportAbsent()
		case <-f.turned: // nothing else has changed
			f.reportAbsent()
			continue
		case <-f.wake:
		}
		f.follow(ctx, &running)
		f.apply()
		f.applyRules()
		if to := f.uploads(); f.upload != nil {
			f.upload.Set(to)
		}
	}
}

// follow starts to follow the objects that Services name, and stops following objects that no Service names any more.
func (f *Front) follow(ctx context.Context, running *sync.WaitGroup) {
	f.followSlices(ctx, running)
	f.followSecrets(ctx, running)
	f.followAuthorities(ctx, running)
	f.followNodes(ctx, running)
	f.routing.follow(ctx, running)
}

// changed calls change with mu held, and wakes Run.
func (f *Front) changed(change func()) {
	f.mu.Lock()
	change()
	f.mu.Unlock()
	f.wake.Set()
}

// apply makes the server serve the Services as they are now.
func (f *Front) apply() {
	f.meshing.probe()
	want := f.build()
	f.local.setSources(sourcesOf(f))
	f.local.close(f.server.Doors(), want)
	failed := f.server.Set(want)
	err := f.local.set(f.server.Doors())
	f.meshing.observe(failed)
	asked := make(map[svc.Name]bool, len(want))
	for _, s := range want {
		asked[s.Name] = true
	}
	if f.observe(func(n svc.Name) (ready bool, failure error) {
		// A port that fails does not keep the others from being announced.
		return asked[n] && err == nil && (failed[n] == nil || f.server.Serves(n)), failed[n]
	}) {
		f.served()
	}
}

// build returns the Services that can be served.
func (f *Front) build() (out []*proxied.Service) {
	f.mu.Lock()
	defer f.mu.Unlock()
	in := f.inputsLocked(time.Now())
	for n, s := range f.services {
		if s.built == nil {
			var why reason
			if s.built, why = in.build(n, s); why.text != "" && !why.waits {
				f.failLocked(s, why.text)
			}
			if s.built != nil && s.built.Routes != nil {
				s.last = s.built
			} else if why.waits && s.last != nil {
				out = append(out, s.last)
			}
		}
		if s.built != nil {
			out = append(out, s.built)
		}
	}
	return f.routing.meshing.build(in, out)
}

// inputsLocked returns what Services are built from.
func (f *Front) inputsLocked(now time.Time) *inputs {
	return &inputs{
		node: f.node, zone: f.zone, now: now, claims: f.claims, secrets: f.secrets, authorities: f.authorities, nodes: &f.nodes,
		routing: &f.routing,
	}
}

// observe records which Services are served, and why others are not. It reports whether Ready has changed for one.
func (f *Front) observe(outcome func(svc.Name) (ready bool, failure error)) (changed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	in := f.inputsLocked(time.Now())
	for n, s := range f.services {
		ready, failure := outcome(n)
		if failure != nil {
			f.failLocked(s, failure.Error())
		} else if ready {
			f.failLocked(s, cmp.Or(in.secretProblem(n, s), in.authorityProblem(n, s), in.nodes.unmatched(s)))
		}
		shown := f.gateways.noteLocked(&f.routing, s, ready && failure == nil)
		changed = changed || ready != s.ready || shown
		s.ready = ready
	}
	if !f.gateways.known && f.listed() {
		f.gateways.known, changed = true, true
	}
	return changed
}

// failLocked records why a Service is not served as it asks for, once for each change; "" is no failure.
func (f *Front) failLocked(s *service, why string) {
	if s.failure == why {
		return
	}
	s.failure = why
	if why != "" {
		f.events.Event(s.object, corev1.EventTypeWarning, "ProxiedLoadBalancerFailed", "node "+f.node+": "+why)
		f.log.Warn("cannot serve a load balancer; retrying", "service", svc.NameOf(s.object), "err", why)
	}
}
