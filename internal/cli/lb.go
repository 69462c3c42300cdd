package cli

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/lb"
	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// lbFlags set up load balancers; 'lb', 'up', 'server' and 'agent' have them.
type lbFlags struct {
	pools      lbPoolsValue
	byDefault  bool
	interfaces []string
	announce   string
	bgpPeers   bgpPeersValue
	peerPort   uint16
	accessLogs string
	logUpload  logUploadFlags
	acme       acmeFlags
}

// How addresses may be announced.
const (
	announceARP  = lb.AnnounceARP
	announceBGP  = lb.AnnounceBGP
	announceNone = lb.AnnounceNone
)

func announcements() []string { return []string{announceARP, announceBGP, announceNone} }

// defaultPool is the name of the pool of a --lb-pool without one.
const defaultPool = "default"

func (f *lbFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.Var(&f.pools, "lb-pool", "addresses for Services of type LoadBalancer: [NAME=]RANGES, as CIDRs and FIRST-LAST of both families; "+
		"may be given several times; kept as IPAddressPool objects by whoever runs the controller")
	flags.BoolVar(&f.byDefault, "lb-default", true,
		"give addresses to Services without a loadBalancerClass, too; otherwise to those of class "+v1.Class+" alone")
	flags.StringSliceVar(&f.interfaces, "lb-interface", nil,
		"interfaces of this node that answer for addresses (default: those whose network has the address)")
	flags.StringVar(&f.announce, "lb-announce", announceARP,
		"how this node announces addresses: arp (IPv6: NDP), bgp, or none, when other software routes them; "+
			"with arp also by BGP to the BGPPeers that select this node")
	flags.Var(&f.bgpPeers, "lb-bgp-peer", "a router to announce to by BGP, beside the BGPPeer objects: "+
		"ADDRESS[:PORT],peer-asn=N,local-asn=N[,name=NAME][,password-file=FILE][,hold-time=90s][,keepalive-time=30s]"+
		"[,graceful-restart[=120s]][,multihop=TTL][,source-address=IP][,interface=IF]; may be given several times")
	flags.StringVar(&f.accessLogs, "lb-access-logs", filepath.Join(defaultDataDir(), "lb-access-logs"),
		"directory for the access logs that annotations of Services ask for, of 1 GiB at most; empty for none")
	f.logUpload.add(flags)
	f.acme.add(flags)
	flags.Uint16Var(&f.peerPort, "lb-peer-port", lb.DefaultPeerPort,
		"UDP port on the node's address at which the speakers of all nodes hear each other; the same on all")
}

// check rejects flags that cannot work in a cluster with the ranges of networks, which are
// empty for one that is not our own.
func (f *lbFlags) check(networks networkFlags) error {
	if !slices.Contains(announcements(), f.announce) {
		return usagef("--lb-announce is %q; want arp, bgp or none", f.announce)
	}
	if f.peerPort == 0 {
		return usagef("--lb-peer-port must be 1 to 65535: the other speakers have to know it")
	}
	if err := f.logUpload.check(f.accessLogs); err != nil {
		return err
	}
	if err := f.acme.check(); err != nil {
		return err
	}
	if f.announce == announceNone && len(f.bgpPeers) > 0 {
		return usagef("--lb-bgp-peer and --lb-announce none: nothing would be announced to that router")
	}
	for _, name := range f.interfaces {
		if name == "" || len(name) > 15 || strings.ContainsAny(name, "/: \t\n") {
			return usagef("--lb-interface: %.40q cannot be the name of an interface", name)
		}
	}
	for i, p := range f.pools {
		for _, other := range f.pools[:i] {
			for _, r := range p.Ranges {
				if j := slices.IndexFunc(other.Ranges, r.Overlaps); j >= 0 {
					return usagef("--lb-pool: %s of %s and %s of %s overlap: an address is of one pool", r, p.Name, other.Ranges[j], other.Name)
				}
			}
		}
	}
	if err := f.checkRanges("service-cluster-ip-range", networks.serviceCIDRs); err != nil {
		return err
	}
	return f.checkRanges("cluster-cidr", networks.podCIDRs)
}

// checkRanges rejects pools with addresses that the cluster uses for itself, by the flag
// that says so.
func (f *lbFlags) checkRanges(flag string, used prefixesValue) error {
	for _, p := range f.pools {
		for _, r := range p.Ranges {
			if i := slices.IndexFunc(used, func(x netip.Prefix) bool { return pool.FromPrefix(x).Overlaps(r) }); i >= 0 {
				return usagef("--lb-pool %s: %s and --%s %s overlap: those addresses are for inside of the cluster", p.Name, r, flag, used[i])
			}
		}
	}
	return nil
}

// lbPoolsValue is the flag --lb-pool.
type lbPoolsValue []lb.FlagPool

func (v *lbPoolsValue) String() string { return strings.Join(v.values(), " ") }

func (v *lbPoolsValue) values() (out []string) {
	for _, p := range *v {
		out = append(out, p.Name+"="+listOf(p.Ranges))
	}
	return out
}

func (*lbPoolsValue) Type() string { return "[NAME=]RANGES" }

// Set adds ranges to the pool that is named.
func (v *lbPoolsValue) Set(text string) error {
	name, ranges, named := strings.Cut(text, "=")
	if !named {
		name, ranges = defaultPool, text
	}
	if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 {
		return fmt.Errorf("%.100q cannot be the name of a pool: %s", name, errs[0])
	}
	list, err := pool.ParseList(ranges)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(*v, func(p lb.FlagPool) bool { return p.Name == name })
	if i < 0 {
		*v = append(*v, lb.FlagPool{Name: name})
		i = len(*v) - 1
	}
	(*v)[i].Ranges = append((*v)[i].Ranges, list...)
	return nil
}

// controllerComponent runs the controller of load balancers. Others do not wait for it.
func (f *lbFlags) controllerComponent(log *slog.Logger, config func() *rest.Config) component {
	return component{
		name: "load balancers",
		run: func(ctx context.Context) error {
			c, err := f.controller(log, config())
			if err != nil {
				return err
			}
			return c.Run(ctx)
		},
	}
}

func (f *lbFlags) controller(log *slog.Logger, config *rest.Config) (*lb.Controller, error) {
	orders, err := f.acme.options()
	if err != nil {
		return nil, err
	}
	return lb.NewController(lb.ControllerOptions{
		Config: config, Log: log, Pools: f.pools, Default: f.byDefault, LeaderElect: true, ACME: orders,
	})
}

// lbCommand is 'fairlead lb'.
type lbCommand struct {
	*global
	lbFlags
	client              clientFlags
	nodeName, metrics   string
	nodeIP              addrsValue
	controller, speaker bool
}

func newLB(g *global) *cobra.Command {
	c := &lbCommand{global: g}
	cmd := &cobra.Command{
		Use:   "lb",
		Short: "Give addresses to Services of type LoadBalancer and announce them, on any Kubernetes API",
		Long: `Give addresses of your own network to Services of type LoadBalancer, and announce
them from this node. Run one on each node: the controller of one of them works,
elected by a Lease, and the speakers of all decide which of them answers for an
address. It takes the place of MetalLB, kube-vip or cloud-provider-kind.`,
		Example: `  fairlead lb --kubeconfig /etc/kubernetes/lb.conf --node-name node1 --lb-pool 192.0.2.10-192.0.2.99
  fairlead lb --kubeconfig F --lb-pool public=198.51.100.0/24,2001:db8:1::/64 --lb-announce bgp
  fairlead lb status`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd.Context()) },
	}
	c.client.add(cmd)
	c.lbFlags.add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&c.nodeName, "node-name", hostname(), "name of this machine's Node object")
	flags.Var(&c.nodeIP, "node-ip",
		"address of this node at which its speaker hears the others (default: that by which it reaches the API server)")
	flags.BoolVar(&c.controller, "controller", true, "give out addresses, while this process holds the Lease")
	flags.BoolVar(&c.speaker, "speaker", true, "announce addresses from this node")
	flags.StringVar(&c.metrics, "metrics-bind-address", "127.0.0.1:7472", "IP:PORT of /metrics; empty for none")
	cmd.AddCommand(newLBStatus(g), newLBExplain(g))
	return cmd
}

func (c *lbCommand) run(ctx context.Context) error {
	log, err := c.logger()
	if err != nil {
		return err
	}
	if err := checkNodeName(c.nodeName); err != nil {
		return err
	}
	if err := c.check(networkFlags{}); err != nil {
		return err
	}
	if !c.controller && !c.speaker {
		return usagef("--controller=false and --speaker=false: nothing is left to do")
	}
	if err := checkBind("metrics-bind-address", c.metrics); err != nil {
		return err
	}
	config, _, err := c.client.load()
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	var parts []component
	if c.controller {
		controller, err := c.lbFlags.controller(log, config)
		if err != nil {
			return err
		}
		registry.MustRegister(controller.Collector())
		parts = append(parts, component{name: "load balancers", run: controller.Run})
	}
	if c.speaker {
		if len(c.nodeIP) == 0 {
			if c.nodeIP, err = machineAddresses(serverAddrs(config, log)); err != nil {
				return err
			}
		}
		speaker, err := c.newSpeaker(log, config, c.nodeName, c.nodeIP[0], nil)
		if err != nil {
			return err
		}
		registry.MustRegister(speaker.Collector())
		parts = append(parts, speakerComponent(speaker))
	}
	if c.metrics != "" {
		h := promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
		parts = append(parts, optionalHTTP(log, "the metrics of load balancers", c.metrics, h))
	}
	return runAll(ctx, log, func() {}, parts...)
}
