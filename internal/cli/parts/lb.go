package parts

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/gateway/api"
	gatewaycontroller "github.com/fairlead/fairlead/internal/gateway/controller"
	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/lb/acme"
	lbcontroller "github.com/fairlead/fairlead/internal/lb/controller"
	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// LBFlags set up load balancers; 'lb', 'up', 'server' and 'agent' have them.
type LBFlags struct {
	Pools LBPools
	// Requests, which no flag sets, is shown the requests of HTTP; nil for none.
	Requests seen.Requests
	// Traced, which Add sets, keeps what becomes of the requests that users trace.
	Traced     *request.Watch
	byDefault  bool
	interfaces []string
	announce   string
	bgpPeers   bgpPeersValue
	peerPort   uint16
	accessLogs string
	logUpload  logUploadFlags
	acme       acmeFlags
	gatewayAPI string
}

// How addresses may be announced.
const (
	announceARP  = v1.AnnounceARP
	announceBGP  = v1.AnnounceBGP
	announceNone = v1.AnnounceNone
)

func announcements() []string { return []string{announceARP, announceBGP, announceNone} }

// The values of --gateway-api.
const (
	gatewayOn           = "on"
	gatewayExperimental = "experimental"
	gatewayOff          = "off"
)

// defaultPool is the name of the pool of a --lb-pool without one.
const defaultPool = "default"

// Add adds the flags to a command.
func (f *LBFlags) Add(cmd *cobra.Command) {
	f.Traced = &request.Watch{}
	flags := cmd.Flags()
	flags.Var(&f.Pools, "lb-pool", "addresses for Services of type LoadBalancer: [NAME=]RANGES, as CIDRs and FIRST-LAST of both families; "+
		"may be given several times; kept as IPAddressPool objects by whoever runs the controller")
	flags.BoolVar(&f.byDefault, "lb-default", true,
		"give addresses to Services without a loadBalancerClass, too; otherwise only to Services of class "+svc.LoadBalancerClass)
	flags.StringSliceVar(&f.interfaces, "lb-interface", nil,
		"interfaces of this node that answer for addresses (default: the interfaces whose network has the address)")
	flags.StringVar(&f.announce, "lb-announce", announceARP,
		"how this node announces addresses: arp (IPv6: NDP), bgp, or none, when other software routes them; "+
			"with arp also by BGP to the BGPPeers that select this node")
	flags.Var(&f.bgpPeers, "lb-bgp-peer", "a router to announce to by BGP, beside the BGPPeer objects: "+
		"ADDRESS[:PORT],peer-asn=N,local-asn=N[,name=NAME][,password-file=FILE][,hold-time=90s][,keepalive-time=30s]"+
		"[,graceful-restart[=120s]][,multihop=TTL][,source-address=IP][,interface=IF]; may be given several times")
	flags.StringVar(&f.accessLogs, "lb-access-logs", filepath.Join(base.DefaultDataDir(), "lb-access-logs"),
		"directory for the access logs that annotations of Services ask for, of 1 GiB at most; - for the standard output; empty for none")
	f.logUpload.add(flags)
	f.acme.add(flags)
	flags.StringVar(&f.gatewayAPI, "gateway-api", gatewayOn,
		"on: install the kinds of the Gateway API, unless a newer or another bundle of them is installed, and serve Gateways; "+
			"experimental: the definitions of the experimental channel, with more fields, such as retry; "+
			"off: neither; Ingresses are served in either case; the same on all servers")
	flags.Uint16Var(&f.peerPort, "lb-peer-port", svc.SpeakerPort,
		"UDP port on the node's address at which the speakers of all nodes hear each other; the same on all")
}

// Check rejects flags that cannot work in a cluster with the ranges of networks, which are
// empty for one that is not our own.
func (f *LBFlags) Check(networks base.NetworkFlags) error {
	if !slices.Contains(announcements(), f.announce) {
		return base.Usagef("--lb-announce is %q; want arp, bgp or none", f.announce)
	}
	if !slices.Contains([]string{gatewayOn, gatewayExperimental, gatewayOff}, f.gatewayAPI) {
		return base.Usagef("--gateway-api is %q; want on, experimental or off", f.gatewayAPI)
	}
	if f.peerPort == 0 {
		return base.Usagef("--lb-peer-port must be 1 to 65535: the other speakers have to know it")
	}
	if err := f.logUpload.check(f.accessLogs); err != nil {
		return err
	}
	if err := f.acme.check(); err != nil {
		return err
	}
	if f.announce == announceNone && len(f.bgpPeers) > 0 {
		return base.Usagef("--lb-bgp-peer and --lb-announce none: nothing would be announced to that router")
	}
	for _, name := range f.interfaces {
		if name == "" || len(name) > 15 || strings.ContainsAny(name, "/: \t\n") {
			return base.Usagef("--lb-interface: %.40q cannot be the name of an interface", name)
		}
	}
	for i, p := range f.Pools {
		for _, other := range f.Pools[:i] {
			for _, r := range p.Ranges {
				if j := slices.IndexFunc(other.Ranges, r.Overlaps); j >= 0 {
					return base.Usagef("--lb-pool: %s of %s and %s of %s overlap: an address is of one pool", r, p.Name, other.Ranges[j], other.Name)
				}
			}
		}
	}
	if err := f.checkRanges("service-cluster-ip-range", networks.ServiceCIDRs); err != nil {
		return err
	}
	return f.checkRanges("cluster-cidr", networks.PodCIDRs)
}

// checkRanges rejects pools with addresses that the cluster uses for itself, by the flag
// that says so.
func (f *LBFlags) checkRanges(flag string, used base.Prefixes) error {
	for _, p := range f.Pools {
		for _, r := range p.Ranges {
			if i := slices.IndexFunc(used, func(x netip.Prefix) bool { return pool.FromPrefix(x).Overlaps(r) }); i >= 0 {
				return base.Usagef("--lb-pool %s: %s and --%s %s overlap: those addresses are for inside of the cluster", p.Name, r, flag, used[i])
			}
		}
	}
	return nil
}

// LBPools is the flag --lb-pool.
type LBPools []lbcontroller.FlagPool

func (v *LBPools) String() string { return strings.Join(v.Values(), " ") }

// Values returns the pools, each as NAME=RANGES.
func (v *LBPools) Values() (out []string) {
	for _, p := range *v {
		out = append(out, p.Name+"="+base.ListOf(p.Ranges))
	}
	return out
}

// Type names the value in --help.
func (*LBPools) Type() string { return "[NAME=]RANGES" }

// Set adds ranges to the pool that is named.
func (v *LBPools) Set(text string) error {
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
	i := slices.IndexFunc(*v, func(p lbcontroller.FlagPool) bool { return p.Name == name })
	if i < 0 {
		*v = append(*v, lbcontroller.FlagPool{Name: name})
		i = len(*v) - 1
	}
	(*v)[i].Ranges = append((*v)[i].Ranges, list...)
	return nil
}

// ControllerComponent runs the controller of load balancers. Others do not wait for it.
func (f *LBFlags) ControllerComponent(log *slog.Logger, config func() *rest.Config) lifecycle.Component {
	return lifecycle.Component{
		Name: "load balancers",
		Run: func(ctx context.Context) error {
			c, err := f.Controller(log, config())
			if err != nil {
				return err
			}
			return c.Run(ctx)
		},
	}
}

// channel returns the channel of the Gateway API's definitions.
func (f *LBFlags) channel() api.Channel {
	if f.gatewayAPI == gatewayExperimental {
		return api.Experimental
	}
	return api.Standard
}

// Definitions returns what gives a server of our own the definitions of the Gateway API, nil if it is off. The controller then
// finds them, and only replaces older ones.
func (f *LBFlags) Definitions() func() (map[string]json.RawMessage, error) {
	if f.gatewayAPI == gatewayOff {
		return nil
	}
	return func() (map[string]json.RawMessage, error) {
		list, err := api.Definitions(f.channel())
		out := map[string]json.RawMessage{}
		for _, d := range list {
			out[d.Name] = d.Object
		}
		return out, err
	}
}

// Controller returns the controller of load balancers.
func (f *LBFlags) Controller(log *slog.Logger, config *rest.Config) (*lbcontroller.Controller, error) {
	orders, err := f.acme.options()
	if err != nil {
		return nil, err
	}
	return lbcontroller.New(lbcontroller.Options{
		Config: config, Log: log, Pools: f.Pools, Default: f.byDefault, LeaderElect: true, ACME: orders,
		Beside: func(ctx context.Context, config *rest.Config, events *events.Recorder, orders *acme.Manager) error {
			return gatewaycontroller.Run(ctx, gatewaycontroller.Options{
				Config: config, Log: log, Events: events, Gateway: f.gatewayAPI != gatewayOff, Channel: f.channel(), Orders: orders,
			})
		},
	})
}
