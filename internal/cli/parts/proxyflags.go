// Package parts has what several processes are made of: the proxy with its modes, DNS, load
// balancers and the resolver of the machine. Each part has its flags, the check of these, and
// a component that runs it.
package parts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/flows"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/nexthop"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// ProxyFlags set up the proxy; 'proxy', 'agent' and 'up' have them.
type ProxyFlags struct {
	mode, balance string
	variant       string
	forwarding    string
	masqueradeAll bool
	// DetectLocal and PodInterfaces are set only by 'proxy'.
	DetectLocal   string
	PodInterfaces []table.Interface
	// MasqueradeBit is the bit of the packet mark for connections to masquerade; 0 is the default of the mode.
	MasqueradeBit     int
	nodePortAddresses []string
	Healthz, Metrics  string
	auditPeriod       time.Duration
	conntrack         conntrackFlags
	userspace         userspaceFlags
	ipvs              ipvsFlags
	connect           connectFlags
	hubble            hubbleFlags
	flows             *Flows
}

// Add adds the flags to a command.
func (f *ProxyFlags) Add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.mode, "mode", modeAuto, "how packets are brought to endpoints: "+base.OneOf(ModeValues()))
	flags.StringVar(&f.variant, "iptables-variant", "auto", "which iptables the mode of that name uses: auto, nft or legacy")
	flags.StringVar(&f.balance, "balance", "",
		"how an endpoint is chosen: random or roundrobin (default: random, in mode userspace roundrobin)")
	flags.StringVar(&f.forwarding, "forwarding", svc.ForwardingNAT,
		"how packets to external and load balancer addresses reach other nodes' endpoints, for Services without the annotation "+
			svc.ForwardingAnnotation+": nat translates them here; direct, in mode nft, passes them on with the client's address kept")
	flags.BoolVar(&f.masqueradeAll, "masquerade-all", false, "masquerade all traffic to ClusterIPs")
	flags.StringSliceVar(&f.nodePortAddresses, "nodeport-addresses", nil,
		"ranges of this node's addresses that answer on node ports, and the words primary (the Node's InternalIPs), localhost and all "+
			"(default: all but loopback)")
	flags.StringVar(&f.Healthz, "healthz-bind-address", "0.0.0.0:10256",
		"IP:PORT of /healthz and /livez, which load balancers ask; 0.0.0.0 is every address of both families; empty for none")
	flags.StringVar(&f.Metrics, "metrics-bind-address", "127.0.0.1:10249", "IP:PORT of /metrics; empty for none")
	flags.DurationVar(&f.auditPeriod, "sync-period", 30*time.Second, "how often everything is compared with the kernel and repaired")
	f.conntrack.add(flags)
	f.userspace.add(flags)
	f.ipvs.add(flags)
	f.connect.add(flags)
	f.hubble.add(flags)
}

// AddRelay adds the flag of a node whose flows a relay of a Kubernetes cluster asks for; agents answer the API server.
func (f *ProxyFlags) AddRelay(cmd *cobra.Command) { f.hubble.addRelay(cmd.Flags()) }

// Check rejects flags that are wrong on any machine, and completes the others. It
// sends no request.
func (f *ProxyFlags) Check(networks base.NetworkFlags) error {
	if len(candidateModes(f.mode)) == 0 {
		return base.Usagef("--mode is %q; want %s", f.mode, base.Wanted(f.mode, ModeValues()))
	}
	if _, err := iptables.ParseVariant(f.variant); err != nil {
		return base.Usagef("--iptables-variant is %q; want %s", f.variant, base.Wanted(f.variant, Variants()))
	}
	balance, err := dataplane.ParseBalance(f.balance)
	if err != nil {
		return base.Usagef("--balance is %q; want %s", f.balance, base.Wanted(f.balance, Balances()))
	}
	if err := f.connect.check(f.mode, balance); err != nil {
		return err
	}
	switch {
	case !slices.Contains(Forwardings(), f.forwarding):
		return base.Usagef("--forwarding is %q; want %s", f.forwarding, base.Wanted(f.forwarding, Forwardings()))
	case f.allDirect() && f.mode != modeAuto && f.mode != "nft":
		return base.Usagef("--forwarding direct works in mode nft; with --mode %s leave it away", f.mode)
	}
	if _, err := table.ParseNodePortAddresses(f.nodePortAddresses); err != nil {
		return base.AsUsage(err)
	}
	if _, err := table.ParseDetectLocal(f.DetectLocal); err != nil {
		return base.AsUsage(err)
	}
	if f.auditPeriod <= 0 {
		return base.Usagef("--sync-period is %s; want more than 0", f.auditPeriod)
	}
	f.Healthz, f.Metrics = WithPort(f.Healthz, "10256"), WithPort(f.Metrics, "10249")
	for flag, addr := range map[string]string{"healthz-bind-address": f.Healthz, "metrics-bind-address": f.Metrics} {
		if err := base.CheckBind(flag, addr); err != nil {
			return err
		}
	}
	if err := f.hubble.check(); err != nil {
		return err
	}
	if err := f.conntrack.check(); err != nil {
		return err
	}
	if err := f.userspace.check(); err != nil {
		return err
	}
	return f.ipvs.check(networks.ServiceCIDRs)
}

// Forwardings are the values of --forwarding.
func Forwardings() []string { return []string{svc.ForwardingNAT, svc.ForwardingDirect} }

func (f *ProxyFlags) allDirect() bool { return f.forwarding == svc.ForwardingDirect }

// WithPort adds a port to an address without one, as kube-proxy does.
func WithPort(addr, port string) string {
	if ip, err := netip.ParseAddr(addr); err == nil {
		return net.JoinHostPort(ip.String(), port)
	}
	return addr
}

// InitKernel sets the kernel parameters that a proxy sets at its start.
func (f *ProxyFlags) InitKernel(log *slog.Logger) { f.conntrack.apply(log) }

func openConntrack() (proxy.Tracker, error) { return conntrack.Dial() }

// Open probes the mode, sets the parameters of connection tracking, and returns
// the options of a proxy on the given node. The flags are checked.
func (f *ProxyFlags) Open(
	ctx context.Context, log *slog.Logger, client kubernetes.Interface, nodeName string, networks base.NetworkFlags,
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
	mode, connectTime := f.connectTime(mode, setup)
	addrs, err := table.ParseNodePortAddresses(f.nodePortAddresses)
	if err != nil {
		return proxy.Options{}, err
	}
	detectLocal, err := table.ParseDetectLocal(f.DetectLocal)
	if err != nil {
		return proxy.Options{}, err
	}
	if len(socket.UsableFamilies()) == 1 {
		log.Info("this machine has no IPv6, or it is turned off; Services are only served over IPv4")
	}
	if err := f.connect.detach(); err != nil {
		return proxy.Options{}, err
	}
	setup.dropInvalid = f.conntrack.apply(log)
	o := proxy.Options{
		Client: client, NodeName: nodeName, Log: log, Mode: mode.name, FallbackReason: fallbackReason, ConnectTime: connectTime,
		ServiceCIDRs: networks.ServiceCIDRs, ClusterCIDRs: networks.PodCIDRs, DetectLocal: detectLocal,
		PodInterfaces: f.PodInterfaces,
		MasqueradeAll: f.masqueradeAll, NodePortAddresses: addrs,
		Conntrack: openConntrack, PortTaken: socket.Taken,
		WatchAddresses: link.WatchAddresses,
		HealthzAddress: f.Healthz, MetricsAddress: f.Metrics, AuditPeriod: f.auditPeriod,
		AllDirect: f.allDirect(),
	}
	if f.connect.in {
		o.ConnectTimeCgroup = f.connect.cgroup
	}
	if f.flows = f.hubble.open(log, nodeName); f.flows != nil {
		f.flows.loses(mode)
		setup.logLost = f.flows.lost != nil
		o.FollowSlices = f.flows.peers.Slices
	}
	if err = mode.open(setup, &o); err == nil && o.AllDirect {
		warnOfForwarding(log, mode.name, o.Forwards)
	}
	return o, err
}

// warnOfForwarding warns if --forwarding direct has no effect.
func warnOfForwarding(log *slog.Logger, mode string, forwards func() error) {
	err := errors.New("only mode nft passes packets on")
	if forwards != nil {
		err = forwards()
	}
	if err != nil {
		log.Warn("--forwarding direct has no effect", "mode", mode, "err", err)
	}
}

// Flows returns the flows that the proxy of Open records, nil if it records none.
func (f *ProxyFlags) Flows() *Flows { return f.flows }

// ProxyComponent runs a proxy and closes its dataplane; the rules stay in the
// kernel. In a network namespace that is new there is nothing of other modes, which
// an ordinary user may not even list (/proc/net/ip_tables_names belongs to root).
//
// Counts are what the proxy's metrics have too.
func ProxyComponent(o proxy.Options, isNew bool) (part lifecycle.Component, p *proxy.Proxy, counts *flows.Reader, err error) {
	hops := nexthop.New(o.Client, o.NodeName, o.Log, func() { p.PodsChanged() })
	o.NextHops = hops.Get
	if p, err = proxy.New(o); err != nil {
		return part, nil, nil, err
	}
	if counts = flows.NewReader(o.Dataplane, proxy.OwnersOf(p)); counts.CountsConnections() {
		p.Register(flows.NewCollector(counts, o.Log))
	}
	return lifecycle.Component{
		Name: "proxy",
		Run: func(ctx context.Context) error {
			defer o.Dataplane.Close()
			removeTrace(ctx, o.Log)
			// Rules of another mode stay until this one has written its own, so
			// that no connection finds neither.
			done := make(chan struct{})
			watching, stop := context.WithCancel(ctx)
			go func() {
				defer close(done)
				if lifecycle.UntilTrue(watching, func() bool { return p.Table() != nil }) != nil {
					return
				}
				if p.Table().Len() > lifecycle.LargeLoad {
					lifecycle.ReleaseMemory(o.Log)
				}
				if isNew {
					return
				}
				if err := CleanUpModes(watching, o.Mode); err != nil && watching.Err() == nil {
					o.Log.Warn("cannot remove the rules of another mode", "err", err)
				}
				warnOfKubeProxy(watching, o.Log)
			}()
			defer func() {
				stop()
				<-done
			}()
			defer lifecycle.Beside(ctx, hops.Run)()
			defer lifecycle.Beside(ctx, func(ctx context.Context) { lifecycle.ReleaseAtRest(ctx, o.Log) })()
			return p.Run(ctx)
		},
	}, p, counts, nil
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

// programmedTimeout bounds how long a start waits until all Services are
// programmed.
const programmedTimeout = 10 * time.Second

// Programmed returns when Services are programmed, or after programmedTimeout when
// that was tried: one rejected Service must not keep DNS and Pods from starting.
func Programmed(ctx context.Context, log *slog.Logger, status func() proxy.Status) error {
	limited, cancel := context.WithTimeout(ctx, programmedTimeout)
	defer cancel()
	if lifecycle.UntilTrue(limited, func() bool { return status().Programmed }) == nil {
		return nil
	}
	if err := lifecycle.UntilTrue(ctx, func() bool { return status().Applies > 0 }); err != nil {
		return fmt.Errorf("%w: %s", err, status().Message)
	}
	if s := status(); !s.Programmed {
		log.Warn("not all Services are programmed; starting anyway, see 'fairlead status'", "reason", s.Message)
	}
	return nil
}
