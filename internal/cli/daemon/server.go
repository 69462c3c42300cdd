package daemon

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/admit"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/node"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/controller"
	"github.com/fairlead/fairlead/internal/registry/resourcequota"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/ui"
)

// serverFlags set up the API server; 'server' and 'up' have them.
type serverFlags struct {
	apiserver.Options
	base.NetworkFlags
	binds     base.Addrs
	advertise string
	nodePorts base.PortRange
	quota     map[string]string
	// unreachable is that of --default-unreachable-toleration-seconds.
	unreachable time.Duration
	masks       nodeMasks
}

func (f *serverFlags) add(cmd *cobra.Command) {
	f.NetworkFlags = node.DefaultNetworks()
	f.nodePorts = base.PortRange{First: 30000, Last: 32767}
	flags := cmd.Flags()
	flags.StringVar(&f.DataDir, "data-dir", base.DefaultDataDir(), "directory of the server's state: certificates, kubeconfig, etcd")
	flags.Uint16Var(&f.SecurePort, "secure-port", apiserver.DefaultPort, "port of the API")
	flags.StringVar(&f.advertise, "advertise-address", "",
		"address of this server in the Service default/kubernetes (default: the first bind address that is not loopback; none if all are)")
	f.AddNetworks(cmd, "range of ClusterIPs, or one of each family; the first is preferred",
		"range of the Pods' addresses, or one of each family; each node gets a part of it, see --node-cidr-mask-size-ipv4")
	f.masks.add(flags)
	flags.Var(&f.nodePorts, "service-node-port-range", "range of node ports")
	flags.BoolVar(&f.StrictLoadBalancers, "strict-load-balancers", false,
		"reject new load balancers whose ports have several protocols, or SCTP without a loadBalancerClass")
	flags.BoolVar(&f.AllowServiceExternalIPs, "allow-service-external-ips", false,
		"let every user who may write a Service add spec.externalIPs, with which a user can capture the traffic to any address; "+
			"otherwise that needs the verb \"use\" on services/externalips")
	addUnreachableToleration(cmd, &f.unreachable)
	flags.StringVar(&f.PodSecurity, "pod-security-default", admit.DefaultPodSecurity,
		"level of the Pod Security Standards for Pods in namespaces without its labels: privileged, baseline or restricted, "+
			"with a version after a colon unless it is the latest; users with the verb \"use\" on pods/privileged, such as "+
			"administrators, are exempt")
	flags.StringToStringVar(&f.quota, "default-namespace-quota", nil,
		"limits of the ResourceQuota that each namespace without one gets, except system namespaces and namespaces "+
			"with the annotation fairlead.dev/default-quota=none, "+
			"for example count/services=50,fairlead.dev/bytes=100Mi")
	flags.DurationVar(&f.ServiceWriteTimeout, "service-write-timeout", apiserver.DefaultServiceWriteTimeout,
		"longest that a write of a Service may take; addresses and node ports claimed for one and not used are freed after three times as long")
	flags.DurationVar(&f.RepairPeriod, "allocation-repair-period", apiserver.DefaultRepairPeriod,
		"time between two comparisons of the addresses that Services use with the claimed ones")
	flags.IntVar(&f.MaxRequests, "max-requests-inflight", apiserver.DefaultMaxRequests,
		"requests answered at a time; --max-mutating-requests-inflight is added, and priority and fairness share the sum")
	flags.IntVar(&f.MaxMutatingRequests, "max-mutating-requests-inflight", apiserver.DefaultMaxMutatingRequests, "see --max-requests-inflight")
	flags.IntVar(&f.MaxWatchesPerUser, "max-watches-per-user", apiserver.DefaultMaxWatches,
		"watches that a user may have at a time, except members of system:masters")
	flags.DurationVar(&f.CertificateLife, "cluster-signing-duration", apiserver.DefaultCertificateLife,
		"longest life of the certificates that the server makes and signs; they are renewed when a third of it, at most 30 days, is left")
	flags.IntVar(&f.NodeTokenNodes, "node-token-nodes", apiserver.DefaultNodeTokenNodes,
		"how many nodes may join with the token in the file node-token of --data-dir; 'fairlead token create --nodes' makes further tokens")
	addAuthFlags(cmd, &f.Auth)
	flags.Int64Var(&f.EtcdQuota, "etcd-quota-bytes", store.DefaultQuota,
		"size at which the embedded etcd is full: users can then only delete; the file grows to a quarter more")
	flags.IntVar(&f.BackupKeep, "backup-keep", 7,
		"how many nightly backups of the embedded etcd and the keys stay in the directory backups of --data-dir; 0 for none")
	flags.StringSliceVar(&f.Etcd.Servers, "etcd-servers", nil, "client URLs of an etcd cluster to use in place of the embedded one")
	flags.StringVar(&f.Etcd.CAFile, "etcd-cafile", "",
		"certificate authority of the etcd cluster; this file and the next two are read again for every connection")
	flags.StringVar(&f.Etcd.CertFile, "etcd-certfile", "", "client certificate for the etcd cluster")
	flags.StringVar(&f.Etcd.KeyFile, "etcd-keyfile", "", "key of the client certificate")
}

// complete moves the parsed flags into the Options.
func (f *serverFlags) complete() error {
	f.BindAddresses, f.Release = f.binds, base.Version
	if f.BackupKeep < 0 {
		return base.Usagef("--backup-keep is %d; want 0 or more", f.BackupKeep)
	}
	f.Options.ServiceCIDRs, f.Options.PodCIDRs = f.NetworkFlags.ServiceCIDRs, f.NetworkFlags.PodCIDRs
	f.Static, f.Questions = map[string]http.Handler{ui.Path: ui.Files()}, ui.Questions
	f.NodePorts = svc.PortRange(f.nodePorts)
	if f.advertise != "" {
		a, err := netip.ParseAddr(f.advertise)
		if err != nil {
			return base.Usagef("--advertise-address: %q is not an IP address", f.advertise)
		}
		f.AdvertiseAddress = a
	}
	for name, limit := range f.quota {
		q, err := resource.ParseQuantity(limit)
		if err != nil || q.Sign() < 0 || !resourcequota.Counted(corev1.ResourceName(name)) {
			return base.Usagef("--default-namespace-quota %s=%s: want a resource of Kubernetes, count/RESOURCE.GROUP or %s, and a quantity",
				name, limit, resourcequota.Bytes)
		}
		if f.DefaultQuota == nil {
			f.DefaultQuota = corev1.ResourceList{}
		}
		f.DefaultQuota[corev1.ResourceName(name)] = q
	}
	for _, pods := range f.NetworkFlags.PodCIDRs {
		if i := slices.IndexFunc(f.NetworkFlags.ServiceCIDRs, pods.Overlaps); i >= 0 {
			return base.Usagef("--cluster-cidr %s and --service-cluster-ip-range %s overlap: a Service's address must not be a Pod's", pods,
				f.NetworkFlags.ServiceCIDRs[i])
		}
	}
	return nil
}

// NewServer returns 'fairlead server'.
func NewServer(g *base.Global) *cobra.Command {
	f := &serverFlags{}
	var controllers controller.Options
	var lb parts.LBFlags
	var several severalFlags
	var spans lifecycle.SpanFlags
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Run the API server and the controllers",
		Long: `Run the API server and the controllers on an etcd of their own, or on an etcd
cluster. At the first start certificates and an administrator's kubeconfig are
made in the data directory; existing ones are used.
With --cluster-init and --join several servers have one cluster, in which any of three may
fail; once one has joined it goes on as one of them whatever the flags.`,
		Example: `  fairlead server
  fairlead server --bind-address 127.0.0.1,192.0.2.10 --data-dir /srv/fairlead
  fairlead server --bind-address 127.0.0.1,192.0.2.10 --cluster-init
  fairlead token create --server > server-token
  fairlead server --bind-address 127.0.0.1,192.0.2.11 --join https://192.0.2.10:6443 --token-file server-token
  fairlead server --audit-policy-file audit.yaml --audit-log-path /var/log/fairlead-audit.log
  fairlead server --oidc-issuer-url https://login.example.com --oidc-client-id fairlead --oidc-groups-claim groups
  fairlead server --etcd-servers https://192.0.2.1:2379 --etcd-cafile ca.crt --etcd-certfile c.crt --etcd-keyfile c.key`,
		Args: base.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.complete(); err != nil {
				return err
			}
			if err := several.check(cmd, &f.Options); err != nil {
				return err
			}
			if err := parts.CheckDomains(f.Domains); err != nil {
				return err
			}
			if err := spans.Check(); err != nil {
				return err
			}
			return lb.Check(f.NetworkFlags)
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return serve(cmd.Context(), g, f, &several, &lb, &spans, controllers)
		},
	}
	f.add(cmd)
	several.add(cmd, &f.Options)
	lb.Add(cmd)
	spans.Add(cmd)
	f.binds = base.Addrs{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	parts.AddClusterDomain(cmd, &f.Domains)
	cmd.Flags().Var(&f.binds, "bind-address", "addresses to listen on")
	addControllerNames(cmd, &controllers.Controllers)
	addPeerVerdicts(cmd, &controllers)
	return cmd
}

// serve runs a server with its controllers until ctx ends.
func serve(
	ctx context.Context, g *base.Global, f *serverFlags, several *severalFlags, lb *parts.LBFlags, spans *lifecycle.SpanFlags,
	controllers controller.Options,
) error {
	log, err := g.Logger()
	if err != nil {
		return err
	}
	f.Log = log
	if err := f.masks.ranges(&controllers, f.NetworkFlags.PodCIDRs); err != nil {
		return err
	}
	if err := several.join(ctx, &f.Options); err != nil {
		return err
	}
	controllers.Health, controllers.UnreachableToleration = addControllersCheck(&f.Options), f.unreachable
	if !noControllers(controllers) {
		f.Definitions = lb.Definitions()
	}
	traces, components, err := spans.Open(log, "server", base.Hostname())
	if err != nil {
		return err
	}
	f.Traces, controllers.Traces = traces, traces
	server, err := apiserver.New(f.Options)
	if err != nil {
		return err
	}
	components = append(components, serverComponent(server))
	if c, err := controllersComponent(log, server.ControllersConfig, controllers); err != nil {
		return err
	} else if c.Run != nil {
		components = append(components, c, lb.ControllerComponent(log, server.ControllersConfig))
	}
	return lifecycle.RunAll(ctx, log, func() { serverSummary(g.Out, server, f.binds) }, components...)
}

// serverSummary prints where everything is, and the commands to type next.
func serverSummary(out io.Writer, s *apiserver.Server, binds []netip.Addr) {
	fmt.Fprintf(out, `API server   %s
kubeconfig   %s
join token   %s
page         %s, or: fairlead ui

next         export KUBECONFIG=%[2]s && kubectl get svc
`, s.URL(), s.Kubeconfig(), s.TokenFile(), s.URL()+ui.Path)
	i := slices.IndexFunc(binds, func(a netip.Addr) bool { return !a.IsLoopback() })
	if i < 0 {
		fmt.Fprintln(out, "add a node   only on this machine: for others, start it with --bind-address 127.0.0.1,ADDRESS")
		return
	}
	at := binds[i]
	if at.IsUnspecified() {
		at = s.AdvertiseAddress()
	}
	fmt.Fprintf(out, "add a node   fairlead agent --server https://%s --token-file FILE\n", netip.AddrPortFrom(at, s.Port()))
}

func serverComponent(s *apiserver.Server) lifecycle.Component {
	alive := func(ctx context.Context) error {
		client, err := kubernetes.NewForConfig(s.ControllersConfig())
		if err != nil {
			return err
		}
		return client.CoreV1().RESTClient().Get().AbsPath("/livez/ping").Do(ctx).Error()
	}
	return lifecycle.Component{Name: "API server", Run: s.Run, Ready: lifecycle.UntilClosed(s.Ready()), Alive: alive}
}
