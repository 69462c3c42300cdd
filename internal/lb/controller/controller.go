package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/election"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options are the options of a Controller.
type Options struct {
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
	// Beside, if not nil, runs while the Controller works: its writes with config are fenced as the Controller's. orders is what orders
	// certificates, nil without ACME.
	Beside func(ctx context.Context, config *rest.Config, events *events.Recorder, orders *acme.Manager) error
	// Started, if not nil, is called each time the Controller has begun to work.
	Started func()

	coverageDelay time.Duration // the constant of this name, unless a test sets it
}

// FlagPool is a pool that is given on the command line.
type FlagPool struct {
	Name   string
	Ranges []pool.Range
}

// Controller gives addresses to Services.
type Controller struct {
	o       Options
	client  kubernetes.Interface
	config  *rest.Config
	lease   *election.Lease
	lb      *v1.Client
	crds    extensions.Interface
	metrics metrics
	working atomic.Pointer[state] // nil while another process works
}

// New returns a Controller that does nothing before Run.
func New(o Options) (*Controller, error) {
	if o.Config == nil {
		return nil, errors.New("load balancers: no configuration for the API server")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Workers = cmp.Or(o.Workers, 8)
	o.coverageDelay = cmp.Or(o.coverageDelay, coverageDelay)
	config := apiclient.Tuned(o.Config, svc.LoadBalancer)
	c := &Controller{o: o}
	c.metrics = newMetrics(c)
	c.lease = &election.Lease{Namespace: svc.SystemNamespace, Name: svc.LoadBalancer, Identity: o.Identity, Log: o.Log}
	var err, err2, err3, err4 error
	if c.lease.Client, err4 = kubernetes.NewForConfig(config); o.LeaderElect {
		c.lease.Fence(config)
	}
	c.config = config
	c.lb, err = v1.NewClient(config)
	c.crds, err2 = extensions.NewForConfig(config)
	c.client, err3 = kubernetes.NewForConfig(apiclient.Protobuf(config))
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
	recorder := events.NewRecorder(c.client, corev1.EventSource{Component: svc.LoadBalancer}, c.o.Log)
	defer recorder.Start()()
	w := newTerm(c, recorder)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	w.follow(ctx, &running)
	select {
	case <-ctx.Done():
		return nil
	case <-w.begun:
	}
	w.poolKeeper.begin(ctx)
	c.working.Store(w.state)
	defer c.working.Store(nil)
	running.Go(func() { w.loop.Run(ctx) })
	running.Go(func() { w.serveWaiting(ctx) })
	running.Go(func() { w.poolKeeper.run(ctx) })
	running.Go(func() { w.voterKeeper.run(ctx) })
	running.Go(func() { w.keepCoverage(ctx, c.o.coverageDelay) })
	var orders *acme.Manager
	if a := c.o.ACME; a != nil {
		orders = a.Manager(c.client, c.o.Log, recorder, w.isOursLocking)
		running.Go(func() { orders.Run(ctx) })
	}
	if c.o.Beside != nil {
		running.Go(func() {
			if err := c.o.Beside(ctx, c.config, recorder, orders); err != nil {
				c.o.Log.Error("cannot serve Gateways and Ingresses", "err", err)
			}
		})
	}
	c.o.Log.Info("giving addresses to load balancers", "pools", len(c.o.Pools), "default", c.o.Default)
	if c.o.Started != nil {
		c.o.Started()
	}
	<-ctx.Done()
	return nil
}

// term is a Controller while it works. Its state ends with it.
type term struct {
	*state
	o      *Options
	client kubernetes.Interface
	lb     *v1.Client
	events *events.Recorder
	loop   *loop.Loop[svc.Name]

	poolKeeper  *poolKeeper
	voterKeeper *voterKeeper
}

func newTerm(c *Controller, recorder *events.Recorder) *term {
	t := &term{o: &c.o, client: c.client, lb: c.lb, events: recorder}
	t.state = newState(c.o.Default, func(n svc.Name) { t.loop.Queue.Add(n) })
	report := &reporter{events: recorder, later: func(n svc.Name, after time.Duration) { t.loop.Queue.AddAfter(n, after) }}
	s := &syncer{state: t.state, write: &writer{t.state, c.client}, report: report}
	t.loop = loop.New(c.o.Log, "loadbalancer", c.o.Workers, s.sync)
	t.poolKeeper = &poolKeeper{state: t.state, flags: c.o.Pools, client: c.client, lb: c.lb, log: c.o.Log, events: recorder}
	t.voterKeeper = &voterKeeper{state: t.state, client: c.client, lb: c.lb, log: c.o.Log}
	return t
}

// follow starts to follow everything that addresses depend on.
func (t *term) follow(ctx context.Context, running *sync.WaitGroup) {
	core, networking, st := t.client.CoreV1(), t.client.NetworkingV1(), t.state
	all := metav1.ListOptions{}
	claims := metav1.ListOptions{LabelSelector: claim.Selector}
	setNode := func(o *corev1.Node) { st.changeNode(o.Name, readNode(o)) }
	dropNode := func(o metav1.Object) { st.changeNode(o.GetName(), nodeFacts{}) }
	dropNamespace := func(o metav1.Object) { delete(st.namespaces, o.GetName()) }
	st.unlisted = 7
	start(ctx, st, running, "services", reflector.From(core.Services(""), all), st.setService, st.dropService)
	start(ctx, st, running, "claims", reflector.From(networking.IPAddresses(), claims), st.setClaim, st.dropClaim)
	start(ctx, st, running, "pools", reflector.From(t.lb.Pools, all).Defined(), st.setPool, st.dropPool)
	start(ctx, st, running, "speakers", reflector.From(t.lb.Speakers, all).Defined(), st.setSpeaker, st.dropSpeaker)
	start(ctx, st, running, "namespaces", reflector.From(core.Namespaces(), all), st.setNamespace, dropNamespace)
	start(ctx, st, running, "nodes", reflector.From(core.Nodes(), all), setNode, dropNode)
	start(ctx, st, running, "servicecidrs", reflector.From(networking.ServiceCIDRs(), all), st.setServiceCIDR, st.dropServiceCIDR)
}

// isOursLocking is isOurs for a caller that does not hold mu.
func (t *term) isOursLocking(s *corev1.Service) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.isOurs(s)
}

// start follows one kind. set and drop are called with mu held.
func start[T metav1.Object](
	ctx context.Context, st *state, running *sync.WaitGroup, kind string, from reflector.Source, set func(T), drop func(metav1.Object),
) {
	running.Go(func() { reflector.Run(ctx, "lb/"+kind, from, into(st, set, drop)) })
}

// into returns the Sink for one kind. drop gets the name and the UID of a deleted object: nothing else is kept of most
// objects, such as Services that are not load balancers.
func into[T metav1.Object](st *state, set func(T), drop func(metav1.Object)) reflector.Sink[T] {
	known := map[svc.Name]types.UID{}
	listed := false
	return reflector.Sink[T]{
		Replace: func(objs []T) {
			st.mu.Lock()
			defer st.mu.Unlock()
			before := known
			known = make(map[svc.Name]types.UID, len(objs))
			for _, o := range objs {
				delete(before, svc.NameOf(o))
				known[svc.NameOf(o)] = o.GetUID()
				set(o)
			}
			for name, uid := range before {
				drop(&metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: uid})
			}
			if !listed {
				listed = true
				st.listed()
			}
		},
		Set: func(o T) {
			st.mu.Lock()
			defer st.mu.Unlock()
			known[svc.NameOf(o)] = o.GetUID()
			set(o)
		},
		Delete: func(o T) {
			st.mu.Lock()
			defer st.mu.Unlock()
			delete(known, svc.NameOf(o))
			drop(o)
		},
	}
}
