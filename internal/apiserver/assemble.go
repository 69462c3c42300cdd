package apiserver

import (
	"context"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	extensionsserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	restclient "k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/access"
	"github.com/fairlead/fairlead/internal/apiserver/admit"
	"github.com/fairlead/fairlead/internal/apiserver/backend"
	"github.com/fairlead/fairlead/internal/apiserver/certs"
	"github.com/fairlead/fairlead/internal/apiserver/custom"
	"github.com/fairlead/fairlead/internal/apiserver/documents"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/rotation"
	"github.com/fairlead/fairlead/internal/apiserver/serve"
	"github.com/fairlead/fairlead/internal/apiserver/space"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/apiserver/watch"
	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/relay"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/registry/networking"
	"github.com/fairlead/fairlead/internal/registry/scheme"
)

// spaceCheck is the check of /readyz for the space of the embedded etcd.
const spaceCheck = "etcd-space"

// watchDrain is the time that watches get to end when the server stops; they are
// closed at once.
const watchDrain = 2 * time.Second

// assembly is a server that runs on a store: the generic server and the parts that run beside it. The
// steps of assemble fill in the fields in their order.
type assembly struct {
	*Server
	store  *store.Store
	config *genericapiserver.Config

	backend  *backend.Backend
	client   kubernetes.Interface
	shared   informers.SharedInformerFactory
	guard    *access.Guard
	quotas   *admit.Quotas
	hooks    *admit.Hooks
	keeper   *endpointKeeper
	drain    *serve.Drain
	members  *members.API // nil for the only server
	custom   *custom.Server
	generic  *genericapiserver.GenericAPIServer
	storage  *registry.Storage
	rotation *rotation.Rotation
}

// assemble builds the generic server on kept and installs all kinds.
func (s *Server) assemble(ctx context.Context, kept *store.Store) (*assembly, error) {
	a := &assembly{Server: s, store: kept, config: genericapiserver.NewConfig(registry.Codecs), drain: serve.NewDrain()}
	a.configureServing()
	a.configureDocuments()
	for _, step := range []func(context.Context) error{
		a.configureStorage, a.connect, a.secure, a.configureAudit, a.configureAdmission, a.configureBootstrap, a.configureMembers,
		a.build, a.installResources, a.installPaths,
	} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// configureServing sets how connections and requests are served.
func (a *assembly) configureServing() {
	c := a.config
	c.SecureServing = &genericapiserver.SecureServingInfo{Listener: a.listener, Cert: a.creds.Serving, ClientCA: a.creds.Clients}
	c.LoopbackClientConfig = a.LoopbackConfig()
	c.ExternalAddress = strings.TrimPrefix(a.publicURL(), "https://")
	c.EffectiveVersion = serve.NewVersion(join.KubernetesVersion, a.opts.GitVersion)
	c.EnableProfiling = false
	c.ShutdownWatchTerminationGracePeriod = watchDrain
	longRunning := genericfilters.BasicLongRunningRequestCheck(
		sets.NewString("watch", "proxy"), sets.NewString("attach", "exec", "proxy", "log", "portforward"))
	c.LongRunningFunc = func(r *http.Request, info *apirequest.RequestInfo) bool {
		return longRunning(r, info) || !info.IsResourceRequest && slices.ContainsFunc(flowPaths(), func(path string) bool {
			return strings.HasPrefix(info.Path, path)
		})
	}
	c.BuildHandlerChainFunc = a.filters
}

// filters returns h behind the filters of all requests.
func (a *assembly) filters(h http.Handler, c *genericapiserver.Config) http.Handler {
	h = a.guard.EndRemoved(watch.NewBudget(a.opts.MaxWatchesPerUser).Bounded(watch.Shortcut(h), serve.Reject))
	h = genericapiserver.DefaultBuildHandlerChain(h, c)
	h = watch.EndStalled(h, watch.StallOptions{
		Limit: a.opts.StallTimeout, Requests: c.RequestInfoResolver, LongRunning: c.LongRunningFunc, Reset: a.listener.Reset, Log: a.log,
	})
	h = serve.BoundSelectors(h)
	if a.members != nil {
		h = a.members.Joining(h)
	}
	return a.drain.Bounded(static(h, a.opts.Static))
}

// configureDocuments sets what describes the API: discovery and OpenAPI.
func (a *assembly) configureDocuments() {
	c := a.config
	c.AggregatedDiscoveryGroupManager = aggregated.NewResourceManager("apis")
	namer := openapinamer.NewDefinitionNamer(scheme.Versioned(), extensionsserver.Scheme)
	c.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(custom.OpenAPIDefinitions, namer)
	c.OpenAPIConfig.Info.Title = "fairlead"
	c.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(custom.OpenAPIDefinitions, namer)
	c.OpenAPIV3Config.Info.Title = "fairlead"
	c.SkipOpenAPIInstallation = true // package documents serves them, also for the server of custom resources
}

// configureStorage sets where resources are kept, and what /readyz checks.
func (a *assembly) configureStorage(ctx context.Context) error {
	c := a.config
	a.backend = backend.New(a.drain.Over(), a.store, a.opts.Etcd.Prefix, c.StorageObjectCountTracker)
	a.backend.Trace(a.opts.Traces)
	c.RESTOptionsGetter = a.backend
	if err := a.backend.AddHealthChecks(c); err != nil {
		return err
	}
	if a.store.Space != nil {
		check := a.store.Space.Check
		c.ReadyzChecks = append(c.ReadyzChecks, healthz.NamedCheck(spaceCheck, func(*http.Request) error { return check() }))
	}
	for _, check := range a.opts.ReadyzChecks {
		c.ReadyzChecks = append(c.ReadyzChecks, healthz.NamedCheck(check.Name, func(*http.Request) error { return check.Check() }))
	}
	if err := a.backend.Encrypt(ctx, a.opts.Auth.EncryptionConfig, c); err != nil {
		return err
	}
	return a.backend.CheckReadable(ctx, a.store)
}

// connect makes the server's own client and its informers, which the generic server starts.
func (a *assembly) connect(context.Context) (err error) {
	loopback := a.LoopbackConfig()
	loopback.ContentType = runtime.ContentTypeProtobuf
	if a.client, err = kubernetes.NewForConfig(loopback); err != nil {
		return err
	}
	a.shared = informers.NewSharedInformerFactory(a.client, 0)
	a.config.FlowControl = serve.NewFairness(a.shared, a.client, a.opts.MaxRequests+a.opts.MaxMutatingRequests)
	return nil
}

// secure makes the guard, which authenticates and authorizes requests.
func (a *assembly) secure(ctx context.Context) (err error) {
	a.guard, err = access.NewGuard(ctx, access.Options{
		Auth: a.opts.Auth, Client: a.client, Informers: a.shared, PKI: a.creds.PKI, Clients: a.creds.Clients,
		AccountKey: a.dir.File("pki/sa.key"), AccountPublicKey: a.dir.File("pki/sa.pub"), Server: a.publicURL(),
		OwnNode: a.creds.OwnNode, Log: a.log,
	})
	if err != nil {
		return err
	}
	a.guard.Configure(a.config)
	return nil
}

// configureAdmission sets the plugins that admit writes. The one that enforces quotas is the last for creations and updates: a write
// that another plugin rejects does not count. That of shares stands just before it: what it reserves for a write that a quota
// rejects expires soon.
func (a *assembly) configureAdmission(context.Context) error {
	plugins := append(slices.Clone(a.guard.Plugins), admit.NewCheckAdmission(a.guard.Authorizer))
	if !a.opts.AllowServiceExternalIPs {
		plugins = append(plugins, admit.NewExternalIPAdmission(a.guard.Authorizer))
	}
	plugins = append(plugins, a.store.Admission())
	custom, err := admit.NewCustomWarnings(a.config.LoopbackClientConfig)
	if err != nil {
		return err
	}
	plugins = append(plugins, custom)
	security, err := admit.NewPodSecurity(a.opts.PodSecurity, a.client, a.shared.Core().V1().Namespaces().Lister(), a.guard.Authorizer)
	if err != nil {
		return err
	}
	counter, enforcer, err := admit.NewQuotas(a.client, a.shared, a.config.DrainedNotify(), a.opts.DefaultQuota, a.log)
	if err != nil {
		return err
	}
	a.quotas = counter
	a.hooks, err = admit.NewHooks(a.config, a.client, a.shared, admit.HooksOptions{
		Self: strings.TrimPrefix(a.URL(), "https://"), Ready: a.ready, Log: a.log,
	})
	if err != nil {
		return err
	}
	share := a.store.Shares(admit.ExemptFromShare(a.shared.Core().V1().ResourceQuotas().Lister()))
	a.config.AdmissionControl, err = a.hooks.Chain(plugins, security, admission.NewChainHandler(counter, share, enforcer, a.guard.Last()))
	return err
}

// configureBootstrap adds the creation of the objects that must exist, which /readyz waits for.
func (a *assembly) configureBootstrap(context.Context) error {
	a.keeper = newEndpointKeeper(a.client, a.onlyServer(), a.log)
	a.keeper.report = a.certReport
	if at := a.opts.AdvertiseAddress; at.IsValid() {
		a.keeper.self = netip.AddrPortFrom(at, a.Port())
	}
	return a.addHooks(a.config, a.client, a.keeper, a.guard)
}

// build makes the generic server, which delegates to the server of custom resources.
func (a *assembly) build(context.Context) (err error) {
	a.custom, err = custom.New(*a.config, a.shared, a.backend, a.hooks.Services, a.hooks.Credentials, a.onlyServer())
	if err != nil {
		return err
	}
	a.generic, err = a.config.Complete(a.shared).New("fairlead", a.custom.GenericAPIServer)
	if err != nil {
		return err
	}
	serve.Groups(a.generic)
	serve.NameUnservedOf(a.generic)
	return a.generic.AddPreShutdownHook("fairlead/leave", func() error { // hooks of their own would run in any order
		a.drain.Begin()
		return a.keeper.leave()
	})
}

// installResources serves all kinds.
func (a *assembly) installResources(context.Context) (err error) {
	a.storage, err = registry.New(registry.Options{
		RESTOptions: a.backend, ServiceCIDRs: a.opts.ServiceCIDRs, Taken: a.taken(), NodePorts: a.opts.NodePorts,
		StrictLoadBalancers: a.opts.StrictLoadBalancers, Alone: a.onlyServer(),
		WriteTimeout: a.opts.ServiceWriteTimeout, RepairPeriod: a.opts.RepairPeriod,
		AgentCredentials: a.creds.AgentCertificate, Log: a.log, Security: a.guard.Security(a.hooks.Resolve),
	})
	if err != nil {
		return err
	}
	a.generic.RegisterDestroyFunc(a.storage.Destroy)
	if err := serve.Install(a.generic, a.storage.Resources); err != nil {
		return err
	}
	return a.custom.Join(a.generic)
}

// installPaths serves the other paths: the documents of token issuers, the store, the members and the
// certificates.
func (a *assembly) installPaths(context.Context) error {
	a.guard.Serve(a.generic)
	mux := a.generic.Handler.NonGoRestfulMux
	if a.store.Space != nil {
		mux.Handle(space.Path, a.store.Space)
	}
	var h http.Handler = a.members
	if a.members == nil {
		h = members.Only(len(a.opts.Etcd.Servers) > 0)
	}
	for _, path := range []string{members.Path, members.TokenPath} {
		mux.Handle(path, h)
		mux.HandlePrefix(path+"/", h)
	}
	if a.opts.Questions != nil {
		for path, h := range a.opts.Questions(a.actAs) {
			mux.Handle(path, h)
		}
	}
	flows, err := relay.New(a.LoopbackConfig(), a.opts.Release, a.log)
	if err != nil {
		return err
	}
	answer := relay.NewHandler(flows, a.config.ShutdownInitiatedNotify())
	for _, path := range flowPaths() {
		mux.HandlePrefix(path, answer)
	}
	a.rotation = a.newRotation()
	mux.Handle(certs.Path, certs.NewAPI(a.creds, serverNamed(a.publicURL()), a.rotation, a.guard.Authorizer))
	return nil
}

// flowPaths are where Hubble's API is: gRPC, whose requests may last.
func flowPaths() []string { return []string{hubble.Service, hubble.Peers, hubble.Health} }

// prepare returns the server, ready to run.
func (a *assembly) prepare() interface{ RunWithContext(context.Context) error } {
	documents.Install(a.generic.Handler.NonGoRestfulMux, documents.Options{
		V2: a.config.OpenAPIConfig, V3: a.config.OpenAPIV3Config, Container: a.generic.Handler.GoRestfulContainer,
		Definitions: a.custom.Informers.Apiextensions().V1().CustomResourceDefinitions().Lister(), Log: a.log,
	})
	return a.generic.PrepareRun()
}

// loops returns what runs beside the server until its context ends.
func (a *assembly) loops() []func(context.Context) {
	loops := []func(context.Context){
		a.creds.Run, a.awaitReady, a.keeper.run, a.guard.Run, a.quotas.Run, a.hooks.Run,
		func(ctx context.Context) { a.storage.Run(ctx, a.client) },
		a.onceReady(a.rotation.Run), // the objects that it changes exist
		a.onceReady(func(ctx context.Context) { access.DeleteEndedTokens(ctx, a.client, a.log) }),
	}
	if a.opts.Definitions != nil {
		loops = append(loops, a.onceReady(func(ctx context.Context) { a.untilDone(ctx, "definitions of custom resources", a.define) }))
	}
	if a.members != nil {
		loops = append(loops, a.members.Settle)
	}
	if a.store.Failed != nil {
		loops = append(loops, func(ctx context.Context) {
			a.store.BackupNightly(ctx, a.dir, a.opts.Release, a.opts.BackupKeep, a.log)
		})
	}
	return loops
}

// define stores the definitions of the options.
func (a *assembly) define(ctx context.Context) error {
	all, err := a.opts.Definitions()
	if err != nil {
		return err
	}
	return a.custom.Define(ctx, a.backend, all)
}

// onceReady returns f, which begins when the server is ready.
func (a *assembly) onceReady(f func(context.Context)) func(context.Context) {
	return func(ctx context.Context) {
		select {
		case <-a.ready:
			f(ctx)
		case <-ctx.Done():
		}
	}
}

// awaitReady closes ready when /readyz answers 200, apart from the space of the store, which it may take a ready server to
// make, and the server has caught up with the rotation.
func (a *assembly) awaitReady(ctx context.Context) {
	client, err := restclient.UnversionedRESTClientFor(unversioned(a.LoopbackConfig()))
	if err != nil {
		a.log.Error("cannot make the loopback client", "err", err)
		return
	}
	for {
		if err := client.Get().AbsPath("/readyz").Param("exclude", spaceCheck).Do(ctx).Error(); err == nil {
			a.rotation.CatchUp(ctx)
			close(a.ready)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
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

func unversioned(c *restclient.Config) *restclient.Config {
	c.NegotiatedSerializer = clientscheme.Codecs.WithoutConversion()
	c.GroupVersion = &schema.GroupVersion{}
	return c
}
