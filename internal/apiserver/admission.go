package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	admissionmetrics "k8s.io/apiserver/pkg/admission/metrics"
	"k8s.io/apiserver/pkg/admission/plugin/namespace/lifecycle"
	mutatingpolicy "k8s.io/apiserver/pkg/admission/plugin/policy/mutating"
	validatingpolicy "k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	webhookinit "k8s.io/apiserver/pkg/admission/plugin/webhook/initializer"
	mutatingwebhook "k8s.io/apiserver/pkg/admission/plugin/webhook/mutating"
	validatingwebhook "k8s.io/apiserver/pkg/admission/plugin/webhook/validating"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapiserver "k8s.io/apiserver/pkg/server"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/cache"
)

const (
	// mapperReset is how soon policies see the kinds of a new definition.
	mapperReset = 10 * time.Second
	// hooksReady bounds how long a request waits, after a start, until it is known
	// which webhooks and policies there are.
	hooksReady = 10 * time.Second
)

// hooks is the part of admission that administrators add by objects: webhooks and
// policies.
type hooks struct {
	lifecycle   *lifecycle.Lifecycle
	shared      informers.SharedInformerFactory
	initializer admission.PluginInitializer
	services    webhook.ServiceResolver
	credentials webhook.AuthenticationInfoResolverWrapper
	client      kubernetes.Interface
	kinds       *restmapper.DeferredDiscoveryRESTMapper
	resetKinds  func() // begins to forget kinds from time to time; may be called again
	started     <-chan struct{}
	log         *slog.Logger
}

// newHooks prepares the plugins. s.Ready tells when the server has made what it needs.
func (s *Server) newHooks(
	c *genericapiserver.Config, client kubernetes.Interface, shared informers.SharedInformerFactory,
) (*hooks, error) {
	objects, err := dynamic.NewForConfig(s.LoopbackConfig())
	if err != nil {
		return nil, err
	}
	services := serviceResolver{client, strings.TrimPrefix(s.URL(), "https://")}
	h := &hooks{
		shared: shared, client: client, started: s.ready, log: s.log, services: services,
		credentials: webhook.NewDefaultAuthenticationInfoResolverWrapper(&http.Transport{DialContext: services.dial}, nil,
			c.LoopbackClientConfig, c.TracerProvider),
		kinds: restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery())),
	}
	drained := c.DrainedNotify()
	h.resetKinds = sync.OnceFunc(func() { go wait.Until(h.kinds.Reset, mapperReset, drained) })
	h.initializer = admission.PluginInitializers{
		webhookinit.NewPluginInitializer(h.credentials, h.services),
		initializer.New(client, objects, shared, c.Authorization.Authorizer, utilfeature.DefaultFeatureGate, c.EffectiveVersion,
			drained, h.kinds),
	}
	if h.lifecycle, err = lifecycle.NewLifecycle(sets.New(systemNamespaces()...)); err != nil {
		return nil, err
	}
	h.lifecycle.SetExternalKubeClientSet(client)
	h.lifecycle.SetExternalKubeInformerFactory(shared)
	return h, h.lifecycle.ValidateInitialization()
}

// chain is admission as a whole: creation in a namespace that is missing or terminating
// and the deletion of system namespaces are rejected, then come first, policies and
// webhooks, then security and last, which judge what these have made of the object. What
// a policy or webhook changes is seen again by all of those before it.
func (h *hooks) chain(first []admission.Interface, security, last admission.Interface) (admission.Interface, error) {
	known := h.shared.Admissionregistration().V1()
	plugins, names := admission.NewPlugins(), []string{}
	add := func(name string, p admission.Interface) {
		names = append(names, name)
		plugins.Register(name, func(io.Reader) (admission.Interface, error) { return p, nil })
	}
	changes := admission.NewHandler(admission.Create, admission.Update, admission.Connect)
	all := admission.NewHandler(admission.Create, admission.Update, admission.Delete, admission.Connect)
	add("fairlead", admission.NewChainHandler(append([]admission.Interface{h.lifecycle}, first...)...))
	add(mutatingpolicy.PluginName, mutator{h.onDemand(changes, known.MutatingAdmissionPolicies().Informer(),
		func() (admission.Interface, error) { return mutatingpolicy.NewPlugin(nil) }, known.MutatingAdmissionPolicyBindings().Informer())})
	add(mutatingwebhook.PluginName, mutator{h.onDemand(all, known.MutatingWebhookConfigurations().Informer(),
		func() (admission.Interface, error) { return mutatingwebhook.NewMutatingWebhook(nil) })})
	add(validatingpolicy.PluginName, validator{h.onDemand(all, known.ValidatingAdmissionPolicies().Informer(),
		func() (admission.Interface, error) { return validatingpolicy.NewPlugin(nil) }, known.ValidatingAdmissionPolicyBindings().Informer())})
	add(validatingwebhook.PluginName, validator{h.onDemand(all, known.ValidatingWebhookConfigurations().Informer(),
		func() (admission.Interface, error) { return validatingwebhook.NewValidatingAdmissionWebhook(nil) })})
	add("PodSecurity", security)
	add("ResourceQuota", last)
	chain, err := plugins.NewFromPlugins(names, noConfiguration{}, admission.PluginInitializers{},
		admission.DecoratorFunc(admissionmetrics.WithControllerMetrics))
	if err != nil {
		return nil, err
	}
	return admissionmetrics.WithStepMetrics(chain), nil
}

// noConfiguration is the empty configuration of all plugins.
type noConfiguration struct{}

// ConfigFor returns no file.
func (noConfiguration) ConfigFor(string) (io.Reader, error) { return nil, nil }

// resolve returns the resource of a kind that is served.
func (h *hooks) resolve(gvk schema.GroupVersionKind) (schema.GroupVersionResource, error) {
	gv := gvk.GroupVersion()
	list, err := h.client.Discovery().ServerResourcesForGroupVersion(gv.String())
	if err != nil {
		return schema.GroupVersionResource{}, err
	}
	for _, r := range list.APIResources {
		if r.Kind == gvk.Kind && !strings.Contains(r.Name, "/") {
			return gv.WithResource(r.Name), nil
		}
	}
	return schema.GroupVersionResource{}, fmt.Errorf("no kind %s in %s", gvk.Kind, gv)
}

// untouchable are the requests that webhooks and policies never see: those by which
// users are told who they are and what they may do.
func untouchable() []schema.GroupResource {
	var out []schema.GroupResource
	for _, r := range []string{"localsubjectaccessreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews", "subjectaccessreviews"} {
		out = append(out, schema.GroupResource{Group: groupAuthorization, Resource: r})
	}
	for _, r := range []string{"selfsubjectreviews", "tokenreviews"} {
		out = append(out, schema.GroupResource{Group: groupAuthentication, Resource: r})
	}
	return out
}

// exempt reports whether a is a write that the server cannot do without: what it makes
// at its start, which a webhook could delay for ever, and its Lease, which in Kubernetes
// is no object of the API.
func (h *hooks) exempt(a admission.Attributes) bool {
	if a.GetUserInfo() == nil || a.GetUserInfo().GetName() != user.APIServerUser {
		return false
	}
	select {
	case <-h.started:
	default:
		return true
	}
	return a.GetResource().GroupResource() == schema.GroupResource{Group: groupCoordination, Resource: "leases"} &&
		a.GetNamespace() == metav1.NamespaceSystem && strings.HasPrefix(a.GetName(), serverLeasePrefix)
}

// onDemand is a plugin that is made when there is something for it to do. Without a
// webhook or policy a request costs a look into memory, and nothing is compiled.
type onDemand struct {
	*admission.Handler
	hooks  *hooks
	rules  cache.SharedIndexInformer
	synced []func() bool
	plugin func() (admission.Interface, error)
}

// onDemand returns the plugin that make makes; rules are the objects without which it
// does nothing, more are others that it follows.
func (h *hooks) onDemand(
	ops *admission.Handler, rules cache.SharedIndexInformer, make func() (admission.Interface, error), more ...cache.SharedIndexInformer,
) *onDemand {
	o := &onDemand{Handler: ops, hooks: h, rules: rules, synced: []func() bool{rules.HasSynced}}
	for _, m := range more {
		o.synced = append(o.synced, m.HasSynced)
	}
	o.plugin = h.untilMade(func() (admission.Interface, error) {
		p, err := make()
		if err != nil {
			return nil, err
		}
		h.resetKinds()
		if wants, ok := p.(initializer.WantsExcludedAdmissionResources); ok {
			wants.SetExcludedAdmissionResources(untouchable())
		}
		h.initializer.Initialize(p)
		return p, admission.ValidateInitialization(p)
	})
	return o
}

// pluginRetry is the time between two tries to make a plugin.
const pluginRetry = 5 * time.Second

// untilMade returns a function that returns the plugin that make has made, or the error
// of its last try; tries are pluginRetry apart.
func (h *hooks) untilMade(make func() (admission.Interface, error)) func() (admission.Interface, error) {
	var mu sync.Mutex
	var made admission.Interface
	var failed error
	var tried time.Time
	return func() (admission.Interface, error) {
		mu.Lock()
		defer mu.Unlock()
		if made != nil || failed != nil && time.Since(tried) < pluginRetry {
			return made, failed
		}
		p, err := make()
		if err == nil {
			made, failed = p, nil
			return made, nil
		}
		if failed == nil || failed.Error() != err.Error() {
			h.log.Error("cannot start a plugin of admission; retrying", "err", err, "after", pluginRetry)
		}
		failed, tried = err, time.Now()
		return nil, failed
	}
}

// get returns the plugin if it has something to say about a.
func (o *onDemand) get(ctx context.Context, a admission.Attributes) (admission.Interface, error) {
	if o.hooks.exempt(a) {
		return nil, nil
	}
	if !o.ready() {
		ctx, cancel := context.WithTimeout(ctx, hooksReady)
		defer cancel()
		if !cache.WaitForCacheSync(ctx.Done(), o.ready) {
			return nil, admission.NewForbidden(a, errors.New("not yet ready to handle request"))
		}
	}
	if len(o.rules.GetStore().ListKeys()) == 0 {
		return nil, nil
	}
	p, err := o.plugin()
	if err != nil {
		return nil, fmt.Errorf("cannot start a plugin of admission: %w", err)
	}
	return p, nil
}

func (o *onDemand) ready() bool {
	return !slices.ContainsFunc(o.synced, func(synced func() bool) bool { return !synced() })
}

// mutator runs a plugin that changes objects.
type mutator struct{ *onDemand }

var _ admission.MutationInterface = mutator{}

// Admit lets the plugin change the object of a.
func (m mutator) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	p, err := m.get(ctx, a)
	if err != nil || p == nil || !p.Handles(a.GetOperation()) {
		return err
	}
	return p.(admission.MutationInterface).Admit(ctx, a, o)
}

// validator runs a plugin that rejects requests.
type validator struct{ *onDemand }

var _ admission.ValidationInterface = validator{}

// Validate lets the plugin reject a.
func (v validator) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	p, err := v.get(ctx, a)
	if err != nil || p == nil || !p.Handles(a.GetOperation()) {
		return err
	}
	return p.(admission.ValidationInterface).Validate(ctx, a, o)
}
