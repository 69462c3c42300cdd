package lb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/election"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/pool"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// ControllerOptions are the options of a Controller.
type ControllerOptions struct {
	// Config is how to reach the API. A copy of it is used, without client-side rate
	// limits.
	Config *rest.Config
	// Log may be nil.
	Log *slog.Logger
	// Pools are kept as IPAddressPool objects.
	Pools []FlagPool
	// Default makes the Controller serve Services without a loadBalancerClass, too.
	Default bool
	// LeaderElect makes it work only while it holds the Lease kube-system/fairlead-lb, as
	// Identity (see election.Lease).
	LeaderElect bool
	Identity    string
	// Workers is how many Services are worked on at a time (default 8).
	Workers int
	// ACME orders certificates, if it is not nil.
	ACME *ACME
	// Started, if not nil, is called each time the Controller has begun to work.
	Started func()

	coverageDelay time.Duration // the constant of this name, unless a test sets it
}

// FlagPool is a pool that is given on the command line.
type FlagPool struct {
	Name   string
	Ranges []pool.Range
}

// leaseName is the Lease of the controllers.
const leaseName = "fairlead-lb"

// Controller gives addresses to Services.
type Controller struct {
	o       ControllerOptions
	client  kubernetes.Interface
	lease   *election.Lease
	lb      *v1.Client
	crds    extensions.Interface
	metrics metrics
	working atomic.Pointer[controller] // nil while another process works
}

// NewController returns a Controller that does nothing before Run.
func NewController(o ControllerOptions) (*Controller, error) {
	if o.Config == nil {
		return nil, errors.New("load balancers: no configuration for the API server")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Workers = cmp.Or(o.Workers, 8)
	o.coverageDelay = cmp.Or(o.coverageDelay, coverageDelay)
	config := rest.CopyConfig(o.Config)
	config.QPS, config.RateLimiter = -1, nil // the limit is the API server's priority and fairness
	if config.UserAgent == "" {
		config.UserAgent = "fairlead-lb"
	}
	c := &Controller{o: o}
	c.metrics = newMetrics(c)
	c.lease = &election.Lease{Namespace: Namespace, Name: leaseName, Identity: o.Identity, Log: o.Log}
	var err, err2, err3, err4 error
	if c.lease.Client, err4 = kubernetes.NewForConfig(config); o.LeaderElect {
		c.lease.Fence(config)
	}
	c.lb, err = v1.NewClient(config)
	c.crds, err2 = extensions.NewForConfig(config)
	binary := rest.CopyConfig(config)
	binary.ContentType = runtime.ContentTypeProtobuf
	binary.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	c.client, err3 = kubernetes.NewForConfig(binary)
	if err := errors.Join(err, err2, err3, err4); err != nil {
		return nil, fmt.Errorf("client for load balancers: %w", err)
	}
	return c, nil
}

// Run works until ctx ends, and returns when everything that it started has ended.
func (c *Controller) Run(ctx context.Context) error {
	if !c.o.LeaderElect {
		return c.work(ctx)
	}
	return c.lease.Run(ctx, c.work)
}

// work is one term as the leader.
func (c *Controller) work(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := c.install(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	recorder := events.NewRecorder(c.client, corev1.EventSource{Component: "fairlead-lb"}, c.o.Log)
	defer recorder.Start()()
	w := &controller{
		Controller: c, log: c.o.Log, events: recorder,
		knowledge: newKnowledge(), problems: map[svc.Name][]string{}, findings: map[svc.Name]map[string][]string{},
		wake: make(chan struct{}, 1), tidy: make(chan struct{}, 1), voters: make(chan struct{}, 1), covers: make(chan struct{}, 1),
		begun: make(chan struct{}),
	}
	w.loop = loop.New(w.log, "loadbalancer", c.o.Workers, w.sync)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	w.follow(ctx, &running)
	select {
	case <-ctx.Done():
		return nil
	case <-w.begun:
	}
	c.working.Store(w)
	defer c.working.Store(nil)
	running.Go(func() { w.loop.Run(ctx) })
	running.Go(func() { w.serveWaiting(ctx) })
	running.Go(func() { w.keepPools(ctx) })
	running.Go(func() { w.keepVoters(ctx) })
	running.Go(func() { w.keepCoverage(ctx) })
	if c.o.ACME != nil {
		running.Go(func() { w.newACME().Run(ctx) })
	}
	c.o.Log.Info("giving addresses to load balancers", "pools", len(c.o.Pools), "default", c.o.Default)
	if c.o.Started != nil {
		c.o.Started()
	}
	<-ctx.Done()
	return nil
}

// controller is a Controller in one term. Its memory ends with the term.
type controller struct {
	*Controller
	log    *slog.Logger
	events *events.Recorder
	loop   *loop.Loop[svc.Name]
	// wake has an item when an address may have become free, tidy when something about
	// pools has changed.
	wake, tidy chan struct{}
	voters     chan struct{} // has an item when something about speakers has changed
	covers     chan struct{} // has an item when what speakers can announce has changed
	lists      quorum.Lists  // as last read or written by keepVoters
	begun      chan struct{} // closed when everything has been listed

	mu sync.Mutex // guards what follows
	*knowledge
	problems map[svc.Name][]string // that have been recorded as Events
	// findings has what was recorded about annotations, by the reason of the Event.
	findings map[svc.Name]map[string][]string
	// recorded bounds the Events about addresses that no node can announce.
	recorded quota
	// readings bounds the Services in a period with Events about their annotations.
	readings quota
}

// signal puts an item into c unless there is one.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// follow starts to follow everything that matters.
func (c *controller) follow(ctx context.Context, running *sync.WaitGroup) {
	core, net := c.client.CoreV1(), c.client.NetworkingV1()
	all := metav1.ListOptions{}
	ours := metav1.ListOptions{LabelSelector: networkingv1.LabelManagedBy + "=" + ManagedBy}
	c.unlisted = 7
	start(ctx, c, running, "services", reflector.From(core.Services(""), all), c.setService, c.dropService)
	start(ctx, c, running, "claims", reflector.From(net.IPAddresses(), ours), c.setClaim, c.dropClaim)
	start(ctx, c, running, "pools", reflector.From(c.lb.Pools, all), c.setPool, c.dropPool)
	start(ctx, c, running, "speakers", reflector.From(c.lb.Speakers, all), c.setSpeaker, c.dropSpeaker)
	start(ctx, c, running, "namespaces", reflector.From(core.Namespaces(), all), c.setNamespace, c.dropNamespace)
	start(ctx, c, running, "nodes", reflector.From(core.Nodes(), all), c.setNode, c.dropNode)
	start(ctx, c, running, "servicecidrs", reflector.From(net.ServiceCIDRs(), all), c.setServiceCIDR, c.dropServiceCIDR)
}

// start follows one kind. set and drop are called with mu held.
func start[T metav1.Object](
	ctx context.Context, c *controller, running *sync.WaitGroup, kind string, from reflector.Source, set func(T), drop func(metav1.Object),
) {
	running.Go(func() { reflector.Run(ctx, "lb/"+kind, from, into(c, set, drop)) })
}

// into returns the Sink for one kind. drop gets the name and the UID of what is gone: of most objects, as the Services
// that are no load balancers, nothing else is kept.
func into[T metav1.Object](c *controller, set func(T), drop func(metav1.Object)) reflector.Sink[T] {
	known := map[svc.Name]types.UID{}
	gone := func(name svc.Name, uid types.UID) {
		drop(&metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: uid})
	}
	listed := false
	return reflector.Sink[T]{
		Replace: func(objs []T) {
			c.mu.Lock()
			defer c.mu.Unlock()
			before := known
			known = make(map[svc.Name]types.UID, len(objs))
			for _, o := range objs {
				delete(before, nameOf(o))
				known[nameOf(o)] = o.GetUID()
				set(o)
			}
			for name, uid := range before {
				gone(name, uid)
			}
			if !listed {
				listed = true
				c.listed()
			}
		},
		Set: func(o T) {
			c.mu.Lock()
			defer c.mu.Unlock()
			known[nameOf(o)] = o.GetUID()
			set(o)
		},
		Delete: func(o T) {
			c.mu.Lock()
			defer c.mu.Unlock()
			delete(known, nameOf(o))
			drop(o)
		},
	}
}

// listed counts the kinds that have been listed, and begins when all are.
func (c *controller) listed() {
	if c.unlisted--; c.unlisted > 0 {
		return
	}
	c.begin()
	close(c.begun)
}

// begin decides, with mu held, about everything that has been listed: claims first, since
// they are the truth, then Services without an address, the oldest first.
func (c *controller) begin() {
	c.coverage = c.computeCoverage()
	c.compile()
	for _, addrs := range c.nodeAddrs {
		c.block(addrs...)
	}
	for addr, claim := range c.claims {
		for _, name := range servicesOf(claim) {
			c.alloc.Hold(addr, c.holderOf(name))
			c.loop.Queue.Add(name)
		}
	}
	for name, s := range c.services {
		if c.isOurs(s) && len(c.alloc.Of(name)) == 0 {
			c.waiting.add(s)
		}
		c.loop.Queue.Add(name)
	}
	c.live = true
	c.adoptPublished()
	c.retryWaiting()
	signal(c.tidy)
}

// adoptPublished lets Services keep what their status shows and no claim is for,
// before others get anything.
func (c *controller) adoptPublished() {
	for _, w := range c.waiting.list {
		r, problem := c.request(c.services[w.name])
		if problem == nil && len(r.Prefer) > 0 {
			r.AskedOnly, r.Pools = append(r.AskedOnly, r.Pools...), nil
			c.alloc.Assign(r)
		}
	}
}

// block keeps addresses of nodes from being given out.
func (c *controller) block(addrs ...netip.Addr) {
	for _, a := range addrs {
		c.alloc.Block(a, "an address of a node")
	}
}
