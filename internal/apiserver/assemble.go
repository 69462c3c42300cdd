package apiserver

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	extensionsserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/server/healthz"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	restclient "k8s.io/client-go/rest"
	"k8s.io/component-base/compatibility"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/registry/networking"
	"github.com/fairlead/fairlead/internal/registry/scheme"
)

// watchDrain is how long watches have to end when the server stops; they are
// closed at once.
const watchDrain = 2 * time.Second

// assembly is the server with the parts that Run runs beside it.
type assembly struct {
	generic *genericapiserver.GenericAPIServer
	custom  *customResources
	storage *registry.Storage
	keeper  *endpointKeeper
	client  kubernetes.Interface
	guard   *guard
	quotas  *quotas
	hooks   *hooks
	members *members.API // nil for the only server
	certs   *certificates
}

// assemble builds the generic server on store and installs all kinds.
func (s *Server) assemble(ctx context.Context, store *etcd) (*assembly, error) {
	c := genericapiserver.NewConfig(registry.Codecs)
	s.configureServing(c)
	back := newBackEnd(store, s.opts.Etcd.Prefix)
	back.config.StorageObjectCountTracker = c.StorageObjectCountTracker
	c.RESTOptionsGetter = back
	if err := back.addHealthChecks(c); err != nil {
		return nil, err
	}
	for _, check := range s.opts.ReadyzChecks {
		c.ReadyzChecks = append(c.ReadyzChecks, healthz.NamedCheck(check.Name, func(*http.Request) error { return check.Check() }))
	}
	loopback := s.LoopbackConfig()
	loopback.ContentType = runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(loopback)
	if err != nil {
		return nil, err
	}
	shared := informers.NewSharedInformerFactory(client, 0)
	guard, err := s.newGuard(ctx, client, shared)
	if err != nil {
		return nil, err
	}
	guard.configure(c)
	if back.encryption, err = loadEncryption(ctx, s.opts.Auth.EncryptionConfig, c); err != nil {
		return nil, err
	}
	if err := s.configureAudit(c); err != nil {
		return nil, err
	}
	if store.space != nil {
		guard.plugins = append(guard.plugins, newSpaceAdmission(store.space))
	}
	counter, hooks, err := s.configureAdmission(c, client, shared, guard)
	if err != nil {
		return nil, err
	}
	c.FlowControl = newFairness(shared, client, s.opts.MaxRequests+s.opts.MaxMutatingRequests)
	keeper := newEndpointKeeper(client, s.alone(), s.log)
	keeper.report = s.certReport
	if a := s.opts.AdvertiseAddress; a.IsValid() {
		keeper.self = netip.AddrPortFrom(a, s.Port())
	}
	if err := s.addHooks(c, client, keeper, guard); err != nil {
		return nil, err
	}
	several, err := s.newMembers(c, store, guard, keeper)
	if err != nil {
		return nil, err
	}
	custom, err := newCustomResources(*c, shared, back, hooks, s.alone())
	if err != nil {
		return nil, err
	}
	generic, err := c.Complete(shared).New("fairlead", custom.GenericAPIServer)
	if err != nil {
		return nil, err
	}
	serveGroups(generic)
	if err := generic.AddPreShutdownHook("fairlead/leave", keeper.leave); err != nil {
		return nil, err
	}
	storage, err := registry.New(registry.Options{
		RESTOptions: c.RESTOptionsGetter, ServiceCIDRs: s.opts.ServiceCIDRs, Taken: s.taken(), NodePorts: s.opts.NodePorts,
		StrictLoadBalancers: s.opts.StrictLoadBalancers, Alone: s.alone(),
		WriteTimeout: s.opts.ServiceWriteTimeout, RepairPeriod: s.opts.RepairPeriod,
		AgentCredentials: s.creds.agentCertificate, Log: s.log, Security: guard.security(hooks.resolve),
	})
	if err != nil {
		return nil, err
	}
	generic.RegisterDestroyFunc(storage.Destroy)
	if err := install(generic, storage.Resources); err != nil {
		return nil, err
	}
	if err := guard.serve(generic); err != nil {
		return nil, err
	}
	if store.space != nil {
		generic.Handler.NonGoRestfulMux.Handle(StorePath, store.space)
	}
	s.serveMembers(generic, several)
	certs := s.newCertificates(client, shared.Core().V1().Nodes().Lister(), keeper, guard, store)
	generic.Handler.NonGoRestfulMux.Handle(CertificatesPath, certs)
	return &assembly{generic, custom, storage, keeper, client, guard, counter, hooks, several, certs}, custom.join(generic)
}

// taken returns the ranges that a ServiceCIDR must not overlap, as nodes would drop the
// packets to Pods, or to this server.
func (s *Server) taken() (out []networking.Taken) {
	for _, p := range s.opts.PodCIDRs {
		out = append(out, networking.Taken{Prefix: p, By: "the range of Pods (--cluster-cidr)"})
	}
	for _, a := range append([]netip.Addr{s.opts.AdvertiseAddress}, s.opts.BindAddresses...) {
		at := netip.PrefixFrom(a, a.BitLen())
		if a.IsValid() && !a.IsUnspecified() && !slices.ContainsFunc(out, func(t networking.Taken) bool { return t.Prefix == at }) {
			out = append(out, networking.Taken{Prefix: at, By: "an address of this API server"})
		}
	}
	return out
}

// auditMetadata is the policy of an audit log for which none is given.
const auditMetadata = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
`

// configureAudit has the server write the audit log that was asked for.
func (s *Server) configureAudit(c *genericapiserver.Config) error {
	audit := s.opts.Auth.Audit
	if audit == nil {
		return nil
	}
	if err := s.defaultAuditPolicy(audit); err != nil {
		return err
	}
	if err := audit.ApplyTo(c); err != nil {
		return fmt.Errorf("the audit log: %w", err)
	}
	return nil
}

// configureAdmission has the plugins of guard, webhooks, Pod security and quotas admit what is written.
func (s *Server) configureAdmission(
	c *genericapiserver.Config, client kubernetes.Interface, shared informers.SharedInformerFactory, guard *guard,
) (*quotas, *hooks, error) {
	counter, enforcer, err := newQuotas(client, shared, c.DrainedNotify(), s.opts.DefaultQuota, s.log)
	if err != nil {
		return nil, nil, err
	}
	hooks, err := s.newHooks(c, client, shared)
	if err != nil {
		return nil, nil, err
	}
	security, err := newPodSecurity(s.opts.PodSecurity, client, shared.Core().V1().Namespaces().Lister(), guard.authorizer)
	if err != nil {
		return nil, nil, err
	}
	// Quotas are last: what another plugin rejects does not count.
	c.AdmissionControl, err = hooks.chain(guard.plugins, security, admission.NewChainHandler(counter, enforcer))
	return counter, hooks, err
}

// defaultAuditPolicy has an audit log without a policy write who did what, without
// the content; k8s.io/apiserver would write nothing, and takes a policy from a file
// alone.
func (s *Server) defaultAuditPolicy(o *genericoptions.AuditOptions) error {
	if o.PolicyFile != "" || o.LogOptions.Path == "" && o.WebhookOptions.ConfigFile == "" {
		return nil
	}
	o.PolicyFile = s.dir.file("audit-policy.yaml")
	return fileio.Replace(o.PolicyFile, []byte(auditMetadata), 0o600)
}

// prepare returns the server, ready to run.
func (a *assembly) prepare() interface{ RunWithContext(context.Context) error } {
	p := a.generic.PrepareRun()
	a.custom.describe(a.generic)
	rejectUnknownDocuments(a.generic)
	return p
}

// configureServing sets the part of the configuration that does not depend on the
// store.
func (s *Server) configureServing(c *genericapiserver.Config) {
	c.SecureServing = &genericapiserver.SecureServingInfo{Listener: s.listener, Cert: s.creds.serving, ClientCA: s.creds.clients}
	c.LoopbackClientConfig = s.LoopbackConfig()
	c.ExternalAddress = strings.TrimPrefix(s.publicURL(), "https://")
	c.EffectiveVersion = effectiveVersion{compatibility.NewEffectiveVersionFromString("1.36", "", ""), s.opts.GitVersion}
	c.EnableProfiling = false
	c.ShutdownWatchTerminationGracePeriod = watchDrain
	c.LongRunningFunc = genericfilters.BasicLongRunningRequestCheck(
		sets.NewString("watch", "proxy"), sets.NewString("attach", "exec", "proxy", "log", "portforward"))
	c.BuildHandlerChainFunc = func(h http.Handler, c *genericapiserver.Config) http.Handler {
		h = s.endStalled(genericapiserver.DefaultBuildHandlerChain(shortcutWatches(h), c), c)
		if s.joining != nil {
			h = s.joining(h)
		}
		return h
	}
	c.AggregatedDiscoveryGroupManager = aggregated.NewResourceManager("apis")
	namer := openapinamer.NewDefinitionNamer(scheme.Versioned(), extensionsserver.Scheme)
	c.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(openAPIDefinitions, namer)
	c.OpenAPIConfig.Info.Title = "fairlead"
	c.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(openAPIDefinitions, namer)
	c.OpenAPIV3Config.Info.Title = "fairlead"
}

// install serves resources, core/v1 under /api and the groups under /apis.
func install(s *genericapiserver.GenericAPIServer, resources map[schema.GroupVersion]map[string]rest.Storage) error {
	var groups []*genericapiserver.APIGroupInfo
	for _, gv := range sortedVersions(resources) {
		info := genericapiserver.NewDefaultAPIGroupInfo(gv.Group, registry.Scheme, registry.ParameterCodec, registry.Codecs)
		info.NegotiatedSerializer = wholeFrames{info.NegotiatedSerializer}
		info.PrioritizedVersions = []schema.GroupVersion{gv}
		info.VersionedResourcesStorageMap[gv.Version] = resources[gv]
		if gv.Group == "" {
			if err := s.InstallLegacyAPIGroup(genericapiserver.DefaultLegacyAPIPrefix, &info); err != nil {
				return fmt.Errorf("cannot install %s: %w", gv, err)
			}
			continue
		}
		groups = append(groups, &info)
	}
	if len(groups) == 0 {
		return nil
	}
	if err := s.InstallAPIGroups(groups...); err != nil {
		return fmt.Errorf("cannot install the API groups: %w", err)
	}
	return nil
}

// effectiveVersion reports fairlead's version string.
type effectiveVersion struct {
	compatibility.EffectiveVersion
	gitVersion string
}

// Info returns the answer of /version.
func (v effectiveVersion) Info() *version.Info {
	info := v.EffectiveVersion.Info()
	info.GitVersion, info.GitCommit, info.GitTreeState = v.gitVersion, "", ""
	return info
}

func unversioned(c *restclient.Config) *restclient.Config {
	c.NegotiatedSerializer = clientscheme.Codecs.WithoutConversion()
	c.GroupVersion = &schema.GroupVersion{}
	return c
}
