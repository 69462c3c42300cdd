package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/ipvs"
	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/dataplane/userspace"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/table"
)

// proxyFlags set up the proxy; 'proxy', 'agent' and 'up' have them.
type proxyFlags struct {
	mode, balance     string
	variant           string
	clusterCIDRs      prefixesValue
	serviceCIDRs      prefixesValue
	masqueradeAll     bool
	nodePortAddresses []string
	healthz, metrics  string
	auditPeriod       time.Duration
	conntrack         conntrackFlags
	userspace         userspaceFlags
	ipvs              ipvsFlags
}

func (f *proxyFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.mode, "mode", "auto", "how packets are brought to endpoints: auto, nft, iptables, ipvs or userspace")
	flags.StringVar(&f.variant, "iptables-variant", "auto", "which iptables the mode of that name uses: auto, nft or legacy")
	flags.StringVar(&f.balance, "balance", "", "how an endpoint is chosen: random or roundrobin (default: random, in mode userspace roundrobin)")
	flags.BoolVar(&f.masqueradeAll, "masquerade-all", false, "masquerade all traffic to ClusterIPs")
	flags.StringSliceVar(&f.nodePortAddresses, "nodeport-addresses", nil, "ranges of this node's addresses that answer on node ports, or primary (default: all but loopback)")
	flags.StringVar(&f.healthz, "healthz-bind-address", "127.0.0.1:10256", "IP:PORT of /healthz and /livez; empty for none")
	flags.StringVar(&f.metrics, "metrics-bind-address", "127.0.0.1:10249", "IP:PORT of /metrics; empty for none")
	flags.DurationVar(&f.auditPeriod, "sync-period", 30*time.Second, "how often everything is compared with the kernel and repaired")
	f.conntrack.add(flags)
	f.userspace.add(flags)
	f.ipvs.add(flags)
}

// proxyModes are the values of --mode.
var proxyModes = []string{"auto", "nft", "iptables", "ipvs", "userspace"}

// check refuses flags that are wrong on any machine, before anything is changed
// or asked of an API server.
func (f *proxyFlags) check() error {
	if !slices.Contains(proxyModes, f.mode) {
		return usagef("--mode is %q; want %s", f.mode, strings.Join(proxyModes, ", "))
	}
	if _, err := iptables.ParseVariant(f.variant); err != nil {
		return usagef("--iptables-variant is %q; want auto, nft or legacy", f.variant)
	}
	if _, err := dataplane.ParseBalance(f.balance); err != nil {
		return usagef("--balance is %q; want random or roundrobin", f.balance)
	}
	if _, err := table.ParseNodePortAddresses(f.nodePortAddresses); err != nil {
		return usageError{err}
	}
	if f.auditPeriod <= 0 {
		return usagef("--sync-period is %s; want more than 0", f.auditPeriod)
	}
	for flag, addr := range map[string]string{"healthz-bind-address": f.healthz, "metrics-bind-address": f.metrics} {
		if err := checkBind(flag, addr); err != nil {
			return err
		}
	}
	if err := f.conntrack.check(); err != nil {
		return err
	}
	if err := f.userspace.check(); err != nil {
		return err
	}
	return f.ipvs.check(f.serviceCIDRs)
}

// checkBind refuses what is not an address to listen on, empty for none.
func checkBind(flag, addr string) error {
	if addr == "" {
		return nil
	}
	if _, port, err := net.SplitHostPort(addr); err == nil {
		if _, err := strconv.ParseUint(port, 10, 16); err == nil {
			return nil
		}
	}
	return usagef("--%s is %q; want IP:PORT, or nothing for none", flag, addr)
}

// options checks the flags and makes the options of a proxy on the given node.
func (f *proxyFlags) options(log *slog.Logger, client kubernetes.Interface, nodeName string) (proxy.Options, error) {
	if err := f.check(); err != nil {
		return proxy.Options{}, err
	}
	addrs, err := table.ParseNodePortAddresses(f.nodePortAddresses)
	if err != nil {
		return proxy.Options{}, err
	}
	dropInvalid := f.conntrack.set(log)
	o := proxy.Options{
		Client: client, NodeName: nodeName, Log: log,
		ClusterCIDRs: f.clusterCIDRs, MasqueradeAll: f.masqueradeAll, NodePortAddresses: addrs,
		ServiceCIDRs: f.serviceCIDRs,
		Conntrack:    conntrack.Delete, SweepConntrack: conntrack.Sweep, PortTaken: socket.Taken,
		HealthzAddress: f.healthz, MetricsAddress: f.metrics, AuditPeriod: f.auditPeriod,
	}
	mode := f.mode
	if mode == "ipvs" {
		if mode, err = f.ipvs.options(log, f.variant, &o); err != nil {
			return proxy.Options{}, err
		}
		if o.Dataplane != nil {
			warnOfLoopback(log, f.nodePortAddresses)
		}
	}
	if o.Dataplane == nil {
		o.Dataplane, o.Mode, err = f.plane(log, mode, dropInvalid)
		if err != nil && o.FallbackReason != "" {
			err = fmt.Errorf("%s; but %w", o.FallbackReason, err)
		}
	}
	return o, err
}

// plane makes the plane of a mode other than ipvs, of checked flags. For auto it takes the first mode that this
// kernel can do, and logs why.
func (f *proxyFlags) plane(log *slog.Logger, mode string, dropInvalid bool) (dataplane.Applier, string, error) {
	if mode == "auto" {
		mode = "nft"
		if err := nft.Probe(); err != nil {
			mode = "iptables"
			log.Warn("proxy mode iptables is taken, since nft does not work here", "err", err)
		}
	}
	balance, err := dataplane.ParseBalance(f.balance)
	if err != nil {
		return nil, "", err
	}
	switch mode {
	case "nft":
		if err := nft.Probe(); err != nil {
			return nil, "", fmt.Errorf("mode nft cannot work here: %w", err)
		}
		p, err := nft.New(nft.Config{Balance: balance, ServiceCIDRs: f.serviceCIDRs, DropInvalid: dropInvalid})
		return p, mode, err
	case "iptables":
		variant, err := iptables.ParseVariant(f.variant)
		if err != nil {
			return nil, "", err
		}
		ctx, cancel := context.WithTimeout(context.Background(), probeWithin)
		defer cancel()
		variant, why, err := iptables.ProbeVariant(ctx, variant)
		if err != nil {
			return nil, "", err
		}
		log.Info("iptables variant chosen", "variant", variant, "because", why)
		p, err := iptables.New(iptables.Config{Variant: variant, Balance: balance, ServiceCIDRs: f.serviceCIDRs, DropInvalid: dropInvalid, Log: log})
		return p, mode, err
	default:
		// Without a word about balance it chooses endpoints in turn (behaviour 39).
		p, err := f.userspace.plane(log, f.balance != "" && balance == dataplane.Random, f.serviceCIDRs)
		return p, "userspace", err
	}
}

// probeWithin bounds the trial of a mode.
const probeWithin = 30 * time.Second

// cleanUpModes removes what the modes other than keep wrote to the kernel; with
// keep empty, what every mode wrote.
func cleanUpModes(ctx context.Context, keep string) error {
	var errs []error
	for mode, cleanUp := range map[string]func(context.Context) error{"nft": nft.Cleanup, "iptables": iptables.Cleanup, "ipvs": ipvs.Cleanup, "userspace": userspace.Cleanup} {
		if mode != keep {
			errs = append(errs, wrap("proxy rules of mode "+mode, cleanUp(ctx)))
		}
	}
	return errors.Join(errs...)
}

func newProxy(g *global) *cobra.Command {
	var f proxyFlags
	var c clientFlags
	var nodeName string
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Run the node proxy on any Kubernetes API, in place of kube-proxy",
		Example: `  fairlead proxy --kubeconfig /etc/kubernetes/proxy.conf --node-name node1
  fairlead proxy --kubeconfig F --cluster-cidr 10.244.0.0/16 --nodeport-addresses 192.0.2.0/24`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := g.logger()
			if err != nil {
				return err
			}
			if err := f.check(); err != nil {
				return err
			}
			client, _, err := c.client()
			if err != nil {
				return err
			}
			opts, err := f.options(log, client, nodeName)
			if err != nil {
				return err
			}
			keepHeapSmall()
			part, _, err := proxyComponent(opts)
			if err != nil {
				return err
			}
			return runAll(cmd.Context(), log, func() {}, part)
		},
	}
	c.add(cmd)
	f.add(cmd)
	cmd.Flags().Var(&f.clusterCIDRs, "cluster-cidr", "ranges of the Pods' addresses: traffic to a ClusterIP from outside of them is masqueraded")
	cmd.Flags().Var(&f.serviceCIDRs, "service-cluster-ip-range", "ranges of ClusterIPs: what is sent to an address there that no Service has is dropped (default: it goes its way)")
	cmd.Flags().StringVar(&nodeName, "node-name", hostname(), "name of this machine's Node object")
	return cmd
}

// proxyComponent runs a proxy and closes its plane; the rules stay in the
// kernel.
func proxyComponent(o proxy.Options) (component, *proxy.Proxy, error) {
	p, err := proxy.New(o)
	if err != nil {
		return component{}, nil, err
	}
	return component{
		name: "proxy",
		run: func(ctx context.Context) error {
			defer o.Dataplane.Close()
			// What an earlier run left in another mode goes once this one has
			// taken over, so that no connection meets neither.
			done := make(chan struct{})
			watching, stop := context.WithCancel(ctx)
			go func() {
				defer close(done)
				if untilTrue(watching, func() bool { return p.Table() != nil }) != nil {
					return
				}
				if err := cleanUpModes(watching, o.Mode); err != nil && watching.Err() == nil {
					o.Log.Warn("what another mode left could not be removed", "err", err)
				}
				warnOfKubeProxy(watching, o.Log)
			}()
			defer func() {
				stop()
				<-done
			}()
			return p.Run(ctx)
		},
	}, p, nil
}

// warnOfKubeProxy says if a kube-proxy's rules are on this node: they answer the
// same packets, and the first to do so wins.
func warnOfKubeProxy(ctx context.Context, log *slog.Logger) {
	left, err := kubeproxy.Find(ctx)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		log.Debug("looking for rules of kube-proxy failed", "err", err)
	case len(left) > 0:
		log.Warn("rules of kube-proxy are on this node and answer, too: stop it, then run 'fairlead cleanup --kube-proxy'", "left", left)
	}
}

// hostname is the default of --node-name: the machine's name in lower case, as
// node names are.
func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return strings.ToLower(name)
}
