package runner

import (
	"cmp"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/runner/api"
	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/logfile"
	"github.com/fairlead/fairlead/internal/runner/podnet"
)

// DefaultPodPIDs is the default of Options.PodPIDs.
const DefaultPodPIDs = 1024

// PodNetwork is how packets get to Pods of other nodes.
type PodNetwork = podnet.Mode

// The values of PodNetwork.
const (
	PodNetworkAuto        = podnet.Auto
	PodNetworkHostGateway = podnet.HostGateway
	PodNetworkVXLAN       = podnet.VXLAN
	PodNetworkNone        = podnet.None
)

// PodNetworks are the values of PodNetwork.
func PodNetworks() []string { return podnet.Modes() }

// PodsRouted is the Node condition that is True while the node has a route to the Pods of each other node.
const PodsRouted = podnet.PodsRouted

// UIDRange are otherwise unused users and groups of the machine, for Pods that are not allowed to be privileged.
type UIDRange = confinement.UIDRange

// DefaultUIDRange is the default of Options.UIDs.
var DefaultUIDRange = confinement.DefaultUIDRange

// ParseUIDRange reads FIRST-LAST.
func ParseUIDRange(s string) (UIDRange, error) { return confinement.ParseUIDRange(s) }

// Options configure a Runner.
type Options struct {
	// Client talks to the API server. Its rate limit should be far above
	// client-go's default of 5 a second.
	Client   kubernetes.Interface
	NodeName string
	// StateDir holds what must survive a restart, mode 0700; nothing else may
	// use it.
	StateDir string
	// ShimCommand starts a shim, by default the embedded program, or without one
	// this program with "pod-shim", for which it must import package shim/early.
	ShimCommand []string
	// Device is the network device that holds the node's own addresses among
	// its pods, by default fl0.
	Device string
	// ClusterCIDRs are the ranges of all pods of the cluster. Packets of pods to
	// other places get the node's address, and a Node whose range is not a part of
	// them gets no routes.
	ClusterCIDRs []netip.Prefix
	// PodNetwork is how pods of other nodes are reached, by default PodNetworkHostGateway;
	// Overlay is for VXLAN.
	PodNetwork PodNetwork
	Overlay    link.OverlayOptions
	// WireGuard encrypts all that goes to pods of other nodes, in place of PodNetwork; nil for
	// not at all. Run closes it.
	WireGuard *link.WireGuard
	// Plain has pods of nodes without a key reached as PodNetwork has it, while nodes begin to encrypt one after the other.
	Plain bool
	// ServiceCIDRs are the ranges of ClusterIPs, ServerAddrs the addresses of the
	// API server: no route to pods may take them.
	ServiceCIDRs []netip.Prefix
	ServerAddrs  []netip.Addr
	// Images are the programs that stand for images.
	Images podspec.Images
	// ClusterDNS are the name servers of pods, ClusterDomain the domain they
	// serve, by default cluster.local.
	ClusterDNS    []netip.Addr
	ClusterDomain string
	// Listener is where the HTTPS endpoint for logs, exec and port-forward is
	// served; nil for none. Run closes it.
	Listener net.Listener
	// ClientCA signs the one client that the endpoint accepts, whose common name
	// is fairlead-apiserver.
	ClientCA func() (*x509.CertPool, error)
	// Status is what GET /status answers, as JSON; nil for none.
	Status func() any
	// Views are further things that the endpoint answers, as api.Options has them; nil for none.
	Views map[string]api.View
	// Trace is as api.Options has it, nil for none.
	Trace api.Trace
	// Handlers answer at their paths, and below if they end in a slash; nil for none.
	Handlers map[string]http.Handler
	// StopPods ends all pods when Run ends, within StopTimeout (by default 10
	// s). Otherwise they go on, and the next run adopts them.
	StopPods    bool
	StopTimeout time.Duration
	// DrainWait is how long a pod that is being deleted, and that a Service selects, waits
	// at most until no node sends it new connections; zero for not at all.
	DrainWait time.Duration
	// BackOff is the delay before the second restart of a container, doubled
	// for each further one up to 5 min; by default 10 s.
	BackOff time.Duration
	// UIDs are the users for pods that are not allowed to be privileged, by default
	// DefaultUIDRange.
	UIDs UIDRange
	// StaticDir has the files of static pods, which run whatever the API server has;
	// "" for none. It must belong to root.
	StaticDir string
	// Mirrors creates the Pods that show static ones in the API; by default Client. One of a
	// node needs the right to create Pods in a namespace for mirrors with labels.
	Mirrors kubernetes.Interface
	// Hold keeps pods of the API server from starting until it is closed; nil for not at all.
	// Static ones do not wait.
	Hold <-chan struct{}
	// NodeSet and NodeUnset, which may be nil, get every Node as it is now, and the names of those
	// that are gone, one call at a time: others need not watch the Nodes a second time.
	NodeSet   func(*corev1.Node)
	NodeUnset func(name string)
	// PodsChanged, which may be nil, is called after what HostPorts or OwnPods return has changed.
	// It must not block.
	PodsChanged func()
	// Hide are directories that such pods do not see, beside StateDir.
	Hide []string
	// PodPIDs bounds the processes of each pod that is not allowed to be privileged,
	// by default DefaultPodPIDs.
	PodPIDs int64
	// Protect keeps the kernel from killing this process when memory is short, where
	// it may.
	Protect bool
	// LogLimit bounds the output kept of each container; zero for 5 files of
	// 10 MiB.
	LogLimit logfile.Limit
	Log      *slog.Logger
}

// complete checks the options and sets defaults.
func (o *Options) complete() error {
	if o.Client == nil || o.NodeName == "" || o.StateDir == "" {
		return errors.New("runner: Client, NodeName and StateDir are required")
	}
	if o.Listener != nil && o.ClientCA == nil {
		return errors.New("runner: the endpoint needs ClientCA")
	}
	if o.Mirrors == nil {
		o.Mirrors = o.Client
	}
	o.Device = cmp.Or(o.Device, "fl0")
	o.ClusterDomain = cmp.Or(o.ClusterDomain, "cluster.local")
	o.UIDs = cmp.Or(o.UIDs, DefaultUIDRange)
	if o.StopTimeout <= 0 {
		o.StopTimeout = 10 * time.Second
	}
	if o.PodPIDs <= 0 {
		o.PodPIDs = DefaultPodPIDs
	}
	if o.BackOff <= 0 {
		o.BackOff = 10 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	dir, err := filepath.Abs(o.StateDir)
	if err == nil {
		o.StateDir = dir
		err = os.MkdirAll(podsDir(dir), 0o700)
	}
	if err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	if o.ShimCommand == nil {
		o.ShimCommand = shimCommand(dir, o.Log)
	}
	return nil
}
