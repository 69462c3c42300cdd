package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/node"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/controller"
	"github.com/fairlead/fairlead/internal/election"
	"github.com/fairlead/fairlead/internal/svc"
)

// dropIn are the controllers for endpoints, which 'fairlead controllers' runs unless others are
// named. A Kubernetes control plane has the others itself.
func dropIn() []string {
	return []string{controller.EndpointsName, controller.EndpointSliceName, controller.MirroringName}
}

func addControllerNames(cmd *cobra.Command, names *[]string) {
	cmd.Flags().StringSliceVar(names, "controllers", nil,
		"controllers to run, or only none: "+strings.Join(controller.Names(), ", ")+" (default: all)")
}

// addUnreachableToleration adds the flag of kube-apiserver that is here one of the controllers.
func addUnreachableToleration(cmd *cobra.Command, d *time.Duration) {
	cmd.Flags().Var((*secondsValue)(d), "default-unreachable-toleration-seconds",
		"how long Pods of a ReplicaSet stay on an unreachable node before they are replaced, unless their tolerations set it (default 300)")
}

// secondsValue is a time given as a whole number of seconds.
type secondsValue time.Duration

func (v *secondsValue) String() string {
	if *v == 0 {
		return ""
	}
	return strconv.FormatInt(int64(time.Duration(*v)/time.Second), 10)
}

// Set reads a number of seconds.
func (v *secondsValue) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil || n == 0 {
		return fmt.Errorf("%q is not a number of seconds above 0", s)
	}
	*v = secondsValue(time.Duration(n) * time.Second)
	return nil
}

// Type is the name of the value in usage texts.
func (*secondsValue) Type() string { return "int" }

// checkControllerNames rejects unknown names.
func checkControllerNames(names []string) error {
	for _, n := range names {
		if !slices.Contains(controller.Names(), n) {
			return base.Usagef("--controllers: %q is not one of %s%s", n, strings.Join(controller.Names(), ", "),
				base.DidYouMean(n, "", controller.Names()))
		}
	}
	return nil
}

// addControllersCheck has /readyz of a server fail while its controllers, which lead,
// are cut off, and returns what they report to.
func addControllersCheck(o *apiserver.Options) *controller.Health {
	health := new(controller.Health)
	o.ReadyzChecks = append(o.ReadyzChecks, apiserver.ReadyzCheck{Name: "controllers", Check: health.Check})
	return health
}

func addPeerVerdicts(cmd *cobra.Command, o *controller.Options) {
	cmd.Flags().BoolVar(&o.PeerWatch, "peer-watch", true, "take the endpoints of a node out of service within 5 s when most of the agents "+
		"that watch its machine get no answer; other nodes have the grace period of 40 s")
}

// noControllers reports whether a server runs no controllers.
func noControllers(o controller.Options) bool { return slices.Equal(o.Controllers, []string{"none"}) }

// controllersComponent runs the controllers of a server that o names (none: no component, all
// when there are no names).
func controllersComponent(log *slog.Logger, config func() *rest.Config, o controller.Options) (lifecycle.Component, error) {
	if noControllers(o) {
		return lifecycle.Component{}, nil
	}
	if err := checkControllerNames(o.Controllers); err != nil {
		return lifecycle.Component{}, err
	}
	ready := make(chan struct{})
	o.Log, o.LeaderElect, o.Version = log, true, base.Version
	o.Started = sync.OnceFunc(func() { close(ready) })
	o.Waiting = o.Started // another server's controllers work
	return lifecycle.Component{
		Name: "controllers",
		Run: func(ctx context.Context) error {
			o.Config = config()
			return controller.Run(ctx, o)
		},
		Ready: lifecycle.UntilClosed(ready),
	}, nil
}

// dropInComponents run the controllers, and answer probes at an address unless it is empty. They are ready from when they
// work, or have found another copy that does, and not while the leader is cut off.
func dropInComponents(log *slog.Logger, o controller.Options, address string) []lifecycle.Component {
	var reached atomic.Bool
	o.Health = new(controller.Health)
	o.Started = func() { reached.Store(true) }
	o.Waiting = o.Started
	ready := func() error {
		if !reached.Load() {
			return errors.New("no copy is known to work yet")
		}
		return o.Health.Check()
	}
	components := []lifecycle.Component{{
		Name: "controllers", Run: func(ctx context.Context) error { return controller.Run(ctx, o) },
	}}
	if address != "" {
		components = append(components, lifecycle.OptionalHTTP(log, "probes of the controllers", address, probes(ready)))
	}
	return components
}

// NewControllers returns 'fairlead controllers'.
func NewControllers(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var o controller.Options
	var healthz string
	var masks nodeMasks
	var spans lifecycle.SpanFlags
	networks := node.DefaultNetworks()
	cmd := &cobra.Command{
		Use:   "controllers",
		Short: "Run controllers on any Kubernetes API",
		Long: `Run controllers on any Kubernetes API. Without --controllers these are the ones for
endpoints, in place of those of kube-controller-manager (switch them off there
with --controllers=*,-endpoints-controller,-endpointslice-controller,-endpointslice-mirroring-controller).
Several copies may run; one works at a time.`,
		Example: `  fairlead controllers --kubeconfig /etc/kubernetes/controllers.conf
  fairlead controllers --kubeconfig F --controllers endpointslice --max-endpoints-per-slice 500`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkControllerNames(o.Controllers); err != nil {
				return err
			}
			if len(o.Controllers) == 0 {
				o.Controllers = dropIn()
			}
			if o.MaxEndpointsPerSlice < 1 || o.MaxEndpointsPerSlice > 1000 {
				return base.Usagef("--max-endpoints-per-slice is %d; want 1 to 1000", o.MaxEndpointsPerSlice)
			}
			if err := masks.ranges(&o, networks.PodCIDRs); err != nil && slices.Contains(o.Controllers, controller.NodeIPAMName) {
				return err
			}
			if err := o.Election.Check(); err != nil {
				return base.Usagef("--leader-elect-%w", err)
			}
			if err := errors.Join(base.CheckBind("healthz-bind-address", healthz), spans.Check()); err != nil {
				return err
			}
			if spans.Asked() && !slices.Contains(o.Controllers, controller.ProgrammedName) {
				return base.Usagef("--otlp-endpoint: only the controller %s sends spans; add it to --controllers", controller.ProgrammedName)
			}
			log, err := g.Logger()
			if err != nil {
				return err
			}
			if o.Config, _, err = f.Load(); err != nil {
				return err
			}
			defer lifecycle.Beside(cmd.Context(), func(ctx context.Context) { parts.WarnOfInlineCertificate(ctx, log, o.Config) })()
			traces, components, err := spans.Open(log, "controllers", base.Hostname())
			if err != nil {
				return err
			}
			o.Log, o.Traces = log, traces
			components = append(components, dropInComponents(log, o, healthz)...)
			return lifecycle.RunAll(cmd.Context(), log, func() {}, components...)
		},
	}
	f.Add(cmd)
	flags := cmd.Flags()
	flags.StringSliceVar(&o.Controllers, "controllers", nil, fmt.Sprintf("controllers to run: %s (default: %s)",
		strings.Join(controller.Names(), ", "), strings.Join(dropIn(), ", ")))
	flags.IntVar(&o.MaxEndpointsPerSlice, "max-endpoints-per-slice", 100, "most endpoints in one EndpointSlice, 1 to 1000")
	addPeerVerdicts(cmd, &o)
	addUnreachableToleration(cmd, &o.UnreachableToleration)
	flags.BoolVar(&o.LeaderElect, "leader-elect", true, "work only while holding the Lease, so that several copies may run")
	flags.StringVar(&o.LeaseNamespace, "leader-elect-resource-namespace", "kube-system", "namespace of the Lease")
	flags.StringVar(&o.LeaseName, "leader-elect-resource-name", svc.Controllers, "name of the Lease")
	times := election.DefaultTimes()
	flags.DurationVar(&o.Election.Lease, "leader-elect-lease-duration", times.Lease,
		"how long other copies wait after they have seen the Lease renewed before they take it, in whole seconds")
	flags.DurationVar(&o.Election.Deadline, "leader-elect-renew-deadline", times.Deadline,
		"how long after its last renewal the copy that holds the Lease works; less than the duration")
	flags.DurationVar(&o.Election.Retry, "leader-elect-retry-period", times.Retry, "time between two renewals")
	flags.StringVar(&healthz, "healthz-bind-address", "", "IP:PORT of /livez, /readyz and /metrics; empty for none")
	networks.AddPodNetworks(cmd, "ranges that nodeipam gives out to nodes")
	masks.add(flags)
	spans.Add(cmd)
	return cmd
}
