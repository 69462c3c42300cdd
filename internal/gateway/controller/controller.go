package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Recorder records Events (events.Recorder).
type Recorder interface {
	Event(object runtime.Object, eventType, reason, message string)
}

// Options are the options of Run.
type Options struct {
	// Config is how to reach the API. Its writes must be fenced by who elects the controller.
	Config *rest.Config
	Log    *slog.Logger
	Events Recorder
	// Gateway installs the definitions of the Gateway API and serves its objects; otherwise only Ingresses are served.
	Gateway bool
	// Channel is that of the definitions.
	Channel api.Channel
	// Orders orders certificates, nil without ACME.
	Orders *acme.Manager
}

// The times of the controller.
const (
	// installDelay leaves a server that has just begun to its clients: the definitions are large.
	installDelay = 3 * time.Second
	// gatherPeriod is how long it waits after a change. Nodes begin to serve the change meanwhile, for which the processors are free, and a
	// burst of changes is written together.
	gatherPeriod = 25 * time.Millisecond
	// countPeriod is the time between two writes of a status that only count the routes of a Gateway or ListenerSet again.
	countPeriod = 250 * time.Millisecond
	// retryPeriod is how long after a failure it tries again.
	retryPeriod = time.Second
	// writeTimeout bounds a write.
	writeTimeout = 10 * time.Second
	// installTimeout bounds the installation of all definitions.
	installTimeout = time.Minute
)

// controller is one term of the controller.
type controller struct {
	o      Options
	client kubernetes.Interface
	api    *api.Client
	rest   rest.Interface // for definitions
	wake   loop.Signal
	watch  *watch.Watch
	// experimental is true if the installed definitions are of the experimental channel.
	experimental atomic.Bool
	unsupported  atomic.Pointer[string] // why their version is not known, "" or nil if it is

	mu     sync.Mutex
	fronts map[svc.Name]*corev1.Service // with names.FrontLabel
	listed bool

	unserved *unserved

	settled map[kinds.Route]settled
	looping looping
	// due are the routes whose statuses may have to change, and unservedBefore is what unserved.why returned for them.
	due               map[kinds.Route]bool
	unservedBefore    string
	problems, ignored recorded
	uncertified       recorded // Ingresses whose certificates nothing orders
	announcer         announcer
	certifier         *certifier
	loops             ingressLoops
	failed            string // as it was logged last
	// counted is when the routes of an object were counted again, within countPeriod, and postponed is true if such a write waits,
	// or a Gateway for nodes.
	counted   map[types.UID]time.Time
	postponed bool
	awaited   map[svc.Name]*awaited
	refusals  refusals
	kept      map[wanting]bool // who wants Services in this round
}

// Run works until ctx ends, and returns when everything that it started has ended.
func Run(ctx context.Context, o Options) error {
	c := &controller{
		o: o, wake: loop.NewSignal(), fronts: map[svc.Name]*corev1.Service{}, settled: map[kinds.Route]settled{}, looping: looping{},
		due: map[kinds.Route]bool{}, counted: map[types.UID]time.Time{}, problems: recorded{}, ignored: recorded{},
		uncertified: recorded{}, certifier: &certifier{orders: o.Orders},
		awaited: map[svc.Name]*awaited{}, refusals: refusals{}, announcer: announcer{to: o.Events}, loops: newIngressLoops(),
	}
	var err, err2 error
	c.client, err = kubernetes.NewForConfig(apiclient.Protobuf(o.Config))
	c.api, err2 = api.NewClient(o.Config)
	if err := errors.Join(err, err2); err != nil {
		return fmt.Errorf("client for Gateways and Ingresses: %w", err)
	}
	c.rest = c.client.CoreV1().RESTClient()
	if c.unserved, err = newUnserved(o.Config, c.client, c.wake.Set); err != nil {
		return fmt.Errorf("client for Speakers: %w", err)
	}
	c.watch = watch.New(watch.Options{Client: c.client, Gateway: c.api, Log: o.Log, Changed: c.wake.Set, Statuses: true})
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if o.Orders != nil {
		o.Orders.Notify(c.wake.Set)
	}
	running.Go(func() { c.prepare(ctx, &running) })
	c.followFronts(ctx, &running)
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-retry.C:
		case <-c.wake:
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(gatherPeriod):
			}
		}
		if err := c.sync(ctx, &running); err != nil && ctx.Err() == nil {
			if text := err.Error(); text != c.failed {
				c.failed = text
				o.Log.Warn("cannot write what Gateways and Ingresses have become; retrying", "err", err)
			}
			retry.Reset(retryPeriod)
			continue
		}
		c.failed = ""
		if c.postponed {
			retry.Reset(countPeriod)
		} else if next := c.refusals.next(c.kept); next > 0 {
			retry.Reset(next)
		}
	}
}

// prepare makes the classes, and the definitions, and follows the objects.
func (c *controller) prepare(ctx context.Context, running *sync.WaitGroup) {
	c.watch.FollowIngresses(ctx, running)
	select {
	case <-ctx.Done():
		return
	case <-time.After(installDelay):
	}
	c.untilDone(ctx, "cannot make the IngressClass", c.makeIngressClass)
	if !c.o.Gateway {
		return
	}
	if c.untilDone(ctx, "cannot install the Gateway API", c.install) && c.untilDone(ctx, "cannot make the GatewayClass", c.makeClass) {
		c.watch.FollowMesh(ctx, running) // first: once Gateways are followed, the Service of no Mesh is deleted
		c.watch.FollowGateways(ctx, running)
	}
}

// untilDone repeats step until it succeeds, or ctx ends: then it reports false.
func (c *controller) untilDone(ctx context.Context, what string, step func(context.Context) error) bool {
	last := ""
	for {
		limited, cancel := context.WithTimeout(ctx, installTimeout)
		err := step(limited)
		cancel()
		if err == nil || ctx.Err() != nil {
			return ctx.Err() == nil
		}
		if text := err.Error(); text != last {
			last = text
			c.o.Log.Warn(what+"; retrying", "err", err)
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(retryPeriod):
		}
	}
}

// followFronts follows the Services of fronts.
func (c *controller) followFronts(ctx context.Context, running *sync.WaitGroup) {
	change := func(do func()) {
		c.mu.Lock()
		do()
		c.mu.Unlock()
		c.wake.Set()
	}
	sink := reflector.Sink[*corev1.Service]{
		Replace: func(list []*corev1.Service) {
			change(func() {
				clear(c.fronts)
				for _, s := range list {
					c.fronts[svc.NameOf(s)] = s
				}
				c.listed = true
			})
		},
		Set:    func(s *corev1.Service) { change(func() { c.fronts[svc.NameOf(s)] = s }) },
		Delete: func(s *corev1.Service) { change(func() { delete(c.fronts, svc.NameOf(s)) }) },
	}
	from := reflector.From(c.client.CoreV1().Services(""), metav1.ListOptions{LabelSelector: names.FrontLabel})
	running.Go(func() { reflector.Run(reflector.Quiet(ctx), "gateway/fronts", from, sink) })
}

// sync writes the objects that differ from the desired ones.
func (c *controller) sync(ctx context.Context, running *sync.WaitGroup) error {
	c.postponed, c.kept = false, map[wanting]bool{}
	s := c.watch.Update(ctx, running)
	c.take(s, c.unserved.why())
	c.mu.Lock()
	listed, have := c.listed, maps.Clone(c.fronts)
	c.mu.Unlock()
	if !s.Listed || !listed {
		return nil
	}
	var errs []error
	attempt := func(do func(context.Context) error) (done bool) {
		limited, cancel := context.WithTimeout(ctx, writeTimeout)
		defer cancel()
		err := ignoreRaces(do(limited))
		errs = append(errs, err)
		return err == nil
	}
	step := func(do func(context.Context) error) { attempt(do) }
	for _, class := range s.Classes {
		step(func(ctx context.Context) error { return c.writeClass(ctx, class) })
	}
	wanted := map[svc.Name]bool{}
	held := holders{have, wanted}
	taken := map[svc.Name]string{} // the ReferenceGrants that cannot have their Services, and why
	for n, objects := range granted(s) {
		held.claim(names.ServiceOfGrant(n), kindGrant, s.Grants[n])
		step(func(ctx context.Context) (err error) {
			taken[n], err = c.keepService(ctx, serviceOfGrant(s.Grants[n], objects), have[names.ServiceOfGrant(n)])
			return err
		})
	}
	c.syncPolicies(s, held, step)
	if len(s.Gateways) > 0 {
		c.unserved.follow(ctx, running)
	}
	for _, n := range slices.SortedFunc(maps.Keys(s.Gateways), svc.Name.Compare) {
		held.claim(names.ServiceOfGateway(n), kindGateway, s.Gateways[n])
		for _, set := range s.Fronts[n].Sets() {
			if len(s.Fronts[n].SetSecrets(set))+len(orderedBy(s.Fronts[n], set)) > 0 {
				held.claim(names.ServiceOfSet(set), kindSet, s.Sets[set])
			}
		}
		step(func(ctx context.Context) error { return c.syncGateway(ctx, s, n, held, taken) })
	}
	c.writeRoutes(s, attempt)
	for _, set := range s.Orphans {
		if want, differs := orphanStatus(set); differs {
			step(func(ctx context.Context) error { return c.writeSet(ctx, set, want) })
		}
	}
	c.certifier.request(s, have)
	errs = append(errs, c.syncIngresses(ctx, s, have, wanted))
	maps.DeleteFunc(c.awaited, func(n svc.Name, _ *awaited) bool { return s.Gateways[n] == nil })
	c.problems.keep(s.Ingresses)
	c.ignored.keep(s.Ingresses)
	c.uncertified.keep(s.Ingresses)
	c.loops.recorded.keep(s.Ingresses)
	if slices.ContainsFunc(slices.Collect(maps.Values(s.Meshes)), (*gateway.Mesh).Serves) {
		wanted[names.MeshService()] = true
		c.unserved.follow(ctx, running)
		step(func(ctx context.Context) error { return c.keepMeshService(ctx, have[names.MeshService()]) })
	}
	for n, service := range have {
		if !wanted[n] && c.abandoned(service, s) {
			step(func(ctx context.Context) error {
				o := metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(service.UID))}
				return c.client.CoreV1().Services(n.Namespace).Delete(ctx, n.Name, o)
			})
		}
	}
	return errors.Join(errs...)
}

// abandoned reports whether a Service that no front wants must be deleted. While the fronts of its kind are not followed yet, as at the
// beginning of a term, nothing is known about it: another Service would get another address.
func (c *controller) abandoned(service *corev1.Service, s *watch.State) bool {
	followed := s.FollowsGateways || !c.o.Gateway
	if service.Labels[names.FrontLabel] == names.FrontIngress {
		followed = s.FollowsIngresses
	}
	return followed && service.DeletionTimestamp == nil && ours(service)
}

// ours reports whether this controller has made a Service.
func ours(s *corev1.Service) bool {
	if svc.NameOf(s) == names.IngressService() {
		return s.Labels[names.FrontLabel] == names.FrontIngress
	}
	if svc.NameOf(s) == names.MeshService() {
		return s.Labels[names.FrontLabel] == names.FrontMesh
	}
	owner := metav1.GetControllerOf(s)
	switch kind := s.Labels[names.FrontLabel]; {
	case owner == nil:
		return false
	case owner.Kind == kindIngress:
		return kind == names.FrontIngress
	case owner.Kind == kindSet:
		return kind == names.FrontSet
	case owner.Kind == kindGrant:
		return kind == names.FrontGrant
	case owner.Kind == kindPolicy:
		return kind == names.FrontPolicy
	}
	return owner.Kind == kindGateway && s.Labels[names.ClassLabel] != ""
}

// granted returns the objects that Gateways use by ReferenceGrants.
func granted(s *watch.State) map[svc.Name][]trust.Ref {
	out := map[svc.Name][]trust.Ref{}
	for _, f := range s.Fronts {
		for grant, objects := range f.Granted() {
			if s.Grants[grant] != nil {
				out[grant] = append(out[grant], objects...)
			}
		}
	}
	return out
}

// syncGateway keeps the Service of a Gateway, and writes the statuses of the Gateway and its ListenerSets. taken has
// the ReferenceGrants that cannot have their Services, and why.
func (c *controller) syncGateway(
	ctx context.Context, s *watch.State, n svc.Name, services holders, taken map[svc.Name]string,
) error {
	g, f := s.Gateways[n], s.Fronts[n]
	have := services.have[names.ServiceOfGateway(n)]
	unprogrammed, err := "", error(nil)
	if ports := f.Ports(); len(ports) > 0 {
		unprogrammed, err = c.keepService(ctx, serviceOf(g, ports, f.Opened(), f.Orders.In(n.Namespace)), have)
	} else {
		unprogrammed = "no listener can be served"
	}
	addresses := addressesOf(services.of(names.ServiceOfGateway(n), kindGateway, g))
	unprogrammed = whyUnprogrammed(f, n, unprogrammed, addresses)
	pending, hold := "", false
	if unprogrammed == "" {
		pending, hold = c.pending(n, g, s.Versions[n], addresses)
	}
	errs := []error{err}
	if !hold {
		status := f.Status(addresses, cmp.Or(unprogrammed, pending, problemOf(f.GrantsOf(svc.Name{}), taken)))
		if pending != "" {
			status = asPending(status)
		}
		c.certifier.certify(&status, f, g.Generation, len(addresses) > 0)
		errs = append(errs, c.writeGateway(ctx, g, status))
	}
	c.syncSets(ctx, s, f, setsOf{cmp.Or(unprogrammed, pending), hold, len(addresses) > 0, services.have, taken}, &errs)
	return errors.Join(errs...)
}

// whyUnprogrammed returns why a Gateway is not served at its addresses, "" if it is. What is wrong with its Service comes first: that
// is why it lacks addresses.
func whyUnprogrammed(f *gateway.Front, n svc.Name, problem string, addresses []string) string {
	unassigned := ""
	if len(addresses) == 0 {
		unassigned = "its Service " + names.ServiceOfGateway(n).String() + " has no address yet"
	}
	return cmp.Or(problem, f.Unusable(addresses), unassigned)
}

// problemOf returns why the first of some ReferenceGrants cannot have its Service, "" if all have theirs.
func problemOf(grants []svc.Name, taken map[svc.Name]string) (problem string) {
	for _, n := range grants {
		problem = cmp.Or(problem, taken[n])
	}
	return problem
}

func addressesOf(s *corev1.Service) (out []string) {
	if s == nil {
		return nil
	}
	for _, in := range s.Status.LoadBalancer.Ingress {
		if in.IP != "" {
			out = append(out, in.IP)
		}
	}
	return out
}
