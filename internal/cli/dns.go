package cli

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/dns"
	"github.com/fairlead/fairlead/internal/zone"
)

// dnsFlags set up the DNS server; 'dns', 'agent' and 'up' have them.
type dnsFlags struct {
	listen, domains, upstream, stubs []string
	hosts, podMode                   string
	autopath, logQueries, prefetch   bool
	cacheSize, maxInFlight           int
	ttl                              uint32
	timeout, serveStale, lameduck    time.Duration
	policy                           string
}

func (f *dnsFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	addClusterDomain(cmd, &f.domains)
	flags.StringSliceVar(&f.upstream, "upstream", []string{"/etc/resolv.conf"},
		"resolvers for all other names: IP, IP:PORT, tls://IP#NAME, or one file with nameserver lines")
	flags.StringSliceVar(&f.stubs, "stub-domain", nil, "a domain with resolvers of its own, DOMAIN=IP[:PORT]; may be repeated")
	flags.StringVar(&f.hosts, "hosts", "", "file in the form of /etc/hosts with further names")
	flags.StringVar(&f.podMode, "pod-records", "insecure", "answers to names of Pods by address: insecure, verified or disabled")
	flags.BoolVar(&f.autopath, "autopath", false, "follow the search path of Pods inside one answer")
	flags.BoolVar(&f.logQueries, "log-queries", false, "log every question, with its client and the time it took")
	flags.Uint32Var(&f.ttl, "dns-ttl", zone.DefaultTTL, "TTL of the cluster's records in seconds, 1 to 3600")
	flags.IntVar(&f.cacheSize, "dns-cache-size", 10000, "answers of upstreams to cache, and as many denials")
	flags.DurationVar(&f.timeout, "upstream-timeout", 2*time.Second, "time for one attempt at one upstream")
	flags.StringVar(&f.policy, "upstream-policy", policyRandom, "which upstream is asked first: random or sequential")
	flags.IntVar(&f.maxInFlight, "dns-max-in-flight", 1000, "questions in flight to upstreams, shared among the clients")
	flags.BoolVar(&f.prefetch, "dns-prefetch", true, "ask for answers in frequent use again before they expire")
	flags.DurationVar(&f.serveStale, "dns-serve-stale", time.Hour,
		"how long after it has expired an answer may be used while no upstream answers (RFC 8767); 0 for never")
	flags.DurationVar(&f.lameduck, "dns-lameduck", dns.DefaultLameduck,
		"how long the server still answers when it stops, not ready and withdrawn from kube-dns")
}

// Values of --upstream-policy.
const policyRandom, policySequential = "random", "sequential"

// maxDNSTTL is the longest TTL of the cluster's records, that of CoreDNS.
const maxDNSTTL = 3600

// addLimits sets the options of the cache, the upstreams and the end.
func (f *dnsFlags) addLimits(o *dns.Options) error {
	switch {
	case f.ttl < 1 || f.ttl > maxDNSTTL:
		return usagef("--dns-ttl is %d; want 1 to %d", f.ttl, maxDNSTTL)
	case f.cacheSize < 1:
		return usagef("--dns-cache-size is %d; want 1 or more", f.cacheSize)
	case f.maxInFlight < 1:
		return usagef("--dns-max-in-flight is %d; want 1 or more", f.maxInFlight)
	case f.timeout <= 0:
		return usagef("--upstream-timeout is %s; want more than 0", f.timeout)
	case f.policy != policyRandom && f.policy != policySequential:
		return usagef("--upstream-policy is %q; want %s", f.policy, wanted(f.policy, []string{policyRandom, policySequential}))
	case f.serveStale < 0:
		return usagef("--dns-serve-stale is %s; want 0 or more", f.serveStale)
	case f.lameduck < 0:
		return usagef("--dns-lameduck is %s; want 0 or more", f.lameduck)
	}
	o.TTL, o.CacheSize, o.MaxInFlight, o.Timeout = f.ttl, f.cacheSize, f.maxInFlight, f.timeout
	o.Sequential, o.NoPrefetch, o.Lameduck = f.policy == policySequential, !f.prefetch, f.lameduck
	if o.Stale = f.serveStale; o.Stale == 0 {
		o.Stale = -1
	}
	return nil
}

// podModes are the values of --pod-records.
func podModes() []string {
	return []string{zone.PodsInsecure.String(), zone.PodsVerified.String(), zone.PodsDisabled.String()}
}

func addClusterDomain(cmd *cobra.Command, domains *[]string) {
	cmd.Flags().StringSliceVar(domains, "cluster-domain", []string{dns.DefaultDomain},
		"domain of the cluster's names; the first of several is the one that PTR records name")
}

// checkDomains rejects what cannot be a domain of the cluster.
func checkDomains(domains []string) error {
	if len(domains) == 0 {
		return usagef("--cluster-domain is empty; the usual one is %s", dns.DefaultDomain)
	}
	if _, err := zone.New(zone.Config{Domains: domains}); err != nil {
		return usagef("--cluster-domain: %w; the usual one is %s", err, dns.DefaultDomain)
	}
	return nil
}

// options returns the server's options. Its error is one of usage.
func (f *dnsFlags) options(networks networkFlags) (dns.Options, error) {
	o := dns.Options{
		Listen: f.listen, Domains: f.domains, ServiceCIDRs: networks.serviceCIDRs, PodCIDRs: networks.podCIDRs,
		Hosts: f.hosts, Autopath: f.autopath, LogQueries: f.logQueries,
	}
	var err error
	if o.Pods, err = zone.ParsePodMode(f.podMode); err != nil {
		return o, usagef("--pod-records is %q; want %s", f.podMode, wanted(f.podMode, podModes()))
	}
	if err := checkDomains(f.domains); err != nil {
		return o, err
	}
	if err := f.addLimits(&o); err != nil {
		return o, err
	}
	if err := f.addStubs(&o); err != nil {
		return o, err
	}
	if len(f.upstream) == 1 && strings.HasPrefix(f.upstream[0], "/") {
		o.ResolvConf = f.upstream[0]
		return o, nil
	}
	for _, s := range f.upstream {
		if rest, ok := strings.CutPrefix(s, "tls://"); ok {
			addr, name, _ := strings.Cut(rest, "#")
			at, err := parseResolver(addr, tlsPort)
			if err != nil {
				return o, usagef("--upstream: %q is not of the form tls://IP[:PORT]#NAME", s)
			}
			o.TLSUpstream = append(o.TLSUpstream, dns.TLSServer{Addr: at, ServerName: name})
			continue
		}
		at, err := parseResolver(s, dnsPort)
		if err != nil {
			return o, usagef("--upstream: %q is neither IP, nor IP:PORT, nor tls://IP#NAME, nor the path of a file", s)
		}
		o.Upstream = append(o.Upstream, at)
	}
	return o, nil
}

// The ports of DNS, and of DNS over TLS (RFC 7858).
const dnsPort, tlsPort = 53, 853

func (f *dnsFlags) addStubs(o *dns.Options) error {
	byDomain := map[string]int{}
	for _, s := range f.stubs {
		domain, server, _ := strings.Cut(s, "=")
		at, err := parseResolver(server, dnsPort)
		if err != nil || domain == "" {
			return usagef("--stub-domain: %q is not of the form DOMAIN=IP[:PORT]", s)
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
	return netip.ParseAddrPort(s)
}

// dnsCommand is 'fairlead dns': a DNS server alone in its process.
type dnsCommand struct {
	dnsFlags
	client            clientFlags
	networks          networkFlags
	nodeLocal         addrsValue
	configureResolver bool
	metrics           string
}

func newDNS(g *global) *cobra.Command {
	c := dnsCommand{networks: defaultNetworks()}
	cmd := &cobra.Command{
		Use:   "dns",
		Short: "Run the cluster DNS on any Kubernetes API, in place of CoreDNS",
		Example: `  fairlead dns --kubeconfig /etc/kubernetes/dns.conf --listen 10.0.0.5:53
  fairlead dns --kubeconfig F --listen :53 --upstream 192.0.2.53 --cluster-domain cluster.local
  fairlead dns --kubeconfig F --node-local 10.96.0.10   # on every node, as NodeLocal DNSCache`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := g.logger()
			if err != nil {
				return err
			}
			opts, err := c.serverOptions()
			if err != nil {
				return err
			}
			return c.run(cmd.Context(), log, opts)
		},
	}
	c.client.add(cmd)
	c.add(cmd)
	cmd.Flags().StringSliceVar(&c.listen, "listen", []string{"127.0.0.1:53"}, "IP:PORT to answer on, UDP and TCP; may be repeated")
	cmd.Flags().Var(&c.nodeLocal, "node-local", "cluster IPs of kube-dns to answer for on this node itself, "+
		"on port 53, without connection tracking; needs root (default: none)")
	addConfigureResolver(cmd, &c.configureResolver)
	cmd.Flags().StringVar(&c.metrics, "metrics-bind-address", "127.0.0.1:9153", "IP:PORT of /metrics, /ready and /health; empty for none")
	c.networks.addNetworks(cmd, "ranges whose reverse names are answered here and never asked of an upstream",
		"ranges of the Pods' addresses, likewise")
	return cmd
}

// serverOptions checks all flags and returns what the server needs of them. Its error is one of usage.
func (c *dnsCommand) serverOptions() (dns.Options, error) {
	opts, err := c.options(c.networks)
	if err != nil {
		return opts, err
	}
	if len(c.nodeLocal) > 0 {
		opts.NodeLocal = &dns.NodeLocal{Addresses: c.nodeLocal}
	}
	if err := opts.Check(); err != nil {
		return opts, usageError{err}
	}
	if err := checkBind("metrics-bind-address", c.metrics); err != nil {
		return opts, err
	}
	if c.configureResolver && len(c.nodeLocal) == 0 {
		return opts, usagef("--configure-resolver needs --node-local: programs ask on port 53 of an address of this machine alone")
	}
	return opts, checkResolver(c.configureResolver)
}

// run serves until ctx is done.
func (c *dnsCommand) run(ctx context.Context, log *slog.Logger, opts dns.Options) error {
	cfg, _, err := c.client.load()
	if err != nil {
		return err
	}
	if len(c.nodeLocal) > 0 {
		held, err := dnsLock.wait(ctx, log)
		if err != nil {
			return err
		}
		defer held.Close()
	}
	defer beside(ctx, func(ctx context.Context) { warnOfInlineCertificate(ctx, log, cfg) })()
	cfg = agentConfig(cfg)
	cfg.UserAgent = "fairlead-dns/" + version
	// Packing the first lists takes both sides longer than a network
	// takes to carry them.
	cfg.DisableCompression = true
	if opts.Client, err = kubernetes.NewForConfig(cfg); err != nil {
		return err
	}
	opts.Logger = log
	server, err := dns.New(opts)
	if err != nil {
		return err
	}
	return runAll(ctx, log, func() {}, c.components(log, server)...)
}

// components returns the parts of the process in the order in which they start; they stop in the reverse order.
func (c *dnsCommand) components(log *slog.Logger, server *dns.Server) []component {
	var parts []component
	if c.metrics != "" { // first, so that /ready is 503 while the server stops
		parts = append(parts, httpComponent("dns metrics", c.metrics, server.Handler()))
	}
	answers := component{
		name: "dns", run: func(ctx context.Context) error { return runSmall(ctx, log, server) }, drain: server.Drain,
	}
	if !c.configureResolver {
		return append(parts, answers)
	}
	answers.ready = func(ctx context.Context) error { return untilTrue(ctx, server.Ready) }
	return append(parts, answers, resolverComponent(log, c.nodeLocal[0]))
}

// runSmall runs a DNS server that is alone in its process, and releases memory
// when it is ready, which may be long after it was started.
func runSmall(ctx context.Context, log *slog.Logger, server *dns.Server) error {
	started := collectLater()
	var releasing sync.WaitGroup
	defer releasing.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	releasing.Go(func() {
		if untilTrue(ctx, server.Ready) == nil {
			started()
			releaseMemory(log)
		}
	})
	return server.Run(ctx)
}

// optionalHTTP serves h on one address, and retries while the address cannot be
// listened on: what it serves is not worth a node's end.
func optionalHTTP(log *slog.Logger, name, addr string, h http.Handler) component {
	c := httpComponent(name, addr, h)
	serve := c.run
	c.run = func(ctx context.Context) error {
		for failed := false; ; failed = true {
			err := serve(ctx)
			if ctx.Err() != nil {
				return nil
			}
			if !failed {
				log.Warn("cannot serve "+name+"; retrying", "address", addr, "err", err, "in", httpRetry)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(httpRetry):
			}
		}
	}
	return c
}

// httpRetry is the time between attempts to listen.
const httpRetry = time.Second

// httpComponent serves h on one address.
func httpComponent(name, addr string, h http.Handler) component {
	return component{name: name, run: func(ctx context.Context) error {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
		stop := context.AfterFunc(ctx, func() { server.Close() })
		defer stop()
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	}}
}
