package parts

import (
	"errors"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/dns"
	"github.com/fairlead/fairlead/internal/zone"
)

// DNSFlags set up the DNS server; 'dns', 'agent' and 'up' have them.
type DNSFlags struct {
	Listen, Domains, Upstream, stubs []string
	hosts, podMode                   string
	autopath, logQueries, prefetch   bool
	cacheSize, maxInFlight           int
	ttl                              uint32
	timeout, serveStale, lameduck    time.Duration
	policy                           string
}

// Add adds the flags to a command.
func (f *DNSFlags) Add(cmd *cobra.Command) {
	flags := cmd.Flags()
	AddClusterDomain(cmd, &f.Domains)
	flags.StringSliceVar(&f.Upstream, "upstream", []string{"/etc/resolv.conf"},
		"resolvers for all other names: IP, IP:PORT, tls://IP#NAME, or one file with nameserver lines")
	flags.StringSliceVar(&f.stubs, "stub-domain", nil, "a domain with other resolvers, DOMAIN=IP[:PORT]; may be repeated")
	flags.StringVar(&f.hosts, "hosts", "", "file in the form of /etc/hosts with further names")
	flags.StringVar(&f.podMode, "pod-records", "insecure", "answers to names of Pods by address: insecure, verified or disabled")
	flags.BoolVar(&f.autopath, "autopath", false, "follow the search path of Pods inside one answer")
	flags.BoolVar(&f.logQueries, "log-queries", false, "log every question, with its client and the time it took")
	flags.Uint32Var(&f.ttl, "dns-ttl", zone.DefaultTTL, "TTL of the cluster's records in seconds, 1 to 3600")
	flags.IntVar(&f.cacheSize, "dns-cache-size", 10000, "answers of upstreams to cache, and as many denials")
	flags.DurationVar(&f.timeout, "upstream-timeout", 2*time.Second, "time for one attempt at one upstream")
	flags.StringVar(&f.policy, "upstream-policy", PolicyRandom, "which upstream is asked first: random or sequential")
	flags.IntVar(&f.maxInFlight, "dns-max-in-flight", 1000, "questions in flight to upstreams, shared among the clients")
	flags.BoolVar(&f.prefetch, "dns-prefetch", true, "ask for answers in frequent use again before they expire")
	flags.DurationVar(&f.serveStale, "dns-serve-stale", time.Hour,
		"how long after it has expired an answer may be used while no upstream answers (RFC 8767); 0 for never")
	flags.DurationVar(&f.lameduck, "dns-lameduck", dns.DefaultLameduck,
		"how long the server still answers when it stops, not ready and withdrawn from kube-dns")
}

// Values of --upstream-policy.
const (
	PolicyRandom     = "random"
	PolicySequential = "sequential"
)

// maxDNSTTL is the longest TTL of the cluster's records, that of CoreDNS.
const maxDNSTTL = 3600

// addLimits sets the options of the cache, the upstreams and the end.
func (f *DNSFlags) addLimits(o *dns.Options) error {
	switch {
	case f.ttl < 1 || f.ttl > maxDNSTTL:
		return base.Usagef("--dns-ttl is %d; want 1 to %d", f.ttl, maxDNSTTL)
	case f.cacheSize < 1:
		return base.Usagef("--dns-cache-size is %d; want 1 or more", f.cacheSize)
	case f.maxInFlight < 1:
		return base.Usagef("--dns-max-in-flight is %d; want 1 or more", f.maxInFlight)
	case f.timeout <= 0:
		return base.Usagef("--upstream-timeout is %s; want more than 0", f.timeout)
	case f.policy != PolicyRandom && f.policy != PolicySequential:
		return base.Usagef("--upstream-policy is %q; want %s", f.policy, base.Wanted(f.policy, []string{PolicyRandom, PolicySequential}))
	case f.serveStale < 0:
		return base.Usagef("--dns-serve-stale is %s; want 0 or more", f.serveStale)
	case f.lameduck < 0:
		return base.Usagef("--dns-lameduck is %s; want 0 or more", f.lameduck)
	}
	o.TTL, o.CacheSize, o.MaxInFlight, o.Timeout = f.ttl, f.cacheSize, f.maxInFlight, f.timeout
	o.Sequential, o.NoPrefetch, o.Lameduck = f.policy == PolicySequential, !f.prefetch, f.lameduck
	if o.Stale = f.serveStale; o.Stale == 0 {
		o.Stale = -1
	}
	return nil
}

// PodModes are the values of --pod-records.
func PodModes() []string {
	return []string{zone.PodsInsecure.String(), zone.PodsVerified.String(), zone.PodsDisabled.String()}
}

// AddClusterDomain adds --cluster-domain.
func AddClusterDomain(cmd *cobra.Command, domains *[]string) {
	cmd.Flags().StringSliceVar(domains, "cluster-domain", []string{dns.DefaultDomain},
		"domain of the cluster's names; the first of several is the one that PTR records name")
}

// CheckDomains rejects what cannot be a domain of the cluster.
func CheckDomains(domains []string) error {
	if len(domains) == 0 {
		return base.Usagef("--cluster-domain is empty; the usual one is %s", dns.DefaultDomain)
	}
	if _, err := zone.New(zone.Config{Domains: domains}); err != nil {
		return base.Usagef("--cluster-domain: %w; the usual one is %s", err, dns.DefaultDomain)
	}
	return nil
}

// Options returns the server's options. Its error is one of usage.
func (f *DNSFlags) Options(networks base.NetworkFlags) (dns.Options, error) {
	o := dns.Options{
		Listen: f.Listen, Domains: f.Domains, ServiceCIDRs: networks.ServiceCIDRs, PodCIDRs: networks.PodCIDRs,
		Hosts: f.hosts, Autopath: f.autopath, LogQueries: f.logQueries, Version: base.Version,
	}
	var err error
	if o.Pods, err = zone.ParsePodMode(f.podMode); err != nil {
		return o, base.Usagef("--pod-records is %q; want %s", f.podMode, base.Wanted(f.podMode, PodModes()))
	}
	if err := CheckDomains(f.Domains); err != nil {
		return o, err
	}
	if err := f.addLimits(&o); err != nil {
		return o, err
	}
	if err := f.addStubs(&o); err != nil {
		return o, err
	}
	if len(f.Upstream) == 1 && strings.HasPrefix(f.Upstream[0], "/") {
		o.ResolvConf = f.Upstream[0]
		return o, nil
	}
	for _, s := range f.Upstream {
		if rest, ok := strings.CutPrefix(s, "tls://"); ok {
			addr, name, _ := strings.Cut(rest, "#")
			at, err := parseResolver(addr, tlsPort)
			if err != nil {
				return o, base.Usagef("--upstream: %q is not of the form tls://IP[:PORT]#NAME with a port of 1 to 65535", s)
			}
			o.TLSUpstream = append(o.TLSUpstream, dns.TLSServer{Addr: at, ServerName: name})
			continue
		}
		at, err := parseResolver(s, dnsPort)
		if err != nil {
			return o, base.Usagef("--upstream: %q is neither IP, nor IP:PORT with a port of 1 to 65535, nor tls://IP#NAME, "+
				"nor the path of a file", s)
		}
		o.Upstream = append(o.Upstream, at)
	}
	return o, nil
}

// The ports of DNS, and of DNS over TLS (RFC 7858).
const dnsPort, tlsPort = 53, 853

func (f *DNSFlags) addStubs(o *dns.Options) error {
	byDomain := map[string]int{}
	for _, s := range f.stubs {
		domain, server, _ := strings.Cut(s, "=")
		at, err := parseResolver(server, dnsPort)
		if err != nil || domain == "" {
			return base.Usagef("--stub-domain: %q is not of the form DOMAIN=IP[:PORT]", s)
		}
		i, known := byDomain[domain]
		if !known {
			i = len(o.Stubs)
			byDomain[domain] = i
			o.Stubs = append(o.Stubs, dns.Stub{Domain: domain})
		}
		o.Stubs[i].Servers = append(o.Stubs[i].Servers, at)
	}
	return nil
}

// parseResolver reads IP or IP:PORT.
func parseResolver(s string, port uint16) (netip.AddrPort, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.AddrPortFrom(a, port), nil
	}
	at, err := netip.ParseAddrPort(s)
	if err == nil && at.Port() == 0 {
		return at, errors.New("port 0 is not valid")
	}
	return at, err
}
