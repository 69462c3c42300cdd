// Package registry is the storage of every kind that fairlead serves: what is
// defaulted, validated, kept and shown. Each kind has a package below; this
// one puts them together for the API server.
package registry

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/kubernetes"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"github.com/fairlead/fairlead/internal/registry/admission"
	"github.com/fairlead/fairlead/internal/registry/apps"
	"github.com/fairlead/fairlead/internal/registry/certificate"
	"github.com/fairlead/fairlead/internal/registry/configmap"
	"github.com/fairlead/fairlead/internal/registry/endpoint"
	"github.com/fairlead/fairlead/internal/registry/event"
	"github.com/fairlead/fairlead/internal/registry/lease"
	"github.com/fairlead/fairlead/internal/registry/namespace"
	"github.com/fairlead/fairlead/internal/registry/networking"
	"github.com/fairlead/fairlead/internal/registry/node"
	"github.com/fairlead/fairlead/internal/registry/pod"
	"github.com/fairlead/fairlead/internal/registry/policy"
	"github.com/fairlead/fairlead/internal/registry/proxy"
	"github.com/fairlead/fairlead/internal/registry/rbac"
	"github.com/fairlead/fairlead/internal/registry/resourcemetrics"
	"github.com/fairlead/fairlead/internal/registry/resourcequota"
	"github.com/fairlead/fairlead/internal/registry/scheme"
	"github.com/fairlead/fairlead/internal/registry/secret"
	"github.com/fairlead/fairlead/internal/registry/service"
	"github.com/fairlead/fairlead/internal/registry/service/allocator"
	"github.com/fairlead/fairlead/internal/registry/serviceaccount"
	"github.com/fairlead/fairlead/internal/svc"
)

// Scheme knows every served type with its defaults and field labels. It is
// complete when the package is loaded and never changed afterwards.
var Scheme = newScheme()

// Codecs encodes and decodes the types of Scheme as JSON, YAML and protobuf;
// ParameterCodec reads their options from the query of a URL.
var (
	Codecs         = serializer.NewCodecFactory(Scheme)
	ParameterCodec = runtime.NewParameterCodec(Scheme) //nolint:gochecknoglobals // constant in all but name, as Codecs
)

func newScheme() *runtime.Scheme {
	s := scheme.New()
	for _, add := range []func(*runtime.Scheme) error{
		namespace.AddToScheme, node.AddToScheme, pod.AddToScheme, event.AddToScheme, secret.AddToScheme,
		service.AddToScheme, endpoint.AddToScheme, networking.AddToScheme, proxy.AddOptions,
		rbac.AddToScheme, certificate.AddToScheme, admission.AddToScheme, apps.AddToScheme, resourcemetrics.AddToScheme,
	} {
		utilruntime.Must(add(s))
	}
	return s
}

// Options is what the storages need.
type Options struct {
	// RESTOptions gives the back end of each resource.
	RESTOptions generic.RESTOptionsGetter
	// ServiceCIDRs are the service ranges, the preferred family first.
	ServiceCIDRs []netip.Prefix
	// Taken are ranges that no ServiceCIDR but the default may overlap.
	Taken []networking.Taken
	// NodePorts is the range of node ports.
	NodePorts svc.PortRange
	// StrictLoadBalancers rejects new load balancers of several protocols or
	// of SCTP, as Kubernetes did before 1.26.
	StrictLoadBalancers bool
	// Alone is set when no other server writes to the store.
	Alone bool
	// WriteTimeout and RepairPeriod configure the storage of Services.
	WriteTimeout, RepairPeriod time.Duration
	// AgentCredentials is the client certificate shown to the nodes' agents.
	AgentCredentials node.AgentCredentials
	// Security decides who may do what.
	Security Security
	// Log receives what the storages do on their own.
	Log *slog.Logger
}

// Storage is the storages of all kinds.
type Storage struct {
	// Resources are storages by group, version and resource path, for example
	// "pods" or "pods/status".
	Resources map[schema.GroupVersion]map[string]rest.Storage

	services service.Storage
	agents   *node.Agents
}

// New builds the storages of all kinds. Nothing is read or written before
// the first request, or Run.
func New(o Options) (*Storage, error) {
	s := &Storage{Resources: map[schema.GroupVersion]map[string]rest.Storage{}}
	for name, install := range map[string]func(Options) error{
		"simple kinds": s.addSimple, "nodes and pods": s.addNodes, "services": s.addServices, "roles": s.addSecurity,
	} {
		if err := install(o); err != nil {
			return nil, fmt.Errorf("cannot build the storage of %s: %w", name, err)
		}
	}
	core := s.Resources[corev1.SchemeGroupVersion]
	getter := func(resource string) rest.Getter { return core[resource].(rest.Getter) }
	core["serviceaccounts/token"] = serviceaccount.NewToken(getter("serviceaccounts"), serviceaccount.TokenOptions{
		Issuer: o.Security.Tokens, MaxLife: o.Security.MaxTokenLife,
		Pods: getter("pods"), Secrets: getter("secrets"), Nodes: getter("nodes"),
	})
	budgets := s.Resources[policyv1.SchemeGroupVersion]
	core["pods/eviction"] = policy.NewEviction(core["pods"].(policy.Pods), core["pods/status"].(rest.Updater),
		budgets["poddisruptionbudgets"].(rest.Lister), budgets["poddisruptionbudgets/status"].(rest.Updater), getter("nodes"))
	core["services/proxy"] = service.NewProxy(getter("services"), getter("endpoints"), getter("pods"))
	return s, nil
}

// Run does what the storages do besides answering requests, until ctx is done.
// client reaches this server.
func (s *Storage) Run(ctx context.Context, client kubernetes.Interface) {
	s.services.Run(genericapirequest.WithNamespace(ctx, metav1.NamespaceNone), client)
	s.agents.CloseIdle()
}

// Destroy lets go of the storages that are not in Resources. Whoever serves
// Resources destroys those.
func (s *Storage) Destroy() { s.services.Destroy() }

func (s *Storage) add(gv schema.GroupVersion, storages map[string]rest.Storage) {
	if s.Resources[gv] == nil {
		s.Resources[gv] = map[string]rest.Storage{}
	}
	maps.Copy(s.Resources[gv], storages)
}

func (s *Storage) addSimple(o Options) error {
	for _, k := range []struct {
		gv    schema.GroupVersion
		build func(generic.RESTOptionsGetter) (map[string]rest.Storage, error)
	}{
		{corev1.SchemeGroupVersion, namespace.NewStorage},
		{corev1.SchemeGroupVersion, configmap.NewStorage},
		{corev1.SchemeGroupVersion, secret.NewStorage},
		{corev1.SchemeGroupVersion, serviceaccount.NewStorage},
		{corev1.SchemeGroupVersion, resourcequota.NewStorage},
		{coordinationv1.SchemeGroupVersion, lease.NewStorage},
		{networkingv1.SchemeGroupVersion, networking.NewIngressStorage},
		{appsv1.SchemeGroupVersion, apps.NewStorage},
		{policyv1.SchemeGroupVersion, policy.NewStorage},
	} {
		storages, err := k.build(o.RESTOptions)
		if err != nil {
			return err
		}
		s.add(k.gv, storages)
	}
	core, events, err := event.NewStorage(o.RESTOptions)
	if err != nil {
		return err
	}
	s.add(corev1.SchemeGroupVersion, map[string]rest.Storage{"events": core})
	s.add(eventsv1.SchemeGroupVersion, map[string]rest.Storage{"events": events})
	return nil
}

func (s *Storage) addNodes(o Options) error {
	nodes, agents, err := node.NewStorage(o.RESTOptions, o.AgentCredentials, o.Log)
	if err != nil {
		return err
	}
	pods, err := pod.NewStorage(o.RESTOptions, agents)
	if err != nil {
		return err
	}
	s.agents = agents
	s.add(corev1.SchemeGroupVersion, nodes)
	s.add(corev1.SchemeGroupVersion, pods)
	s.add(metricsv1beta1.SchemeGroupVersion,
		resourcemetrics.NewStorage(agents, nodes["nodes"].(resourcemetrics.Source), pods["pods"].(resourcemetrics.Source)))
	return nil
}

func (s *Storage) addServices(o Options) error {
	net, err := networking.NewStorage(o.RESTOptions, o.Taken...)
	if err != nil {
		return err
	}
	ep, err := endpoint.NewStorage(o.RESTOptions)
	if err != nil {
		return err
	}
	s.services, err = service.NewStorage(service.Options{
		Options: allocator.Options{
			RESTOptions: o.RESTOptions, ServiceCIDRs: o.ServiceCIDRs, NodePorts: o.NodePorts,
			Networking: net, Alone: o.Alone, RepairPeriod: o.RepairPeriod, Log: o.Log,
		},
		StrictLoadBalancers: o.StrictLoadBalancers, Endpoints: ep.Endpoints, WriteTimeout: o.WriteTimeout,
	})
	if err != nil {
		return err
	}
	s.add(corev1.SchemeGroupVersion, map[string]rest.Storage{
		"services": s.services.Service, "services/status": s.services.Status, "endpoints": ep.Endpoints,
	})
	s.add(discoveryv1.SchemeGroupVersion, map[string]rest.Storage{"endpointslices": ep.EndpointSlice})
	s.add(networkingv1.SchemeGroupVersion, map[string]rest.Storage{
		"ipaddresses": net.IPAddress, "servicecidrs": net.ServiceCIDR, "servicecidrs/status": net.ServiceCIDRStatus,
	})
	return nil
}
