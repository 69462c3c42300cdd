package apiserver

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/access"
	"github.com/fairlead/fairlead/internal/apiserver/admit"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/apiserver/watch"
	"github.com/fairlead/fairlead/internal/registry/service"
	"github.com/fairlead/fairlead/internal/registry/service/allocator"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/tracing"
)

// Options configure a server. The zero value of a field means the default named
// with it, except where another meaning is given.
type Options struct {
	// DataDir holds everything the server keeps; required.
	DataDir string

	// BindAddresses are the addresses to listen on; default 127.0.0.1.
	BindAddresses []netip.Addr
	// SecurePort is the TCP port on all of them; 0 lets the system choose one.
	SecurePort uint16
	// Listeners are further sockets to serve on, already listening, for
	// example one that belongs to another network namespace. The server closes
	// them.
	Listeners []*net.TCPListener
	// AdvertiseAddress is where others reach this server: the endpoint of the
	// Service default/kubernetes. Default: the first bind address that is not
	// loopback, else none, since nothing would listen there.
	AdvertiseAddress netip.Addr
	// Names are further DNS names for the server's certificate.
	Names []string

	// ServiceCIDRs are the service ranges, at most one of a family; the first
	// is the preferred family. Default 10.96.0.0/16 and fd00:10:96::/112.
	ServiceCIDRs []netip.Prefix
	// PodCIDRs and Domains are the ranges of the Pods' addresses and the domains of the
	// cluster's names, which the server only publishes for its nodes.
	PodCIDRs []netip.Prefix
	Domains  []string
	// NodePorts is the range of node ports; default 30000-32767.
	NodePorts svc.PortRange
	// StrictLoadBalancers rejects new load balancers whose ports have several
	// protocols, or SCTP without a loadBalancerClass; default false.
	StrictLoadBalancers bool
	// AllowServiceExternalIPs lets everybody who may write a Service give it external
	// IPs; otherwise that needs the right to use services/externalips.
	AllowServiceExternalIPs bool
	// PodSecurity is the level of the Pod Security Standards for Pods in namespaces
	// without labels, with or without a version: baseline, restricted:v1.37. Those who
	// have the right to use pods/privileged are free of it. Default
	// DefaultPodSecurity.
	PodSecurity string
	// DefaultQuota are the limits of the ResourceQuota "default" that a namespace
	// without a quota gets; nil for none. System namespaces get none.
	DefaultQuota corev1.ResourceList
	// ServiceWriteTimeout is the longest that a write of a Service may take;
	// default 1 minute. Claims of an unfinished write are freed after three times
	// as long.
	ServiceWriteTimeout time.Duration
	// RepairPeriod is the time between two repairs of the claims of addresses
	// and node ports; default 1 minute.
	RepairPeriod time.Duration

	// MaxRequests plus MaxMutatingRequests is the number of concurrent requests;
	// watches count only until they have begun. Requests beyond it wait or get
	// 429; see serve.NewFairness. Default 400 and 200.
	MaxRequests, MaxMutatingRequests int
	// MaxWatchesPerUser is how many watches a user may have; members of system:masters may have any number. Default
	// DefaultMaxWatches.
	MaxWatchesPerUser int

	// StallTimeout is how long a client may not read at all while there is something
	// to send to it, of a watch or an answer; it is cut off then. Default
	// DefaultStallTimeout.
	StallTimeout time.Duration

	// CertificateLife is how long the certificates are valid that the server makes
	// for itself and signs for others, at most; default 1 year. They are renewed
	// when a third of it, at most 30 days, is left.
	CertificateLife time.Duration
	// NodeTokenNodes is how many nodes may join with the token in the file node-token; default DefaultNodeTokenNodes.
	NodeTokenNodes int
	// Auth configures authentication, the audit log and encryption at rest.
	Auth access.AuthOptions

	// ClusterInit makes the embedded etcd the first member of several, which others join. It is
	// without effect on a server that is one of several already.
	ClusterInit bool
	// Join leads to the cluster that this server joins at its first start, after the function Join.
	Join JoinOptions
	// ServerName is the name of a server among several; default the host's name. It stays what
	// it was at the first start.
	ServerName string
	// EtcdPeerPort is the TCP port at AdvertiseAddress where the etcds of other servers reach this
	// one's; default DefaultEtcdPeerPort.
	EtcdPeerPort uint16

	// Etcd names an etcd cluster to use in place of the embedded one.
	Etcd store.External
	// EtcdQuota is the size in bytes at which the embedded etcd counts as full and
	// rejects writes of users; default store.DefaultQuota, at least store.MinQuota.
	EtcdQuota int64
	// BackupKeep is how many nightly backups the data directory keeps; 0 makes none. Release is
	// the version of fairlead that is written into them.
	BackupKeep int
	Release    string
	// UnsafeNoFsync makes the embedded etcd lose acknowledged writes when the
	// machine (not only the process) crashes. For tests.
	UnsafeNoFsync bool

	// Definitions returns CustomResourceDefinitions by their names, in JSON, that the server stores at its start unless it has
	// ones of these names; nil for none. They come with the program: they are not validated.
	Definitions func() (map[string]json.RawMessage, error)

	// Static has, by path, handlers that answer everyone at that path and below it: they must serve nothing but files.
	Static map[string]http.Handler
	// Questions returns, by path, handlers that answer with the rights of the user who asks; it gets what returns a client
	// configuration that acts as the user of a request. Each authenticated user may ask them.
	Questions func(as func(*http.Request) (*rest.Config, error)) map[string]http.Handler

	// Traces sends spans of writes; nil for none.
	Traces *tracing.Tracer

	// ReadyzChecks are further checks of /readyz.
	ReadyzChecks []ReadyzCheck

	// GitVersion is what /version reports; default join.Version.
	GitVersion string
	// Log receives the server's messages; default slog.Default.
	Log *slog.Logger
}

// ReadyzCheck is a check of /readyz. Check returns what is wrong; it must not block.
type ReadyzCheck struct {
	Name  string
	Check func() error
}

// Defaults of Options.
const (
	DefaultPort = 6443
	// DefaultEtcdPeerPort is etcd's own.
	DefaultEtcdPeerPort = 2380

	DefaultServiceWriteTimeout = service.DefaultWriteTimeout
	DefaultRepairPeriod        = allocator.DefaultRepairPeriod

	DefaultCertificateLife = pki.LeafLife

	DefaultNodeTokenNodes = 10

	DefaultStallTimeout = 30 * time.Second

	// DefaultMaxRequests and DefaultMaxMutatingRequests are kube-apiserver's.
	DefaultMaxRequests         = 400
	DefaultMaxMutatingRequests = 200
	// DefaultMaxWatches is enough for an agent on each of some hundred nodes with one account.
	DefaultMaxWatches = watch.DefaultMaxWatches
)

// complete fills in the defaults and rejects what cannot work.
func (o *Options) complete() error {
	if o.DataDir == "" {
		return errors.New("no data directory given: pass --data-dir DIR")
	}
	if len(o.BindAddresses) == 0 {
		o.BindAddresses = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	}
	if len(o.ServiceCIDRs) == 0 {
		o.ServiceCIDRs = join.DefaultServiceCIDRs()
	}
	if err := checkServiceCIDRs(o.ServiceCIDRs); err != nil {
		return err
	}
	if o.NodePorts == (svc.PortRange{}) {
		o.NodePorts = svc.PortRange{First: 30000, Last: 32767}
	}
	o.MaxRequests = cmp.Or(o.MaxRequests, DefaultMaxRequests)
	o.MaxMutatingRequests = cmp.Or(o.MaxMutatingRequests, DefaultMaxMutatingRequests)
	if o.MaxRequests < 0 || o.MaxMutatingRequests < 0 {
		return errors.New("--max-requests-inflight and --max-mutating-requests-inflight must not be negative; leave them out for the defaults")
	}
	if o.MaxWatchesPerUser < 0 {
		return fmt.Errorf("--max-watches-per-user is %d; give 1 or more, or 0 for %d", o.MaxWatchesPerUser, DefaultMaxWatches)
	}
	o.MaxWatchesPerUser = cmp.Or(o.MaxWatchesPerUser, DefaultMaxWatches)
	if o.AdvertiseAddress.IsValid() && (o.AdvertiseAddress.IsLoopback() || o.AdvertiseAddress.IsUnspecified()) {
		return fmt.Errorf("--advertise-address %s cannot be reached by others: "+
			"give an address of this machine that they can reach, or leave it out", o.AdvertiseAddress)
	}
	if o.PodSecurity == "" {
		o.PodSecurity = admit.DefaultPodSecurity
	}
	if _, err := admit.ParsePodSecurity(o.PodSecurity); err != nil {
		return err
	}
	if o.EtcdQuota == 0 {
		o.EtcdQuota = store.DefaultQuota
	}
	if o.EtcdQuota < store.MinQuota {
		return fmt.Errorf("--etcd-quota-bytes %d is too small: give at least %d", o.EtcdQuota, int64(store.MinQuota))
	}
	if o.EtcdPeerPort == 0 {
		o.EtcdPeerPort = DefaultEtcdPeerPort
	}
	if o.ServerName != "" {
		if err := members.CheckName(o.ServerName); err != nil {
			return err
		}
	}
	if e := o.Etcd; (e.CertFile == "") != (e.KeyFile == "") {
		return errors.New("--etcd-certfile and --etcd-keyfile belong together: give both or none")
	}
	o.StallTimeout = cmp.Or(o.StallTimeout, DefaultStallTimeout)
	o.CertificateLife = cmp.Or(o.CertificateLife, DefaultCertificateLife)
	if o.CertificateLife < time.Second || o.CertificateLife > pki.AuthorityLife {
		return fmt.Errorf("--cluster-signing-duration is %s: want 1s to %s", o.CertificateLife, pki.AuthorityLife)
	}
	o.NodeTokenNodes = cmp.Or(o.NodeTokenNodes, DefaultNodeTokenNodes)
	if o.NodeTokenNodes < 1 || o.NodeTokenNodes > join.MaxNodes {
		return fmt.Errorf("--node-token-nodes is %d: want 1 to %d", o.NodeTokenNodes, join.MaxNodes)
	}
	if err := o.Auth.Complete(); err != nil {
		return err
	}
	o.Etcd.Prefix = cmp.Or(o.Etcd.Prefix, store.DefaultPrefix)
	o.GitVersion = cmp.Or(o.GitVersion, join.Version)
	o.Log = cmp.Or(o.Log, slog.Default())
	return nil
}

// minServiceAddresses leaves room for the first and the tenth address.
const minServiceAddresses = 16

func checkServiceCIDRs(cidrs []netip.Prefix) error {
	if len(cidrs) > 2 {
		return fmt.Errorf("%d service ranges given: want one, or one of each family", len(cidrs))
	}
	for i, c := range cidrs {
		if !c.IsValid() || c != c.Masked() {
			return fmt.Errorf("%s is not a service range: want a network such as 10.96.0.0/16", c)
		}
		if i > 0 && c.Addr().Is4() == cidrs[0].Addr().Is4() {
			return fmt.Errorf("service ranges %s and %s are of one family: give at most one of each", cidrs[0], c)
		}
		if free := c.Addr().BitLen() - c.Bits(); free < 31 && 1<<free < minServiceAddresses {
			return fmt.Errorf("service range %s is too small: it needs at least %d addresses", c, minServiceAddresses)
		}
	}
	return nil
}
