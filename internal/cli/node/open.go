package node

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/agent"
	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/dns"
	"github.com/fairlead/fairlead/internal/dns/membership"
	"github.com/fairlead/fairlead/internal/flows"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/servers"
	"github.com/fairlead/fairlead/internal/svc"
	spans "github.com/fairlead/fairlead/internal/tracing"
)

// Setup is how a command starts a node.
type Setup struct {
	Log *slog.Logger
	// Config leads to the API server with the node's credentials.
	Config *rest.Config
	// StateDir is the node's directory.
	StateDir string
	// Balancer chooses among the servers; nil to use the server of Config.
	Balancer *servers.Balancer
	// Registrar registers the programs of --services-dir and shows the static Pods; nil for the
	// node itself.
	Registrar *rest.Config
	// Early starts static Pods before the proxy, which needs the API server.
	Early bool
	// StopPods ends the Pods with the node.
	StopPods bool
	// Traces sends spans; nil for none.
	Traces *spans.Tracer
	// NewNamespace is set in a network namespace that this process was started in.
	NewNamespace bool
	// CertChanged, which may be nil, holds a token when the node's certificate or its authorities may have changed.
	CertChanged <-chan struct{}
	// CertReplacing, which may be nil, reports whether connections with the certificate before this one may be open.
	CertReplacing func() bool
}

// stateLayout is the version of the layout of a node's state: records of Pods, and the last known state of the API. It
// grows when an older fairlead could not read the state that this one writes.
const stateLayout = 1

// MakeState makes the state directory of a node, and rejects the state of a newer fairlead.
func MakeState(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("the node's state directory: %w; choose another with --data-dir", err)
	}
	return fileio.CheckLayout(dir, stateLayout)
}

// LockDNS takes the lock of node-local DNS, if it is on.
func (f *Flags) LockDNS(ctx context.Context, log *slog.Logger) (parts.LockHeld, error) {
	if !f.DNS.nodeLocal {
		return parts.LockHeld{}, nil
	}
	return parts.DNSLock.Wait(ctx, log)
}

// Node is a node of the API: its components in the order to start them.
type Node struct {
	Components []lifecycle.Component
	dns        *dns.Server
}

// DNSAddresses lists where the node answers DNS, for people.
func (n *Node) DNSAddresses() string {
	var out []string
	for _, addr := range n.dns.Addrs() {
		out = append(out, addr.String())
	}
	return strings.Join(out, ", ")
}

// Open makes the state directory, opens the port for logs and exec, prepares the kernel for the
// proxy, and returns a node. The flags are checked, and Host.IPs is set.
func (f *Flags) Open(ctx context.Context, s Setup) (*Node, error) {
	b := &builder{Flags: f, Setup: s, hold: make(chan struct{})}
	for _, step := range []func(context.Context) error{b.connect, b.openPods, b.openProxy, b.openDNS, b.openSpeaker} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	components, err := b.components()
	if err != nil {
		return nil, err
	}
	return &Node{Components: components, dns: b.dns}, nil
}

// builder makes the parts of a node, each from the earlier ones.
type builder struct {
	*Flags
	Setup

	// config is that of Setup, tuned. The clients of shared have one connection.
	config, shared *rest.Config
	client         kubernetes.Interface
	dialed         parts.Dialed
	peers          *agent.Peers
	checks         *agent.Checks
	progress       *barrier.Progress
	forwarded      *forwarded
	// hold is closed when Pods of the API server may start.
	hold chan struct{}

	pods      *runner.Runner
	proxy     *proxy.Proxy
	counts    *flows.Reader
	proxyPart lifecycle.Component
	dns       *dns.Server
	speaker   parts.Speaker
}

// connect makes the clients, and the watchers of nodes and endpoints that use them.
func (b *builder) connect(context.Context) error {
	b.config = base.AgentConfig(b.Config)
	b.dialed.Record(b.config)
	var err error
	if b.shared, err = apiclient.Shared(b.config); err != nil {
		return err
	}
	if b.client, err = kubernetes.NewForConfig(b.shared); err != nil {
		return err
	}
	b.peers = agent.NewPeers(b.client, b.Host.Name, b.Log, func() { b.proxy.PodsChanged() })
	b.checks = agent.NewChecks(b.client, b.Host.Name, b.Log)
	b.forwarded = newForwarded(b.Log, b.packets())
	b.progress = barrier.NewProgress(barrier.ProxyServices, barrier.ProxySlices, barrier.DNSServices, barrier.DNSSlices)
	return nil
}

// openPods makes the state directory, and opens the port for logs and exec.
func (b *builder) openPods(context.Context) error {
	if err := MakeState(b.StateDir); err != nil {
		return err
	}
	if !b.Early {
		close(b.hold)
	}
	var err error
	b.pods, err = b.runner()
	return err
}

// openProxy prepares the kernel for the mode of the proxy.
func (b *builder) openProxy(ctx context.Context) error {
	opts, err := b.Proxy.Open(ctx, b.Log, b.client, b.Host.Name, b.Networks)
	if err != nil {
		return err
	}
	opts.Servers, opts.HostPorts, opts.OwnPods = b.dialed.Servers, b.pods.HostPorts, b.pods.OwnPods
	opts.Unreached = b.peers.Unreached
	if follow := opts.FollowSlices; b.Balancer != nil {
		opts.FollowSlices = func(to reflector.Sink[*discoveryv1.EndpointSlice]) reflector.Sink[*discoveryv1.EndpointSlice] {
			if follow != nil {
				to = follow(to)
			}
			return b.Balancer.Follow(to)
		}
	}
	opts.Collectors = []prometheus.Collector{b.pods}
	opts.Progress = b.progress
	opts.Traces = b.Traces.Pending(b.Host.Name, opts.Mode)
	b.proxyPart, b.proxy, b.counts, err = parts.ProxyComponent(opts, b.NewNamespace)
	if err != nil {
		return err
	}
	b.proxyPart.Ready = func(ctx context.Context) error { return parts.Programmed(ctx, b.Log, b.proxy.Status) }
	return nil
}

func (b *builder) openDNS(context.Context) error {
	opts, err := b.DNS.Options(b.Networks)
	if err != nil {
		return err
	}
	opts.Listen = nil
	for _, a := range b.Host.IPs {
		opts.Listen = append(opts.Listen, netip.AddrPortFrom(a, b.DNS.port).String())
	}
	opts.Client, opts.Logger, opts.Progress, opts.Questions = b.client, b.Log, b.progress, b.Proxy.Flows().Questions()
	opts.Publish = &membership.Self{NodeName: b.Host.Name, Addresses: b.Host.IPs, Port: b.DNS.port}
	if b.DNS.nodeLocal {
		addrs, err := b.Networks.ClusterDNS()
		if err != nil {
			return err
		}
		opts.NodeLocal = &dns.NodeLocal{Addresses: addrs, Source: b.Host.IPs}
	}
	b.dns, err = dns.New(opts)
	return err
}

func (b *builder) openSpeaker(context.Context) error {
	var err error
	b.LB.Requests = b.Proxy.Flows().Requests()
	b.speaker, err = b.LB.NewSpeaker(b.Log, b.shared, b.Host.Name, b.Host.IPs[0], b.proxy, b.Proxy.NoMesh(b.proxy.Status().Mode))
	if err != nil {
		return err
	}
	b.proxy.Register(b.speaker.Collector())
	return nil
}

// part is a component of a node.
type part struct {
	name   string // for the order's test
	wanted bool
	make   func() (lifecycle.Component, error)
}

// order returns what a node consists of, in the order to start it, which is reverse to that of its end. The speaker ends after DNS,
// which answers for --dns-lameduck: the others keep its addresses only for speaker.AwayTime after its end, in which the next
// process has to start.
func (b *builder) order() []part {
	return []part{
		{"node", true, b.registrar},
		{"report of what is programmed", true, b.reporter},
		{"checks of endpoints", true, b.endpointChecks},
		{"watch of forwarding", true, b.forwarding},
		{"peers", b.Host.PeerWatch, b.peerWatch},
		{"static pods", b.Early, b.staticPods},
		{"proxy", true, b.proxyComponent},
		{"speaker", true, b.speakerComponent},
		{"metrics of DNS", b.DNS.metrics != "", b.dnsMetrics},
		{"dns", true, b.dnsComponent},
		{"pods", !b.Early, b.allPods},
		{"pods of the API server", b.Early, b.apiPods},
		{"services directory", b.Host.servicesDir != "", b.servicesDirectory},
		{"resolver", b.DNS.ConfigureResolver, b.resolver},
	}
}

// components returns the components of the node in the order to start them.
func (b *builder) components() ([]lifecycle.Component, error) {
	var out []lifecycle.Component
	for _, p := range b.order() {
		if !p.wanted {
			continue
		}
		c, err := p.make()
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	flows, err := b.Proxy.Flows().Components(b.client, b.proxy, b.Host.Name, false)
	return append(out, flows...), err
}

// registrar keeps this machine's Node and its Lease.
func (b *builder) registrar() (lifecycle.Component, error) {
	space := func() (fileio.Space, error) { return fileio.SpaceOf(b.StateDir) }
	conditions := append(agent.Pressure(os.DirFS("/"), space),
		func() corev1.NodeCondition { return b.proxy.Status().Condition() },
		b.pods.Condition, b.pods.Masquerading, b.pods.SourcesChecked, b.pods.Limits, b.pods.Confinement, b.forwarded.condition)
	if b.Host.PeerWatch {
		conditions = append(conditions, b.peers.Condition)
	} else {
		conditions = append(conditions, agent.NotAsking)
	}
	conditions = append(conditions, b.dns.UpstreamsCondition)
	if b.DNS.nodeLocal {
		conditions = append(conditions, b.dns.NodeLocalCondition)
	}
	r := agent.New(agent.Options{
		Client: b.client, NodeName: b.Host.Name, Log: b.Log,
		Node: b.proxy.Node, Changed: b.proxy.Changed(), ReadyChanged: b.pods.Changed(), Ready: b.pods.Healthy,
		Conditions: conditions, Addresses: b.Host.IPs,
		Annotations: map[string]string{
			svc.ServingCertAnnotation: b.pods.Fingerprint(), svc.PeerWatchAnnotation: strconv.FormatBool(b.Host.PeerWatch),
			svc.PublicKeyAnnotation: b.pods.PublicKey(),
		},
		Certificates: func() map[string]string { return certReport(b.config, b.CertReplacing) }, CertificatesChanged: b.CertChanged,
		Unreachable: b.peers.Unreachable, UnreachableChanged: b.peers.Changed(),
		Checks: b.checks.Report, ChecksChanged: b.checks.Changed(),
		ForwardedChanged: b.forwarded.changed,
		Port:             int32(b.Host.port),
		Info:             agent.MachineInfo(os.DirFS("/"), join.Version+"."+base.Version),
		MaxPods:          b.Pods.maxPods,
		Capacity:         agent.MachineCapacity(os.DirFS("/")),
	})
	return lifecycle.Component{Name: "node", Run: r.Run}, nil
}

// reporter reports which changes this node has programmed.
func (b *builder) reporter() (lifecycle.Component, error) {
	r := &barrier.Reporter{Client: b.client, NodeName: b.Host.Name, Progress: b.progress, Log: b.Log}
	return lifecycle.Component{Name: "report of what is programmed", Run: r.Run}, nil
}

func (b *builder) endpointChecks() (lifecycle.Component, error) {
	return lifecycle.Component{Name: "checks of endpoints", Run: b.checks.Run}, nil
}

func (b *builder) forwarding() (lifecycle.Component, error) {
	return lifecycle.Component{Name: "watch of forwarding", Run: b.forwarded.run}, nil
}

func (b *builder) peerWatch() (lifecycle.Component, error) {
	return lifecycle.Component{Name: "peers", Run: b.peers.Run}, nil
}

// staticPods runs the Pods; Pods of the API server wait for apiPods.
func (b *builder) staticPods() (lifecycle.Component, error) {
	return lifecycle.Component{Name: "pods", Run: b.pods.Run}, nil
}

// apiPods lets Pods of the API server start.
func (b *builder) apiPods() (lifecycle.Component, error) {
	run := func(ctx context.Context) error {
		close(b.hold)
		<-ctx.Done()
		return nil
	}
	return lifecycle.Component{Name: "pods of the API server", Ready: b.pods.WaitReady, Run: run}, nil
}

func (b *builder) allPods() (lifecycle.Component, error) {
	return lifecycle.Component{Name: "pods", Run: b.pods.Run, Ready: b.pods.WaitReady}, nil
}

func (b *builder) proxyComponent() (lifecycle.Component, error) { return b.proxyPart, nil }

func (b *builder) dnsMetrics() (lifecycle.Component, error) {
	return lifecycle.OptionalHTTP(b.Log, "the metrics of DNS", b.DNS.metrics, b.dns.Handler()), nil
}

func (b *builder) dnsComponent() (lifecycle.Component, error) {
	ready := func(ctx context.Context) error { return lifecycle.UntilTrue(ctx, b.dns.Ready) }
	return lifecycle.Component{Name: "dns", Run: b.dns.Run, Ready: ready, Drain: b.dns.Drain}, nil
}

// servicesDirectory keeps the programs of --services-dir registered.
func (b *builder) servicesDirectory() (lifecycle.Component, error) {
	path, err := filepath.Abs(b.Host.servicesDir)
	if err != nil {
		return lifecycle.Component{}, fmt.Errorf("--services-dir: %w", err)
	}
	d := &registration.Directory{Path: path, Node: b.Host.Name, Client: b.client, Log: b.Log}
	if b.Registrar != nil {
		d.Client, err = kubernetes.NewForConfig(b.Registrar)
	}
	return lifecycle.Component{Name: "services directory", Run: d.Run}, err
}

func (b *builder) speakerComponent() (lifecycle.Component, error) {
	return parts.SpeakerComponent(b.speaker), nil
}

func (b *builder) resolver() (lifecycle.Component, error) {
	addrs, err := b.Networks.ClusterDNS()
	if err != nil {
		return lifecycle.Component{}, err
	}
	return parts.ResolverComponent(b.Log, addrs[0]), nil
}
