package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/nodes"
	"github.com/fairlead/fairlead/internal/election"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/tracing"
)

// Options are the options of Run.
type Options struct {
	// Config is how to reach the API. Run uses a copy of it, with protobuf and
	// without client-side rate limits.
	Config *rest.Config
	// Controllers are the controllers to run; empty means all.
	Controllers []string
	// Log may be nil.
	Log *slog.Logger
	// LeaderElect makes Run work only while it holds the Lease
	// LeaseNamespace/LeaseName (default kube-system/fairlead-controllers).
	LeaderElect               bool
	LeaseNamespace, LeaseName string
	// Election has the times of the Lease (default election.DefaultTimes).
	Election election.Times
	// Identity is this process in the Lease; see election.Lease.
	Identity string
	// MaxEndpointsPerSlice is 1 to 1000, default 100 (behaviour 28).
	MaxEndpointsPerSlice int
	// ClusterCIDRs are the ranges that nodeipam assigns to Nodes from, at most
	// one per family; NodeMask4 and NodeMask6 are the prefix lengths of a Node's
	// part (default DefaultNodeMask4 and DefaultNodeMask6).
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
	// Version is the server's, with which the versions of agents are compared.
	Version string
	// Traces sends spans; nil for none.
	Traces *tracing.Tracer
	// Health, if not nil, is kept up to date.
	Health *Health
}

// DefaultNodeMask4 and DefaultNodeMask6 are the prefix lengths of a Node's part of the pod ranges, kube-controller-manager's.
const (
	DefaultNodeMask4 = 24
	DefaultNodeMask6 = 64
)

// DefaultClusterCIDRs are the pod ranges of a cluster that names none.
func DefaultClusterCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")}
}

// Run runs controllers until ctx ends, and returns when all of them have
// stopped: nil, or an error for invalid options.
func Run(ctx context.Context, o Options) error {
	if err := o.complete(); err != nil {
		return err
	}
	config := apiclient.Protobuf(apiclient.Tuned(o.Config, svc.Controllers))
	config.DisableCompression = true          // costs more than the bytes it saves
	config.WarningHandler = rest.NoWarnings{} // the API warns that Endpoints are deprecated
	o.Health.observe(config)
	lease := &election.Lease{
		Namespace: o.LeaseNamespace, Name: o.LeaseName, Identity: o.Identity, Log: o.Log, Times: o.Election, Waiting: o.Waiting,
	}
	var err error
	lease.Client, err = kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("client for the controllers: %w", err)
	}
	if o.LeaderElect {
		lease.Fence(config) // the Lease's own client, made before, is not fenced
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
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

// runControllers builds the controllers that o names and runs them until ctx ends.
func runControllers(ctx context.Context, o *Options, config *rest.Config, client kubernetes.Interface) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	recorder := events.NewRecorder(client, corev1.EventSource{Component: svc.Controllers}, o.Log)
	defer recorder.Start()()
	k := kit.New(o.Log, client, recorder, o.Workers)
	k.Traces = o.Traces
	tasks, err := build(k, o, config)
	if err != nil {
		return err
	}
	stop, synced := k.Start(ctx)
	defer stop()
	defer cancel() // before stop
	if !synced {
		return nil
	}
	o.Log.Info("controllers started", "controllers", o.Controllers)
	if o.Started != nil {
		o.Started()
	}
	kit.Together(tasks...)(ctx)
	return nil
}

func (o *Options) complete() error {
	if o.Config == nil {
		return errors.New("controllers: no configuration for the API server")
	}
	if err := o.completeControllers(); err != nil {
		return err
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
	if len(o.ClusterCIDRs) == 0 {
		o.ClusterCIDRs = DefaultClusterCIDRs()
	}
	orDefault(&o.LeaseNamespace, svc.SystemNamespace)
	orDefault(&o.LeaseName, svc.Controllers)
	orDefault(&o.NodeMask4, DefaultNodeMask4)
	orDefault(&o.NodeMask6, DefaultNodeMask6)
	orDefault(&o.NodeGracePeriod, 40*time.Second)
	orDefault(&o.UnreachableToleration, 5*time.Minute)
	orDefault(&o.PodGCDelay, time.Minute)
	orDefault(&o.TerminatedPodLimit, 12500)
	orDefault(&o.Workers, 8)
	return nil
}

// CheckRanges returns an error if ClusterCIDRs cannot be divided by NodeMask4 and NodeMask6.
func (o *Options) CheckRanges() error { return o.ipam().Check() }

func (o *Options) ipam() nodes.IPAMOptions {
	return nodes.IPAMOptions{ClusterCIDRs: o.ClusterCIDRs, Mask4: o.NodeMask4, Mask6: o.NodeMask6}
}

func (o *Options) completeControllers() error {
	if len(o.Controllers) == 0 {
		o.Controllers = Names()
	}
	for i, name := range o.Controllers {
		if !slices.Contains(Names(), name) {
			return fmt.Errorf("unknown controller %q; want one of %s", name, strings.Join(Names(), ", "))
		}
		if slices.Contains(o.Controllers[:i], name) {
			return fmt.Errorf("controller %q is given more than once", name)
		}
	}
	return nil
}

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}
