package dns

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/dns/membership"
	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/zone"
)

// udpSize is the largest answer sent over UDP and the size announced: it fits
// every path without fragments (the DNS flag day of 2020).
const udpSize = 1232

// Defaults of Options.
const (
	DefaultDomain      = "cluster.local"
	defaultTimeout     = 2 * time.Second
	defaultMaxInFlight = 1000
	defaultCacheSize   = 10000
	defaultStale       = time.Hour
	defaultMaxConns    = 1000
	// DefaultLameduck is as long as CoreDNS's in the manifests of kubeadm.
	DefaultLameduck = 5 * time.Second
)

// Options are the options of a Server. Only Listen has no default.
type Options struct {
	// Client reads the Services, EndpointSlices and Namespaces that the zone is
	// made from. If it is nil, the caller fills the zone (Zone) and the Server is
	// ready at once.
	Client kubernetes.Interface
	// Progress gets which versions of Services and EndpointSlices are answered; nil
	// for none.
	Progress *barrier.Progress
	// Listen are the addresses to answer on, over UDP and TCP, such as
	// "10.0.0.5:53", "[::1]:53" or ":53". Port 0 takes a free one.
	Listen []string
	// Domains are the cluster domains; PTR records lead to the first. The
	// default is cluster.local.
	Domains []string
	// ServiceCIDRs and PodCIDRs are the ranges whose reverse names are never
	// asked of an upstream.
	ServiceCIDRs, PodCIDRs []netip.Prefix
	// Pods is how names of pods by address are answered.
	Pods zone.PodMode
	// TTL of the cluster's records in seconds; 0 means 5.
	TTL uint32

	// Upstream are the resolvers for all other names.
	Upstream []netip.AddrPort
	// TLSUpstream are resolvers that are asked over TLS; they join Upstream.
	TLSUpstream []TLSServer
	// ResolvConf is a file whose nameserver lines are used when Upstream and
	// TLSUpstream are empty; it is read again when it changes.
	ResolvConf string
	// Stubs are domains with their own resolvers.
	Stubs []Stub
	// Sequential asks the upstreams in the order given instead of starting
	// with a random healthy one.
	Sequential bool
	// PlainCase sends names to upstreams in lower case. Otherwise letters
	// have random case, which an answer must repeat: about 20 more bits for a
	// forger to guess.
	PlainCase bool
	// Timeout for one attempt at one upstream.
	Timeout time.Duration
	// MaxInFlight bounds the questions in flight to upstreams.
	MaxInFlight int
	// NoPrefetch lets answers expire that are asked for often, instead of asking
	// for them again before.
	NoPrefetch bool
	// CacheSize is the number of cached answers of upstreams, and of cached
	// denials.
	CacheSize int
	// Stale is how long after it has expired an answer may be used if no
	// upstream answers (RFC 8767); negative means never.
	Stale time.Duration

	// Hosts is a file in the form of hosts(5) with names that are answered
	// from it. It is read again when it changes.
	Hosts string
	// Autopath follows the search path of pods inside one answer: a question
	// for www.example.com.NS.svc.DOMAIN is answered with a CNAME to
	// www.example.com and its addresses. It saves the clients six questions
	// of eight, and the cost is that such names seem to exist.
	Autopath bool

	// Version is a label of coredns_build_info.
	Version string

	// Publish lists this server behind the Service kube-system/kube-dns.
	Publish *membership.Self
	// NodeLocal answers questions to the Service kube-dns on this node itself.
	NodeLocal *NodeLocal
	// Lameduck is how long after ctx ends the server still answers, not Ready and
	// no longer behind kube-dns, so that clients stop sending to it first. A
	// published server without another one behind kube-dns does so for 250 ms.
	Lameduck time.Duration

	// Workers is the number of sockets for each listening address, among which the
	// kernel spreads the clients (SO_REUSEPORT). Default: half of GOMAXPROCS, at
	// least 1. With a socket for each processor a question costs a fifth more of
	// CPU, because fewer of them are taken at once, and on a machine that its
	// clients keep busy their p99 is two to three times as long.
	Workers int
	// MaxConns bounds the TCP connections of clients.
	MaxConns int
	// LogQueries logs every question.
	LogQueries bool
	// Questions, if not nil, is shown questions.
	Questions seen.Questions
	Logger    *slog.Logger
}

// Stub is a domain that is forwarded to its own resolvers.
type Stub struct {
	Domain  string
	Servers []netip.AddrPort
}

// withDefaults returns o with its defaults, or an error if it is invalid.
func (o Options) withDefaults() (Options, error) {
	if len(o.Listen) == 0 {
		return o, errors.New("dns: no address to listen on given; for example 127.0.0.1:53")
	}
	for _, l := range o.Listen {
		addrs, err := parseListen(l)
		if err != nil {
			return o, err
		}
		if o.NodeLocal.conflictsWith(addrs) {
			return o, fmt.Errorf("dns: --listen %s includes the addresses of --node-local; "+
				"listen on addresses of this node, such as 192.0.2.5:53, or on another port", l)
		}
	}
	if len(o.Domains) == 0 {
		o.Domains = []string{DefaultDomain}
	}
	setDefault(&o.Timeout, defaultTimeout)
	setDefault(&o.MaxInFlight, defaultMaxInFlight)
	setDefault(&o.CacheSize, defaultCacheSize)
	setDefault(&o.Stale, defaultStale)
	setDefault(&o.MaxConns, defaultMaxConns)
	setDefault(&o.Workers, max(1, runtime.GOMAXPROCS(0)/2))
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if p := o.Publish; p != nil {
		if o.Client == nil || p.NodeName == "" || len(p.Addresses) == 0 || p.Port == 0 {
			return o, errors.New("dns: publishing behind kube-dns needs an API client, a node name, an address and a port")
		}
	}
	return o, nil
}

func (o *Options) zoneConfig() zone.Config {
	return zone.Config{
		Domains:    o.Domains,
		Reverse:    append(append([]netip.Prefix(nil), o.ServiceCIDRs...), o.PodCIDRs...),
		TTL:        o.TTL,
		Pods:       o.Pods,
		NameServer: membership.Service(),
		Serial:     uint32(time.Now().Unix()),
	}
}

// Check returns the error that New would return for o, without reading files.
func (o Options) Check() error {
	o, err := o.withDefaults()
	if err != nil {
		return err
	}
	_, err = zone.New(o.zoneConfig())
	return err
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// parseListen reads a listening address; without a host it is the unspecified
// address of both families.
func parseListen(s string) ([]netip.AddrPort, error) {
	wrong := fmt.Errorf("dns: invalid address to listen on %q: want IP:PORT, [IP]:PORT or :PORT", s)
	host, portText, err := net.SplitHostPort(s)
	if err != nil {
		return nil, wrong
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil {
		return nil, wrong
	}
	if host == "" {
		return []netip.AddrPort{
			netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(port)),
			netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(port)),
		}, nil
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return nil, wrong
	}
	return []netip.AddrPort{netip.AddrPortFrom(a.Unmap(), uint16(port))}, nil
}
