package cli

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/table"
)

// proxyFlags set up the proxy; 'proxy', 'agent' and 'up' have them.
type proxyFlags struct {
	mode, balance     string
	variant           string
	masqueradeAll     bool
	detectLocal       string // of 'proxy' alone
	nodePortAddresses []string
	healthz, metrics  string
	auditPeriod       time.Duration
	conntrack         conntrackFlags
	userspace         userspaceFlags
	ipvs              ipvsFlags
}

func (f *proxyFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.mode, "mode", modeAuto, "how packets are brought to endpoints: "+oneOf(modeValues()))
	flags.StringVar(&f.variant, "iptables-variant", "auto", "which iptables the mode of that name uses: auto, nft or legacy")
	flags.StringVar(&f.balance, "balance", "",
		"how an endpoint is chosen: random or roundrobin (default: random, in mode userspace roundrobin)")
	flags.BoolVar(&f.masqueradeAll, "masquerade-all", false, "masquerade all traffic to ClusterIPs")
	flags.StringSliceVar(&f.nodePortAddresses, "nodeport-addresses", nil,
		"ranges of this node's addresses that answer on node ports, or primary (default: all but loopback)")
	flags.StringVar(&f.healthz, "healthz-bind-address", "0.0.0.0:10256",
		"IP:PORT of /healthz and /livez, which load balancers ask; 0.0.0.0 is every address of both families; empty for none")
	flags.StringVar(&f.metrics, "metrics-bind-address", "127.0.0.1:10249", "IP:PORT of /metrics; empty for none")
	flags.DurationVar(&f.auditPeriod, "sync-period", 30*time.Second, "how often everything is compared with the kernel and repaired")
	f.conntrack.add(flags)
	f.userspace.add(flags)
	f.ipvs.add(flags)
}

// check rejects flags that are wrong on any machine, and completes the others. It
// sends no request.
func (f *proxyFlags) check(networks networkFlags) error {
	if len(candidateModes(f.mode)) == 0 {
		return usagef("--mode is %q; want %s", f.mode, wanted(f.mode, modeValues()))
	}
	if _, err := iptables.ParseVariant(f.variant); err != nil {
		return usagef("--iptables-variant is %q; want %s", f.variant, wanted(f.variant, variants()))
	}
	if _, err := dataplane.ParseBalance(f.balance); err != nil {
		return usagef("--balance is %q; want %s", f.balance, wanted(f.balance, balances()))
	}
	if _, err := table.ParseNodePortAddresses(f.nodePortAddresses); err != nil {
		return usageError{err}
	}
	if _, err := table.ParseDetectLocal(f.detectLocal); err != nil {
		return usageError{err}
	}
	if f.auditPeriod <= 0 {
		return usagef("--sync-period is %s; want more than 0", f.auditPeriod)
	}
	f.healthz, f.metrics = withPort(f.healthz, "10256"), withPort(f.metrics, "10249")
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
	return f.ipvs.check(networks.serviceCIDRs)
}

// withPort adds a port to an address without one, as kube-proxy does.
func withPort(addr, port string) string {
	if ip, err := netip.ParseAddr(addr); err == nil {
		return net.JoinHostPort(ip.String(), port)
	}
	return addr
}

// checkBind rejects what is not an address to listen on, empty for none.
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

func openConntrack() (proxy.Tracker, error) { return conntrack.Dial() }

// open probes the mode, sets the parameters of connection tracking, and returns
// the options of a proxy on the given node. The flags are checked.
func (f *proxyFlags) open(
	ctx context.Context, log *slog.Logger, client kubernetes.Interface, nodeName string, networks networkFlags,
) (proxy.Options, error) {
	balance, err := dataplane.ParseBalance(f.balance)
	if err != nil {
		return proxy.Options{}, err
	}
	setup := &modeSetup{flags: f, networks: networks, balance: balance, log: log}
	mode, fallbackReason, err := f.chooseMode(ctx, setup)
	if err != nil {
		return proxy.Options{}, err
	}
	addrs, err := table.ParseNodePortAddresses(f.nodePortAddresses)
	if err != nil {
		return proxy.Options{}, err
	}
	detectLocal, err := table.ParseDetectLocal(f.detectLocal)
	if err != nil {
		return proxy.Options{}, err
	}
	if len(socket.UsableFamilies()) == 1 {
		log.Info("this machine has no IPv6, or it is turned off; Services are served over IPv4 alone")
	}
	setup.dropInvalid = f.conntrack.apply(log)
	o := proxy.Options{
		Client: client, NodeName: nodeName, Log: log, Mode: mode.name, FallbackReason: fallbackReason,
		ServiceCIDRs: networks.serviceCIDRs, ClusterCIDRs: networks.podCIDRs, DetectLocal: detectLocal,
		MasqueradeAll: f.masqueradeAll, NodePortAddresses: addrs,
		Conntrack: openConntrack, PortTaken: socket.Taken,
		WatchAddresses: link.WatchAddresses,
		HealthzAddress: f.healthz, MetricsAddress: f.metrics, AuditPeriod: f.auditPeriod,
	}
	err = mode.open(setup, &o)
	return o, err
}

func newProxy(g *global) *cobra.Command {
	var f proxyFlags
	var c clientFlags
	var networks networkFlags
	var nodeName string
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Run the node proxy on any Kubernetes API, in place of kube-proxy",
		Example: `  fairlead proxy --kubeconfig /etc/kubernetes/proxy.conf --node-name node1
  fairlead proxy --kubeconfig F --cluster-cidr 10.244.0.0/16 --nodeport-addresses 192.0.2.0/24`,
		Args: noArgs,
		PreRunE: func(*cobra.Command, []string) error {
			if err := checkNodeName(nodeName); err != nil {
				return err
			}
			return f.check(networks)
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := g.logger()
			if err != nil {
				return err
			}
			cfg, _, err := c.load()
			if err != nil {
				return err
			}
			defer beside(cmd.Context(), func(ctx context.Context) { warnOfInlineCertificate(ctx, log, cfg) })()
			var reached dialed
			reached.record(cfg)
			client, err := kubernetes.NewForConfig(cfg)
			if err != nil {
				return err
			}
			lock, err := proxyLock.wait(cmd.Context(), log)
			if err != nil {
				return err
			}
			defer lock.Close()
			opts, err := f.open(cmd.Context(), log, client, nodeName, networks)
			if err != nil {
				return err
			}
			opts.Servers = reached.servers
			keepHeapSmall()
			opts.Progress = barrier.NewProgress(barrier.ProxyServices, barrier.ProxySlices)
			part, p, err := proxyComponent(opts, false)
			if err != nil {
				return err
			}
			reporter := &barrier.Reporter{
				Client: client, NodeName: nodeName, Progress: opts.Progress, Log: log, Node: p.Node, Own: true,
			}
			return runAll(cmd.Context(), log, func() {}, part, component{name: "report of what is programmed", run: reporter.Run})
		},
	}
	c.add(cmd)
	f.add(cmd)
	networks.addNetworks(cmd,
		"ranges of ClusterIPs, in which what is sent to an address of no Service is dropped; used where the API has no ServiceCIDRs",
		"ranges of the Pods' addresses: traffic to a ClusterIP from outside of them is masqueraded")
	cmd.Flags().StringVar(&f.detectLocal, "detect-local-mode", "",
		"how Pods of this node are told from other clients, by --cluster-cidr alone (ClusterCIDR) or by the Node's podCIDRs alone (NodeCIDR)\n"+
			"(default: by the Node's podCIDRs, or --cluster-cidr without any)")
	cmd.Flags().StringVar(&nodeName, "node-name", hostname(), "name of this machine's Node object")
	return cmd
}

// proxyComponent runs a proxy and closes its dataplane; the rules stay in the
// kernel. In a network namespace that is new there is nothing of other modes, which
// an ordinary user may not even list (/proc/net/ip_tables_names belongs to root).
func proxyComponent(o proxy.Options, isNew bool) (component, *proxy.Proxy, error) {
	p, err := proxy.New(o)
	if err != nil {
		return component{}, nil, err
	}
	return component{
		name: "proxy",
		run: func(ctx context.Context) error {
			defer o.Dataplane.Close()
			// Rules of another mode stay until this one has written its own, so
			// that no connection finds neither.
			done := make(chan struct{})
			watching, stop := context.WithCancel(ctx)
			go func() {
				defer close(done)
				if untilTrue(watching, func() bool { return p.Table() != nil }) != nil {
					return
				}
				if p.Table().Len() > largeLoad {
					releaseMemory(o.Log)
				}
				if isNew {
					return
				}
				if err := cleanUpModes(watching, o.Mode); err != nil && watching.Err() == nil {
					o.Log.Warn("cannot remove the rules of another mode", "err", err)
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

// warnOfKubeProxy warns if a kube-proxy's rules are on this node: they translate
// the same packets, and the first to do so wins.
func warnOfKubeProxy(ctx context.Context, log *slog.Logger) {
	left, err := kubeproxy.Find(ctx)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		log.Debug("cannot look for rules of kube-proxy", "err", err)
	case len(left) > 0:
		log.Warn("rules of kube-proxy are on this node, too: stop it, then run 'fairlead cleanup --kube-proxy'", "rules", left)
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
