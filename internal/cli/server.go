package cli

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/controller"
	"github.com/fairlead/fairlead/internal/registry/resourcequota"
	"github.com/fairlead/fairlead/internal/svc"
)

// serverFlags set up the API server; 'server' and 'up' have them.
type serverFlags struct {
	apiserver.Options
	networkFlags
	binds     addrsValue
	advertise string
	nodePorts portRangeValue
	quota     map[string]string
	// unreachable is that of --default-unreachable-toleration-seconds.
	unreachable time.Duration
}

func (f *serverFlags) add(cmd *cobra.Command) {
	f.networkFlags = defaultNetworks()
	f.nodePorts = portRangeValue{First: 30000, Last: 32767}
	flags := cmd.Flags()
	flags.StringVar(&f.DataDir, "data-dir", defaultDataDir(), "directory of all that the server keeps: certificates, kubeconfig, etcd")
	flags.Uint16Var(&f.SecurePort, "secure-port", apiserver.DefaultPort, "port of the API")
	flags.StringVar(&f.advertise, "advertise-address", "",
		"address of this server in the Service default/kubernetes (default: the first bind address that is not loopback; none if all are)")
	f.addNetworks(cmd, "range of ClusterIPs, or one of each family; the first is preferred",
		"range of the Pods' addresses, or one of each family; each node gets a /24 or a /64 of it")
	flags.Var(&f.nodePorts, "service-node-port-range", "range of node ports")
	flags.BoolVar(&f.StrictLoadBalancers, "strict-load-balancers", false,
		"reject new load balancers whose ports have several protocols, or SCTP without a loadBalancerClass")
	flags.BoolVar(&f.AllowServiceExternalIPs, "allow-service-external-ips", false,
		"let everybody who may write a Service add spec.externalIPs, with which a user can capture the traffic to any address; "+
			"otherwise that needs the verb \"use\" on services/externalips")
	addUnreachableToleration(cmd, &f.unreachable)
	flags.StringVar(&f.PodSecurity, "pod-security-default", apiserver.DefaultPodSecurity,
		"level of the Pod Security Standards for Pods in namespaces without labels of it: privileged, baseline or restricted, "+
			"with a version after a colon if it is not to be the latest; users with the verb \"use\" on pods/privileged, such as "+
			"administrators, are free of it")
	flags.StringToStringVar(&f.quota, "default-namespace-quota", nil,
		"limits of the ResourceQuota that each namespace without one gets, but system namespaces and those "+
			"with the annotation fairlead.dev/default-quota=none, "+
			"for example count/services=50,fairlead.dev/bytes=100Mi")
	flags.DurationVar(&f.ServiceWriteTimeout, "service-write-timeout", apiserver.DefaultServiceWriteTimeout,
		"longest that a write of a Service may take; addresses and node ports claimed for one and not used are freed after three times as long")
	flags.DurationVar(&f.RepairPeriod, "allocation-repair-period", apiserver.DefaultRepairPeriod,
		"time between two comparisons of what Services use with what is claimed")
	flags.IntVar(&f.MaxRequests, "max-requests-inflight", apiserver.DefaultMaxRequests,
		"requests answered at a time, to which come those of --max-mutating-requests-inflight; the sum is shared out by priority and fairness")
	flags.IntVar(&f.MaxMutatingRequests, "max-mutating-requests-inflight", apiserver.DefaultMaxMutatingRequests, "see --max-requests-inflight")
	flags.DurationVar(&f.CertificateLife, "cluster-signing-duration", apiserver.DefaultCertificateLife,
		"longest life of the certificates that the server makes and signs; they are renewed when a third of it, at most 30 days, is left")
	addAuthFlags(cmd, &f.Auth)
	flags.Int64Var(&f.EtcdQuota, "etcd-quota-bytes", apiserver.DefaultEtcdQuota,
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
	f.BindAddresses, f.Release = f.binds, version
	if f.BackupKeep < 0 {
		return usagef("--backup-keep is %d; want 0 or more", f.BackupKeep)
	}
	f.ServiceCIDRs, f.PodCIDRs = f.serviceCIDRs, f.podCIDRs
	f.NodePorts = svc.PortRange(f.nodePorts)
	if f.advertise != "" {
		a, err := netip.ParseAddr(f.advertise)
		if err != nil {
			return usagef("--advertise-address: %q is not an IP address", f.advertise)
		}
		f.AdvertiseAddress = a
	}
	for name, limit := range f.quota {
		q, err := resource.ParseQuantity(limit)
		if err != nil || q.Sign() < 0 || !resourcequota.Counted(corev1.ResourceName(name)) {
			return usagef("--default-namespace-quota %s=%s: want count/RESOURCE, count/RESOURCE.GROUP or %s, and a quantity",
				name, limit, resourcequota.Bytes)
		}
		if f.DefaultQuota == nil {
			f.DefaultQuota = corev1.ResourceList{}
		}
		f.DefaultQuota[corev1.ResourceName(name)] = q
	}
	for _, pods := range f.podCIDRs {
		if i := slices.IndexFunc(f.serviceCIDRs, pods.Overlaps); i >= 0 {
			return usagef("--cluster-cidr %s and --service-cluster-ip-range %s overlap: a Service's address must not be a Pod's", pods,
				f.serviceCIDRs[i])
		}
	}
	return nil
}

func newServer(g *global) *cobra.Command {
	f := &serverFlags{}
	var controllers controller.Options
	var lb lbFlags
	var several severalFlags
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Run the API server and the controllers",
		Long: `Run the API server and the controllers on an etcd of their own, or on an etcd
cluster. At the first start certificates and an administrator's kubeconfig are
made in the data directory; certificates that are there already are used.
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
		Args: noArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.complete(); err != nil {
				return err
			}
			if err := several.check(cmd, &f.Options); err != nil {
				return err
			}
			if err := checkDomains(f.Domains); err != nil {
				return err
			}
			return lb.check(f.networkFlags)
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return g.serve(cmd.Context(), f, &several, &lb, controllers)
		},
	}
	f.add(cmd)
	several.add(cmd, &f.Options)
	lb.add(cmd)
	f.binds = addrsValue{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	addClusterDomain(cmd, &f.Domains)
	cmd.Flags().Var(&f.binds, "bind-address", "addresses to listen on")
	addControllerNames(cmd, &controllers.Controllers)
	addPeerVerdicts(cmd, &controllers)
	cmd.AddCommand(newServerMembers(g), newServerRemove(g))
	return cmd
}

// serve runs a server with its controllers until ctx ends.
func (g *global) serve(ctx context.Context, f *serverFlags, several *severalFlags, lb *lbFlags, controllers controller.Options) error {
	log, err := g.logger()
	if err != nil {
		return err
	}
	f.Log = log
	if err := several.join(ctx, &f.Options); err != nil {
		return err
	}
	controllers.ClusterCIDRs, controllers.Health = f.podCIDRs, addControllersCheck(&f.Options)
	controllers.UnreachableToleration = f.unreachable
	server, err := apiserver.New(f.Options)
	if err != nil {
		return err
	}
	parts := []component{serverComponent(server)}
	if c, err := controllersComponent(log, server.ControllersConfig, controllers); err != nil {
		return err
	} else if c.run != nil {
		parts = append(parts, c, lb.controllerComponent(log, server.ControllersConfig))
	}
	return runAll(ctx, log, func() { g.serverSummary(server, f.binds) }, parts...)
}

// serverSummary prints where everything is, and the commands to type next.
func (g *global) serverSummary(s *apiserver.Server, binds []netip.Addr) {
	fmt.Fprintf(g.out, `API server   %s
kubeconfig   %s
join token   %s

next         export KUBECONFIG=%[2]s && kubectl get svc
`, s.URL(), s.Kubeconfig(), s.TokenFile())
	i := slices.IndexFunc(binds, func(a netip.Addr) bool { return !a.IsLoopback() })
	if i < 0 {
		fmt.Fprintln(g.out, "add a node   only on this machine: for others, start it with --bind-address 127.0.0.1,ADDRESS")
		return
	}
	at := binds[i]
	if at.IsUnspecified() {
		at = s.AdvertiseAddress()
	}
	fmt.Fprintf(g.out, "add a node   fairlead agent --server https://%s --token-file FILE\n", netip.AddrPortFrom(at, s.Port()))
}

func serverComponent(s *apiserver.Server) component {
	return component{name: "API server", run: s.Run, ready: untilClosed(s.Ready()), alive: func(ctx context.Context) error {
		client, err := kubernetes.NewForConfig(s.ControllersConfig())
		if err != nil {
			return err
		}
		return client.CoreV1().RESTClient().Get().AbsPath("/livez/ping").Do(ctx).Error()
	}}
}
