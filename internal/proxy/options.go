package proxy

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/tracing"
)

// Options configure a Proxy. Client, NodeName and Dataplane are needed;
// the zero value of every other field is a sound choice.
type Options struct {
	// Client reads Services, EndpointSlices and the Node, and writes Events.
	Client kubernetes.Interface
	// NodeName is the name of this machine's Node object.
	NodeName string
	// Only Run uses Dataplane; it does not close it.
	Dataplane dataplane.Applier
	// Mode is the name of its mode, for status and /proxyMode.
	Mode string
	// Collectors are further metrics for MetricsAddress.
	Collectors []prometheus.Collector
	// FallbackReason is why Mode is not the mode asked for, empty if it is. It
	// becomes a Warning Event of the Node.
	FallbackReason string
	// ConnectTime is what the status shows of connect-time: "on", why it is off if that was left to choose, or nothing.
	ConnectTime string
	// ConnectTimeCgroup is the control group that connect-time is on for, "" for all of the machine's.
	ConnectTimeCgroup string
	// Schedulers are the schedulers that the mode offers to Services that name one by the
	// annotation svc.SchedulerAnnotation; nil leaves that unread.
	Schedulers []string
	// Unweighted is that of table.Config; nil is for modes that choose evenly.
	Unweighted func(scheduler string) string
	// Forwards returns why the mode cannot carry out table.Frontend.Hops on this machine, nil if it can. It is called at most
	// once, when a Service asks for it; nil is for modes that cannot. AllDirect is what counts for Services without the
	// annotation svc.ForwardingAnnotation.
	Forwards  func() error
	AllDirect bool
	// NextHops returns how this node passes packets on to others, nil while that is not known. It is called in every round while a
	// Service asks for direct return; PodsChanged begins one. Nil leaves the annotation without effect.
	NextHops func() map[string]table.NextHop
	// Progress gets which versions of Services and EndpointSlices are programmed; nil
	// for none.
	Progress *barrier.Progress
	// Traces gets what arrives and what is programmed, for spans; nil for none.
	Traces *tracing.Pending
	// Log receives what happens; nil discards it.
	Log *slog.Logger

	// ClusterCIDRs to PrimaryAddress are decisions for the Table; see table.Config.
	ClusterCIDRs      []netip.Prefix
	DetectLocal       table.DetectLocal
	PodInterfaces     []table.Interface
	MasqueradeAll     bool
	NodePortAddresses table.NodePortAddresses
	PrimaryAddress    netip.Addr

	// Servers returns where Client reaches the API server; no Service gets an
	// external or load balancer IP there. It is called in every round. Nil knows
	// only the endpoints of default/kubernetes.
	Servers func() []netip.AddrPort
	// FollowSlices, which may be nil, returns a Sink that passes on to its argument every
	// EndpointSlice that the proxy serves.
	FollowSlices func(reflector.Sink[*discoveryv1.EndpointSlice]) reflector.Sink[*discoveryv1.EndpointSlice]

	// HostPorts returns the host ports of this node's Pods, where nothing else leads to them;
	// nil knows none. OwnPods returns what the node has found out of its Pods, by their UIDs, as
	// table.Builder.SetOwnPods takes it; nil leaves all to the slices. Both are called in every
	// round; PodsChanged asks for one.
	HostPorts func() []svc.HostPorts
	OwnPods   func() map[string]svc.OwnPod
	// Unreached returns the names of the nodes that this one does not reach, whose endpoints come last. It is called in every
	// round; PodsChanged begins one. Nil knows none.
	Unreached func() []string
	// NoLoopback is that of table.Config.
	NoLoopback bool

	// Addresses returns the addresses of this machine, on which node ports may
	// answer. Nil asks the system. It is called every AddressPeriod.
	Addresses func() ([]netip.Addr, error)
	// WatchAddresses calls changed when Addresses should be called at once, until
	// stop is called. Nil watches the system if Addresses is nil, too.
	// link.WatchAddresses is one.
	WatchAddresses func(changed func()) (stop func(), err error)
	// Conntrack opens the kernel's connection tracking table, in the network
	// namespace of the thread that called Run; nil leaves stale entries alone.
	Conntrack func() (Tracker, error)
	// Relayed reports that the mode answers clients itself: what is tracked then
	// leads to a port of this process, and the mode has flows follow their
	// endpoints.
	Relayed bool
	// PortTaken reports whether a socket of this machine is bound to an address;
	// nil skips that check. It is not for modes that listen on node ports
	// themselves. socket.Taken is one.
	PortTaken func(svc.Protocol, netip.AddrPort) bool
	// ServiceCIDRs are the ranges of ClusterIPs where the API has no ServiceCIDRs.
	ServiceCIDRs []netip.Prefix

	// HealthzAddress serves /healthz and /livez, MetricsAddress /metrics,
	// /healthz and /proxyMode, as "IP:port"; empty serves nothing.
	HealthzAddress string
	MetricsAddress string
	// ListenOrFail makes Run return an error, rather than try again, if one of these cannot be listened on.
	ListenOrFail bool
	// Handlers are further paths of MetricsAddress.
	Handlers map[string]http.Handler

	// MinInterval is the least time between the end of one Apply and the start
	// of the next (default 2 ms). It grows with the time that Apply takes, up
	// to MaxInterval (default 250 ms).
	MinInterval, MaxInterval time.Duration
	// RetryMin and RetryMax bound the wait after an error, which doubles from
	// one to the other (defaults 50 ms, 10 s).
	RetryMin, RetryMax time.Duration
	// AuditPeriod is how often everything is compared with the kernel, which
	// repairs drift (default 30 s).
	AuditPeriod time.Duration
	// AddressPeriod is how often Addresses is called (default 5 s).
	AddressPeriod time.Duration
	// ApplyTimeout bounds one Apply (default 5 min).
	ApplyTimeout time.Duration
	// HealthTimeout is how long a change may wait to be programmed before
	// /healthz reports failure (default 1 min).
	HealthTimeout time.Duration
}

// DefaultMaxInterval is that of Options.MaxInterval.
const DefaultMaxInterval = 250 * time.Millisecond

func (o *Options) complete() error {
	switch {
	case o.Client == nil:
		return errors.New("proxy: Options.Client is missing")
	case o.NodeName == "":
		return errors.New("proxy: Options.NodeName is missing")
	case o.Dataplane == nil:
		return errors.New("proxy: Options.Dataplane is missing")
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Addresses == nil {
		o.Addresses = systemAddresses
		if o.WatchAddresses == nil {
			o.WatchAddresses = link.WatchAddresses
		}
	}
	for _, d := range []struct {
		value    *time.Duration
		fallback time.Duration
	}{
		{&o.MinInterval, 2 * time.Millisecond},
		{&o.MaxInterval, DefaultMaxInterval},
		{&o.RetryMin, 50 * time.Millisecond},
		{&o.RetryMax, 10 * time.Second},
		{&o.AuditPeriod, 30 * time.Second},
		{&o.AddressPeriod, 5 * time.Second},
		{&o.ApplyTimeout, 5 * time.Minute},
		{&o.HealthTimeout, time.Minute},
	} {
		if *d.value < 0 {
			return fmt.Errorf("proxy: negative duration %s in Options", *d.value)
		}
		if *d.value == 0 {
			*d.value = d.fallback
		}
	}
	return nil
}

// tableConfig is what the Table is built with.
func (o *Options) tableConfig() table.Config {
	cfg := table.Config{
		NodeName: o.NodeName, ClusterCIDRs: o.ClusterCIDRs, DetectLocal: o.DetectLocal,
		MasqueradeAll: o.MasqueradeAll, NodePortAddresses: o.NodePortAddresses, PrimaryAddress: o.PrimaryAddress,
		NoLoopback: o.NoLoopback, PodInterfaces: o.PodInterfaces,
	}
	if has := o.Schedulers; has != nil {
		cfg.Scheduler = func(annotations map[string]string) (string, error) { return dialect.Scheduler(annotations, has) }
	}
	unable := sync.OnceValue(func() error {
		if o.Forwards == nil || o.NextHops == nil {
			return errors.New("mode " + o.Mode + " of the proxy translates; mode nft passes packets on")
		}
		return o.Forwards()
	})
	cfg.Forwarding = func(annotations map[string]string) (bool, error) {
		return dialect.Forwarding(annotations, o.AllDirect, unable)
	}
	if cfg.Unweighted = o.Unweighted; cfg.Unweighted == nil {
		why := "mode " + o.Mode + " of the proxy chooses evenly; mode ipvs with a scheduler such as wrr follows them, and so do load " +
			"balancers of the proxied way"
		cfg.Unweighted = func(string) string { return why }
	}
	return cfg
}

// Repairer is a dataplane.Applier that reports the drift which its last Apply
// with changed nil has repaired, one line for each thing that was removed or
// altered from outside.
type Repairer interface {
	Repaired() []string
}

// systemAddresses returns the machine's addresses without the virtual ones of kube-proxy's mode ipvs, which may run beside.
func systemAddresses() ([]netip.Addr, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list the machine's addresses: %w", err)
	}
	virtual := map[string]bool{}
	if device, err := net.InterfaceByName(svc.KubeProxyDevice); err == nil {
		theirs, err := device.Addrs()
		if err != nil {
			return nil, fmt.Errorf("list the addresses of %s: %w", device.Name, err)
		}
		for _, a := range theirs {
			virtual[a.String()] = true
		}
	}
	var out []netip.Addr
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil && !virtual[a.String()] {
			out = append(out, p.Addr())
		}
	}
	return out, nil
}
