package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/election"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/events"
)

// The names of the controllers.
const (
	EndpointsName     = "endpoints"
	EndpointSliceName = "endpointslice"
	MirroringName     = "endpointslicemirroring"
	SchedulerName     = "scheduler"
	NodeLifecycleName = "nodelifecycle"
	NodeIPAMName      = "nodeipam"
	NamespaceName     = "namespace"
	GarbageName       = "garbage"
	ReplicaSetName    = "replicaset"
	DeploymentName    = "deployment"
	DaemonSetName     = "daemonset"
	DisruptionName    = "disruption"
	ProgrammedName    = "programmed"
	TaintEvictionName = "tainteviction"
	ChecksName        = "endpointcheck"
)

// Options are the options of Run.
type Options struct {
	// Config is how to reach the API. Run uses a copy of it, with protobuf and
	// without client-side rate limits.
	Config *rest.Config
	// Controllers are the names of those to run; empty means all.
	Controllers []string
	// Log may be nil.
	Log *slog.Logger
	// LeaderElect makes Run work only while it holds the Lease
	// LeaseNamespace/LeaseName (default kube-system/fairlead-controllers).
	LeaderElect               bool
	LeaseNamespace, LeaseName string
	// Identity is this process in the Lease; see election.Lease.
	Identity string
	// MaxEndpointsPerSlice is 1 to 1000, default 100 (behaviour 28).
	MaxEndpointsPerSlice int
	// ClusterCIDRs are the ranges that nodeipam assigns to Nodes from, at most
	// one per family; NodeMask4 and NodeMask6 are the prefix lengths of a Node's
	// part (default 24 and 64).
	ClusterCIDRs         []netip.Prefix
	NodeMask4, NodeMask6 int
	// NodeGracePeriod is how long after the last renewal of its Lease a Node is
	// unreachable (default 40 s).
	NodeGracePeriod time.Duration
	// PeerWatch lets Nodes be unreachable sooner whose machines do not answer most of the agents
	// that watch them.
	PeerWatch bool
	// refuteWithin is how long a suspected Node has to renew its Lease (default 1.5 s).
	refuteWithin time.Duration
	// UnreachableToleration is how long Pods that a controller replaces stay on an
	// unreachable Node, unless their tolerations tell (default 5 min).
	UnreachableToleration time.Duration
	// PodGCDelay is how long Pods outlive their Node (default 60 s), and
	// TerminatedPodLimit how many finished Pods are kept (default 12500).
	PodGCDelay         time.Duration
	TerminatedPodLimit int
	// Workers of each loop (default 8).
	Workers int
	// Started, if not nil, is called each time the loops have started, and Waiting each time
	// another process is found to lead, in whose place this one may have to start them.
	Started, Waiting func()
	// Version is that of the server, with which those of Nodes' agents are compared.
	Version string
	// Health, if not nil, is kept up to date.
	Health *Health
}

// construct makes a controller: it registers its handlers with s and returns the
// function that runs it until ctx ends.
type construct func(s *controllerContext) (func(ctx context.Context), error)

// Names lists all controllers, in the order Run starts them.
func Names() []string {
	return []string{
		NamespaceName, NodeIPAMName, NodeLifecycleName, SchedulerName,
		EndpointsName, EndpointSliceName, MirroringName, GarbageName,
		ReplicaSetName, DeploymentName, DaemonSetName, DisruptionName, TaintEvictionName,
		ProgrammedName, ChecksName,
	}
}

func constructor(name string) construct {
	switch name {
	case EndpointsName:
		return newEndpoints
	case EndpointSliceName:
		return newEndpointSlices
	case MirroringName:
		return newMirroring
	case SchedulerName:
		return newScheduler
	case NodeLifecycleName:
		return newNodeLifecycle
	case NodeIPAMName:
		return newNodeIPAM
	case NamespaceName:
		return newNamespace
	case GarbageName:
		return newGarbage
	case ReplicaSetName:
		return newReplicaSets
	case DeploymentName:
		return newDeployments
	case DaemonSetName:
		return newDaemonSets
	case DisruptionName:
		return newDisruption
	case ProgrammedName:
		return newProgrammed
	case TaintEvictionName:
		return newTaintEviction
	case ChecksName:
		return newEndpointChecks
	}
	return nil
}

// Run runs controllers until ctx ends, and returns when all of them have
// stopped: nil, or an error for invalid options.
func Run(ctx context.Context, o Options) error {
	if err := o.complete(); err != nil {
		return err
	}
	config := rest.CopyConfig(o.Config)
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.QPS, config.RateLimiter = -1, nil  // the limit is the API server's priority and fairness
	config.DisableCompression = true          // costs more than the bytes it saves
	config.WarningHandler = rest.NoWarnings{} // Endpoints are deprecated, and kept all the same
	if config.UserAgent == "" {
		config.UserAgent = "fairlead-controllers"
	}
	o.Health.observe(config)
	lease := &election.Lease{Namespace: o.LeaseNamespace, Name: o.LeaseName, Identity: o.Identity, Log: o.Log, Waiting: o.Waiting}
	var err error
	if lease.Client, err = kubernetes.NewForConfig(config); o.LeaderElect {
		lease.Fence(config)
	}
	client, err2 := kubernetes.NewForConfig(config)
	if err := errors.Join(err, err2); err != nil {
		return fmt.Errorf("client for the controllers: %w", err)
	}
	work := func(ctx context.Context) error {
		return o.Health.during(ctx, func(ctx context.Context) error { return runControllers(ctx, &o, config, client) })
	}
	if !o.LeaderElect {
		return work(ctx)
	}
	return lease.Run(ctx, work)
}

func (o *Options) complete() error {
	if o.Config == nil {
		return errors.New("controllers: no configuration for the API server")
	}
	if len(o.Controllers) == 0 {
		o.Controllers = Names()
	}
	for i, name := range o.Controllers {
		if constructor(name) == nil {
			return fmt.Errorf("unknown controller %q; want one of %s", name, strings.Join(Names(), ", "))
		}
		if slices.Contains(o.Controllers[:i], name) {
			return fmt.Errorf("controller %q is given more than once", name)
		}
	}
	if o.MaxEndpointsPerSlice == 0 {
		o.MaxEndpointsPerSlice = epslice.DefaultMaxEndpoints
	}
	if o.MaxEndpointsPerSlice < 1 || o.MaxEndpointsPerSlice > epslice.LargestMaxEndpoints {
		return fmt.Errorf("%d endpoints per slice: must be 1 to %d", o.MaxEndpointsPerSlice, epslice.LargestMaxEndpoints)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Health == nil {
		o.Health = new(Health)
	}
	orDefault(&o.LeaseNamespace, "kube-system")
	orDefault(&o.LeaseName, "fairlead-controllers")
	orDefault(&o.NodeMask4, 24)
	orDefault(&o.NodeMask6, 64)
	orDefault(&o.NodeGracePeriod, 40*time.Second)
	orDefault(&o.refuteWithin, refuteWithin)
	orDefault(&o.UnreachableToleration, 5*time.Minute)
	orDefault(&o.PodGCDelay, time.Minute)
	orDefault(&o.TerminatedPodLimit, 12500)
	orDefault(&o.Workers, 8)
	return nil
}

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// controllerContext is what the controllers of one Run have in common. It is built before
// anything runs and not changed after.
type controllerContext struct {
	options   *Options
	log       *slog.Logger
	config    *rest.Config
	client    kubernetes.Interface
	informers informers.SharedInformerFactory
	events    *events.Recorder
	synced    []cache.InformerSynced
	narrow    map[string]informers.SharedInformerFactory // by namespace
	selection *selection                                 // nil until the first use
	slices    *sliceStore                                // nil until the first use
}

func runControllers(ctx context.Context, o *Options, config *rest.Config, client kubernetes.Interface) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	recorder := events.NewRecorder(client, corev1.EventSource{Component: "fairlead-controllers"}, o.Log)
	defer recorder.Start()()
	s := &controllerContext{
		options: o, log: o.Log, config: config, client: client,
		informers: informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(slim)),
		events:    recorder,
		narrow:    map[string]informers.SharedInformerFactory{},
	}
	var running tasks
	for _, name := range o.Controllers {
		run, err := constructor(name)(s)
		if err != nil {
			return fmt.Errorf("controller %s: %w", name, err)
		}
		running.add(run)
	}
	if s.slices != nil {
		running.add(s.slices.run)
	}
	for _, f := range append(slices.Collect(maps.Values(s.narrow)), s.informers) {
		f.StartWithContext(ctx)
		defer f.Shutdown()
	}
	defer cancel()
	if !cache.WaitForCacheSync(ctx.Done(), s.synced...) {
		return nil
	}
	o.Log.Info("controllers started", "controllers", o.Controllers)
	if o.Started != nil {
		o.Started()
	}
	running.run(ctx)
	return nil
}
