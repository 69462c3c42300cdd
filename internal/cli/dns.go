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
	autopath, logQueries             bool
}

func (f *dnsFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringSliceVar(&f.domains, "cluster-domain", []string{dns.DefaultDomain},
		"domain of the cluster's names; the first of several is the one that PTR records name")
	flags.StringSliceVar(&f.upstream, "upstream", []string{"/etc/resolv.conf"},
		"resolvers for all other names: IP, IP:PORT, tls://IP#NAME, or one file with nameserver lines")
	flags.StringSliceVar(&f.stubs, "stub-domain", nil, "a domain with resolvers of its own, DOMAIN=IP[:PORT]; may be repeated")
	flags.StringVar(&f.hosts, "hosts", "", "file in the form of /etc/hosts with further names")
	flags.StringVar(&f.podMode, "pod-records", "insecure", "answers to names of Pods by address: insecure, verified or disabled")
	flags.BoolVar(&f.autopath, "autopath", false, "follow the search path of Pods inside one answer")
	flags.BoolVar(&f.logQueries, "log-queries", false, "log every question")
}

// options returns the server's options. Its error is one of usage.
func (f *dnsFlags) options(networks networkFlags) (dns.Options, error) {
	o := dns.Options{
		Listen: f.listen, Domains: f.domains, ServiceCIDRs: networks.serviceCIDRs, PodCIDRs: networks.podCIDRs,
		Hosts: f.hosts, Autopath: f.autopath, LogQueries: f.logQueries,
	}
	var err error
	if o.Pods, err = zone.ParsePodMode(f.podMode); err != nil {
		return o, usagef("--pod-records: %w", err)
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

func newDNS(g *global) *cobra.Command {
	var f dnsFlags
	var c clientFlags
	networks := defaultNetworks()
	var metrics string
	var nodeLocal addrsValue
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
			opts, err := f.options(networks)
			if err != nil {
				return err
			}
			if len(nodeLocal) > 0 {
				opts.NodeLocal = &dns.NodeLocal{Addresses: nodeLocal}
			}
			if err := opts.Check(); err != nil {
				return usageError{err}
			}
			if err := checkBind("metrics-bind-address", metrics); err != nil {
				return err
			}
			cfg, _, err := c.load()
			if err != nil {
				return err
			}
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
			parts := []component{{name: "dns", run: func(ctx context.Context) error { return runSmall(ctx, log, server) }}}
			if metrics != "" {
				parts = append(parts, httpComponent("dns metrics", metrics, server.Handler()))
			}
			return runAll(cmd.Context(), log, func() {}, parts...)
		},
	}
	c.add(cmd)
	f.add(cmd)
	cmd.Flags().StringSliceVar(&f.listen, "listen", []string{"127.0.0.1:53"}, "IP:PORT to answer on, UDP and TCP; may be repeated")
	cmd.Flags().Var(&nodeLocal, "node-local", "cluster IPs of kube-dns to answer for on this node itself, "+
		"on port 53, without connection tracking; needs root (default: none)")
	cmd.Flags().StringVar(&metrics, "metrics-bind-address", "127.0.0.1:9153", "IP:PORT of /metrics, /ready and /health; empty for none")
	networks.addNetworks(cmd, "ranges whose reverse names are answered here and never asked of an upstream",
		"ranges of the Pods' addresses, likewise")
	return cmd
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
