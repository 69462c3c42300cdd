// Package node makes this machine a node: the flags of 'agent', 'up' and 'check', and the
// components that run with them.
package node

import (
	"net/netip"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/controller"
)

// Flags set up a node; 'agent', 'up' and 'check' have them.
type Flags struct {
	Host     HostFlags
	Pods     PodFlags
	DNS      DNSFlags
	Proxy    parts.ProxyFlags
	LB       parts.LBFlags
	Spans    lifecycle.SpanFlags
	Networks base.NetworkFlags
}

// Add adds the flags to a command, except the ranges of the cluster, whose help differs between commands.
func (f *Flags) Add(cmd *cobra.Command) {
	f.Host.add(cmd)
	f.Pods.add(cmd)
	f.DNS.add(cmd)
	f.Proxy.Add(cmd)
	f.LB.Add(cmd)
	f.Spans.Add(cmd)
}

// Check rejects flags that cannot work. It changes nothing and sends no request.
func (f *Flags) Check() error {
	if err := f.Host.check(); err != nil {
		return err
	}
	if err := f.Pods.check(); err != nil {
		return err
	}
	if err := f.DNS.check(f.Networks); err != nil {
		return err
	}
	if err := f.LB.Check(f.Networks); err != nil {
		return err
	}
	if err := f.Spans.Check(); err != nil {
		return err
	}
	return f.Proxy.Check(f.Networks)
}

// InNamespace adapts the flags of a node in its own network namespace, whose resolver is mounted.
// given reports whether a flag was set.
func (f *Flags) InNamespace(given func(flag string) bool) {
	// No packet leaves the namespace, so there is no resolver to forward to.
	f.DNS.Upstream, f.DNS.ConfigureResolver = nil, false
	if !given("pod-manifest-dir") {
		f.Pods.ManifestDir = "" // the default is for the machine's own agent
	}
}

// DefaultNetworks are the ranges of a cluster whose server is fairlead.
func DefaultNetworks() base.NetworkFlags {
	return base.NetworkFlags{ServiceCIDRs: join.DefaultServiceCIDRs(), PodCIDRs: controller.DefaultClusterCIDRs()}
}

// HostFlags describe this machine as a node.
type HostFlags struct {
	Name string
	// IPs are the node's addresses, at most one of each family; empty until they are found out.
	IPs base.Addrs
	// PeerWatch makes this machine watch others, and be watched.
	PeerWatch   bool
	port        uint16
	servicesDir string
}

func (f *HostFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.Name, "node-name", base.Hostname(), "name of this node")
	flags.Var(&f.IPs, "node-ip",
		"addresses of this node, at most one of each family (default: the addresses from which it reaches the server)")
	flags.Uint16Var(&f.port, "agent-port", 10250, "port on the node's address where the API server asks for logs and exec")
	flags.BoolVar(&f.PeerWatch, "peer-watch", true, "watch the machines of up to three other nodes, and be watched by as many: "+
		"endpoints of a dead machine leave within 5 s")
	flags.StringVar(&f.servicesDir, "services-dir", base.DefaultServicesDir(),
		"directory whose files *.yaml describe programs of this machine to register (docs/registered.md); empty for none")
}

func (f *HostFlags) check() error {
	if err := base.CheckNodeName(f.Name); err != nil {
		return err
	}
	if errs := validation.IsValidLabelValue(f.Name); len(errs) > 0 {
		return base.Usagef("--node-name %q cannot be the label kubernetes.io/hostname: %s", f.Name, errs[0])
	}
	if f.port == 0 {
		return base.Usagef("--agent-port must be 1 to 65535: the API server has to know it")
	}
	families := map[bool]netip.Addr{}
	for _, a := range f.IPs {
		if o, taken := families[a.Is4()]; taken {
			return base.Usagef("--node-ip: %s and %s are of one family; give at most one of each", o, a)
		}
		if a.IsLoopback() || a.IsUnspecified() {
			return base.Usagef("--node-ip: %s cannot be reached by others", a)
		}
		families[a.Is4()] = a
	}
	return nil
}

// DNSFlags set up the DNS server of a node, and who asks it.
type DNSFlags struct {
	parts.DNSFlags
	// ConfigureResolver makes the programs of this machine ask it.
	ConfigureResolver bool
	nodeLocal         bool
	port              uint16
	metrics           string
}

func (f *DNSFlags) add(cmd *cobra.Command) {
	f.DNSFlags.Add(cmd)
	parts.AddConfigureResolver(cmd, &f.ConfigureResolver)
	flags := cmd.Flags()
	flags.BoolVar(&f.nodeLocal, "node-local-dns", true,
		"answer questions to the Service kube-dns on this node itself, without connection tracking; "+
			"other nodes' servers stand in when it is down")
	flags.Uint16Var(&f.port, "dns-port", 10053, "port on the node's address where DNS answers; the Service kube-dns leads to it")
	flags.StringVar(&f.metrics, "dns-metrics-bind-address", "127.0.0.1:9153",
		"IP:PORT of /metrics, /ready and /health of the DNS server; empty for none")
}

func (f *DNSFlags) check(networks base.NetworkFlags) error {
	if f.port == 0 {
		return base.Usagef("--dns-port must be 1 to 65535: other nodes have to know it")
	}
	if _, err := f.Options(networks); err != nil {
		return err
	}
	return base.CheckBind("dns-metrics-bind-address", f.metrics)
}
