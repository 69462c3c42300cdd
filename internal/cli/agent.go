package cli

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/agent"
	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/dns"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/servers"
	"github.com/fairlead/fairlead/internal/svc"
)

// agentFlags set up a node; 'agent' and 'up' have them.
type agentFlags struct {
	proxyFlags
	dnsFlags
	networkFlags
	lb                 lbFlags
	nodeName           string
	nodeIPs            addrsValue
	agentPort, dnsPort uint16
	stopPods           bool
	nodeLocalDNS       bool
	peerWatch          bool
	dnsMetrics         string
	configureResolver  bool
	stateDir           string
	podUIDs            string
	podPIDs            int64
	podNetwork         string
	vxlanVNI           uint32
	vxlanPort          uint16
	encrypt            bool
	wireguardPort      uint16
	drainWait          time.Duration
	// approvalTimeout is how long a machine with a token that needs approval waits for it.
	approvalTimeout time.Duration
	servicesDir     string
	// balancer chooses among the servers; nil for the one of the configuration.
	balancer *servers.Balancer
	// registrar registers the programs of servicesDir and shows the Pods of manifestDir, nil
	// for the node itself.
	registrar   *rest.Config
	manifestDir string
	// early starts static Pods before the proxy, which needs the API server.
	early bool
	// certChanged, which may be nil, holds a token when the node's certificate or its authorities may have changed.
	certChanged <-chan struct{}
	// newNamespace is set in a network namespace that this process was started in.
	newNamespace bool
}

func (f *agentFlags) add(cmd *cobra.Command) {
	f.proxyFlags.add(cmd)
	f.dnsFlags.add(cmd)
	f.lb.add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&f.nodeName, "node-name", hostname(), "name of this node")
	flags.Var(&f.nodeIPs, "node-ip", "addresses of this node, at most one of each family (default: those by which it reaches the server)")
	flags.Uint16Var(&f.agentPort, "agent-port", 10250, "port on the node's address where the API server asks for logs and exec")
	flags.BoolVar(&f.nodeLocalDNS, "node-local-dns", true,
		"answer questions to the Service kube-dns on this node itself, without connection tracking; "+
			"other nodes' servers stand in when it is down")
	flags.BoolVar(&f.peerWatch, "peer-watch", true, "watch the machines of up to three other nodes, and be watched by as many: "+
		"endpoints of a dead machine leave within 5 s")
	flags.StringVar(&f.podUIDs, "pod-uid-range", runner.DefaultUIDRange.String(),
		"unused users and groups of this machine, FIRST-LAST: 65,536 for each namespace with Pods that are not allowed "+
			"to be privileged")
	flags.Int64Var(&f.podPIDs, "pod-max-pids", runner.DefaultPodPIDs, "processes and threads of each Pod that is not allowed to be privileged")
	flags.StringVar(&f.podNetwork, "pod-network", string(runner.PodNetworkAuto),
		"how Pods of other nodes are reached, the same on every node: auto (neighbours directly, "+
			"other nodes by VXLAN), hostgw, vxlan, or none to leave it to the network")
	flags.Uint32Var(&f.vxlanVNI, "vxlan-vni", 2500, "number of the virtual network of VXLAN, the same on every node")
	flags.Uint16Var(&f.vxlanPort, "vxlan-port", 4789, "UDP port of VXLAN, the same on every node")
	flags.BoolVar(&f.encrypt, "encrypt", false,
		"encrypt what goes to Pods of other nodes by WireGuard, whatever --pod-network is, the same on every node; "+
			"nothing is sent to Pods of a node that has no key")
	flags.Uint16Var(&f.wireguardPort, "wireguard-port", 51820, "UDP port of WireGuard, the same on every node")
	flags.DurationVar(&f.drainWait, "drain-wait", time.Second,
		"how long a Pod that is being deleted is left alone at most until no node sends it new connections; 0 for not at all")
	flags.StringVar(&f.manifestDir, "pod-manifest-dir", defaultManifestDir,
		"directory of files of static Pods, which run without the API server; it must belong to root; empty for none")
	flags.StringVar(&f.servicesDir, "services-dir", defaultServicesDir(),
		"directory whose files *.yaml describe programs of this machine to register (docs/registered.md); empty for none")
	addConfigureResolver(cmd, &f.configureResolver)
	flags.StringVar(&f.dnsMetrics, "dns-metrics-bind-address", "127.0.0.1:9153",
		"IP:PORT of /metrics, /ready and /health of the DNS server; empty for none")
	flags.Uint16Var(&f.dnsPort, "dns-port", 10053, "port on the node's address where DNS answers; the Service kube-dns leads to it")
}

// check rejects flags that cannot work. It changes nothing and sends no request.
func (f *agentFlags) check() error {
	if err := checkNodeName(f.nodeName); err != nil {
		return err
	}
	if errs := validation.IsValidLabelValue(f.nodeName); len(errs) > 0 {
		return usagef("--node-name %q cannot be the label kubernetes.io/hostname: %s", f.nodeName, errs[0])
	}
	if f.agentPort == 0 || f.dnsPort == 0 {
		return usagef("--agent-port and --dns-port must be 1 to 65535: others have to know them")
	}
	if !slices.Contains(runner.PodNetworks(), f.podNetwork) {
		return usagef("--pod-network %q: want %s", f.podNetwork, oneOf(runner.PodNetworks()))
	}
	if f.vxlanVNI == 0 || f.vxlanVNI >= 1<<24 || f.vxlanPort == 0 || f.wireguardPort == 0 {
		return usagef("--vxlan-vni must be 1 to 16777215, --vxlan-port and --wireguard-port 1 to 65535: others have to know them")
	}
	if f.drainWait < 0 {
		return usagef("--drain-wait is %s; want 0 or more", f.drainWait)
	}
	if _, err := runner.ParseUIDRange(f.podUIDs); err != nil {
		return usagef("--pod-uid-range: %v", err)
	}
	families := map[bool]netip.Addr{}
	for _, a := range f.nodeIPs {
		if o, taken := families[a.Is4()]; taken {
			return usagef("--node-ip: %s and %s are of one family; give at most one of each", o, a)
		}
		if a.IsLoopback() || a.IsUnspecified() {
			return usagef("--node-ip: %s cannot be reached by others", a)
		}
		families[a.Is4()] = a
	}
	if _, err := f.dnsFlags.options(f.networkFlags); err != nil {
		return err
	}
	if err := f.lb.check(f.networkFlags); err != nil {
		return err
	}
	if err := checkBind("dns-metrics-bind-address", f.dnsMetrics); err != nil {
		return err
	}
	return f.proxyFlags.check(f.networkFlags)
}

// node is a node of the API: its components in the order to start them.
type node struct {
	components []component
	dns        *dns.Server
}

func (n *node) dnsAddresses() string {
	var out []string
	for _, addr := range n.dns.Addrs() {
		out = append(out, addr.String())
	}
	return strings.Join(out, ", ")
}

// stateLayout is the version of the layout of an agent's state: records of Pods, and the last known state of the API. It
// grows when an older fairlead could not read what this one writes.
const stateLayout = 1

// makeState makes the state directory, and rejects that of a newer fairlead.
func (f *agentFlags) makeState() error {
	if err := os.MkdirAll(f.stateDir, 0o700); err != nil {
		return fmt.Errorf("the node's state directory: %w; choose another with --data-dir", err)
	}
	return fileio.CheckLayout(f.stateDir, stateLayout)
}

// open makes the state directory, opens the port for logs and exec, prepares the
// kernel for the proxy, and returns a node of the API behind cfg.
func (f *agentFlags) open(ctx context.Context, log *slog.Logger, cfg *rest.Config) (*node, error) {
	cfg = agentConfig(cfg)
	var reached dialed
	reached.record(cfg)
	shared, err := oneTransport(cfg)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(shared)
	if err != nil {
		return nil, err
	}
	if err := f.makeState(); err != nil {
		return nil, err
	}
	var p *proxy.Proxy
	hold := make(chan struct{})
	if !f.early {
		close(hold)
	}
	peers := agent.NewPeers(f.nodeName, log)
	checks := agent.NewChecks(client, f.nodeName, log)
	pods, err := f.runner(log, client, cfg, func() *proxy.Proxy { return p }, hold, peers, checks)
	if err != nil {
		return nil, err
	}
	opts, err := f.proxyFlags.open(ctx, log, client, f.nodeName, f.networkFlags)
	if err != nil {
		return nil, err
	}
	opts.Servers, opts.HostPorts, opts.OwnPods = reached.servers, pods.HostPorts, pods.OwnPods
	if f.balancer != nil {
		opts.FollowSlices = f.balancer.Follow
	}
	opts.Collectors = []prometheus.Collector{pods}
	var part component
	progress := barrier.NewProgress(barrier.ProxyServices, barrier.ProxySlices, barrier.DNSServices, barrier.DNSSlices)
	opts.Progress = progress
	if part, p, err = proxyComponent(opts, f.newNamespace); err != nil {
		return nil, err
	}
	part.ready = func(ctx context.Context) error { return programmed(ctx, log, p.Status) }
	reporter := &barrier.Reporter{Client: client, NodeName: f.nodeName, Progress: progress, Log: log}
	server, err := f.dnsServer(log, client, progress)
	if err != nil {
		return nil, err
	}
	n := &node{dns: server, components: []component{
		{name: "node", run: f.nodeAgent(log, client, cfg, p, pods, server, peers, checks).Run},
		{name: "report of what is programmed", run: reporter.Run},
		{name: "checks of endpoints", run: checks.Run},
	}}
	if f.peerWatch {
		n.components = append(n.components, component{name: "peers", run: peers.Run})
	}
	podsPart := component{name: "pods", run: pods.Run, ready: pods.WaitReady}
	if f.early {
		n.components = append(n.components, component{name: "pods", run: pods.Run})
		podsPart = component{name: "pods of the API server", ready: pods.WaitReady, run: func(ctx context.Context) error {
			close(hold)
			<-ctx.Done()
			return nil
		}}
	}
	n.components = append(n.components, part)
	if f.dnsMetrics != "" {
		n.components = append(n.components, optionalHTTP(log, "the metrics of DNS", f.dnsMetrics, server.Handler()))
	}
	n.components = append(n.components, []component{
		{name: "dns", run: server.Run, ready: func(ctx context.Context) error { return untilTrue(ctx, server.Ready) }, drain: server.Drain},
		podsPart,
	}...)
	more, err := f.addOns(log, client, shared, p)
	if err != nil {
		return nil, err
	}
	n.components = append(n.components, more...)
	return n, nil
}

// nodeAgent returns what keeps this machine's Node and its Lease.
func (f *agentFlags) nodeAgent(
	log *slog.Logger, client kubernetes.Interface, cfg *rest.Config,
	p *proxy.Proxy, pods *runner.Runner, names *dns.Server, peers *agent.Peers, checks *agent.Checks,
) *agent.Registrar {
	conditions := append(agent.Pressure(os.DirFS("/"), func() (fileio.Space, error) { return fileio.SpaceOf(f.stateDir) }),
		func() corev1.NodeCondition { return p.Status().Condition() },
		pods.Condition, pods.Masquerading, pods.Limits, pods.Confinement)
	if f.nodeLocalDNS {
		conditions = append(conditions, names.NodeLocalCondition)
	}
	return agent.New(agent.Options{
		Client: client, NodeName: f.nodeName, Log: log,
		Node: p.Node, Changed: p.Changed(), ReadyChanged: pods.Changed(), Ready: pods.Healthy,
		Conditions: conditions, Addresses: f.nodeIPs,
		Annotations: map[string]string{
			svc.ServingCertAnnotation: pods.Fingerprint(), svc.PeerWatchAnnotation: strconv.FormatBool(f.peerWatch),
			svc.PublicKeyAnnotation: pods.PublicKey(),
		},
		Certificates: func() map[string]string { return certReport(cfg) }, CertificatesChanged: f.certChanged,
		Unreachable: peers.Unreachable, UnreachableChanged: peers.Changed(),
		Checks: checks.Report, ChecksChanged: checks.Changed(),
		Port:     int32(f.agentPort),
		Info:     agent.MachineInfo(os.DirFS("/"), apiserver.Version+"."+version),
		Capacity: agent.MachineCapacity(os.DirFS("/")),
	})
}

// addOns returns the components that start last: the directory of services, the speaker of load
// balancers, and the resolver of this machine.
func (f *agentFlags) addOns(log *slog.Logger, client kubernetes.Interface, cfg *rest.Config, p *proxy.Proxy) (out []component, err error) {
	if f.servicesDir != "" {
		directory, err := f.directory(log, client)
		if err != nil {
			return nil, err
		}
		out = append(out, component{name: "services directory", run: directory.Run})
	}
	speaker, err := f.lb.newSpeaker(log, cfg, f.nodeName, f.nodeIPs[0], p)
	if err != nil {
		return nil, err
	}
	p.Register(speaker.Collector())
	out = append(out, speakerComponent(speaker))
	if f.configureResolver {
		addrs, err := f.clusterDNS()
		if err != nil {
			return nil, err
		}
		out = append(out, resolverComponent(log, addrs[0]))
	}
	return out, nil
}

// agentConfig returns cfg for protobuf and without a client-side rate limit: the
// server has limits of its own.
func agentConfig(cfg *rest.Config) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	cfg.QPS = -1
	cfg.UserAgent = "fairlead-agent/" + version
	return cfg
}

// oneTransport returns the configuration of clients that share one transport, and so one
// connection to each server.
func oneTransport(cfg *rest.Config) (*rest.Config, error) {
	server, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, err
	}
	transport, err := rest.TransportFor(cfg)
	if err != nil {
		return nil, err
	}
	return &rest.Config{
		Host: server.String(), Transport: transport, ContentConfig: cfg.ContentConfig, UserAgent: cfg.UserAgent,
		QPS: cfg.QPS, WarningHandler: cfg.WarningHandler, WarningHandlerWithContext: cfg.WarningHandlerWithContext, Timeout: cfg.Timeout,
	}, nil
}

func (f *agentFlags) dnsServer(log *slog.Logger, client kubernetes.Interface, progress *barrier.Progress) (*dns.Server, error) {
	opts, err := f.dnsFlags.options(f.networkFlags)
	if err != nil {
		return nil, err
	}
	opts.Listen = nil
	for _, a := range f.nodeIPs {
		opts.Listen = append(opts.Listen, netip.AddrPortFrom(a, f.dnsPort).String())
	}
	opts.Client, opts.Logger, opts.Progress = client, log, progress
	opts.Publish = &dns.Publish{NodeName: f.nodeName, Addresses: f.nodeIPs, Port: f.dnsPort}
	if f.nodeLocalDNS {
		addrs, err := f.clusterDNS()
		if err != nil {
			return nil, err
		}
		opts.NodeLocal = &dns.NodeLocal{Addresses: addrs, Source: f.nodeIPs}
	}
	return dns.New(opts)
}

// lockDNS takes the lock of node-local DNS, if it is on.
func (f *agentFlags) lockDNS(ctx context.Context, log *slog.Logger) (lockHeld, error) {
	if !f.nodeLocalDNS {
		return lockHeld{}, nil
	}
	return dnsLock.wait(ctx, log)
}

// programmedTimeout bounds how long a start waits until all Services are
// programmed.
const programmedTimeout = 10 * time.Second

// programmed returns when Services are programmed, or after programmedTimeout when
// that was tried: one rejected Service must not keep DNS and Pods from starting.
func programmed(ctx context.Context, log *slog.Logger, status func() proxy.Status) error {
	limited, cancel := context.WithTimeout(ctx, programmedTimeout)
	defer cancel()
	if untilTrue(limited, func() bool { return status().Programmed }) == nil {
		return nil
	}
	if err := untilTrue(ctx, func() bool { return status().Applies > 0 }); err != nil {
		return fmt.Errorf("%w: %s", err, status().Message)
	}
	if s := status(); !s.Programmed {
		log.Warn("not all Services are programmed; starting nevertheless, see 'fairlead status'", "reason", s.Message)
	}
	return nil
}

// untilTrue polls a cheap condition that signals nothing.
func untilTrue(ctx context.Context, cond func() bool) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}
