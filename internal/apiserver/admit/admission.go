// Package admit decides whether an object may be written: webhooks and admission policies, Pod security, quotas, and
// the rights to add external IPs and to have endpoints checked.
package admit

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

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
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

	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// mapperReset is how soon policies see the kinds of a new definition.
	mapperReset = 10 * time.Second
	// hooksReady bounds how long a request waits, after a start, until it is known
	// which webhooks and policies there are.
	hooksReady = 10 * time.Second
)

// Hooks is the part of admission that administrators add by objects: webhooks and
// policies.
type Hooks struct {
	lifecycle   *lifecycle.Lifecycle
	shared      informers.SharedInformerFactory
	initializer admission.PluginInitializer
	Services    webhook.ServiceResolver
	Credentials webhook.AuthenticationInfoResolverWrapper
	client      kubernetes.Interface
	kinds       *restmapper.DeferredDiscoveryRESTMapper
	resetKinds  func() // begins to forget kinds from time to time; may be called again
	started     <-chan struct{}
	log         *slog.Logger
}

// HooksOptions are what webhooks and policies need of the server.
type HooksOptions struct {
	// Self is the host:port at which the server is reached from its own machine.
	Self string
	// Ready is closed when the server has created the objects that it needs.
	Ready <-chan struct{}
	Log   *slog.Logger
}

// SystemNamespaces exist after start and cannot be deleted.
func SystemNamespaces() []string {
	return []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease}
}

// NewHooks prepares the plugins.
func NewHooks(
	c *genericapiserver.Config, client kubernetes.Interface, shared informers.SharedInformerFactory, o HooksOptions,
) (*Hooks, error) {
	objects, err := dynamic.NewForConfig(c.LoopbackClientConfig)
	if err != nil {
		return nil, err
	}
	services := serviceResolver{client, o.Self}
	h := &Hooks{
		shared: shared, client: client, started: o.Ready, log: o.Log, Services: services,
		Credentials: webhook.NewDefaultAuthenticationInfoResolverWrapper(&http.Transport{DialContext: services.dial}, nil,
			c.LoopbackClientConfig, c.TracerProvider),
		kinds: restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery())),
	}
	drained := c.DrainedNotify()
	h.resetKinds = sync.OnceFunc(func() { go wait.Until(h.kinds.Reset, mapperReset, drained) })
	h.initializer = admission.PluginInitializers{
		webhookinit.NewPluginInitializer(h.Credentials, h.Services),
		initializer.New(client, objects, shared, c.Authorization.Authorizer, utilfeature.DefaultFeatureGate, c.EffectiveVersion,
			drained, h.kinds),
	}
	if h.lifecycle, err = lifecycle.NewLifecycle(sets.New(SystemNamespaces()...)); err != nil {
		return nil, err
	}
	h.lifecycle.SetExternalKubeClientSet(client)
	h.lifecycle.SetExternalKubeInformerFactory(shared)
	return h, h.lifecycle.ValidateInitialization()
}

// Chain is admission as a whole: creation in a namespace that is missing or terminating
// and the deletion of system namespaces are rejected, then come first, policies and
// webhooks, then security and last, which judge what these have made of the object. What
// a policy or webhook changes is seen again by all of those before it.
func (h *Hooks) Chain(first []admission.Interface, security, last admission.Interface) (admission.Interface, error) {
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

// Resolve returns the resource of a kind that is served.
func (h *Hooks) Resolve(gvk schema.GroupVersionKind) (schema.GroupVersionResource, error) {
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

// untouchable are the requests that webhooks and policies never see: reviews of who users are and what they
// may do.
func untouchable() []schema.GroupResource {
	var out []schema.GroupResource
	for _, r := range []string{"localsubjectaccessreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews", "subjectaccessreviews"} {
		out = append(out, schema.GroupResource{Group: authorizationv1.GroupName, Resource: r})
	}
	for _, r := range []string{"selfsubjectreviews", "tokenreviews"} {
		out = append(out, schema.GroupResource{Group: authenticationv1.GroupName, Resource: r})
	}
	return out
}

// exempt reports whether a is a write that the server cannot do without: what it makes
// at its start, which a webhook could delay forever, and its Lease, which in Kubernetes
// is not an object of the API.
func (h *Hooks) exempt(a admission.Attributes) bool {
	if a.GetUserInfo() == nil || a.GetUserInfo().GetName() != user.APIServerUser {
		return false
	}
	select {
	case <-h.started:
	default:
		return true
	}
	return a.GetResource().GroupResource() == schema.GroupResource{Group: coordinationv1.GroupName, Resource: "leases"} &&
		a.GetNamespace() == metav1.NamespaceSystem && strings.HasPrefix(a.GetName(), svc.ServerLeasePrefix)
}

// onDemand is a plugin that is made for the first webhook or policy. Without a
// webhook or policy a request costs a look into memory, and nothing is compiled.
type onDemand struct {
	*admission.Handler
	hooks  *Hooks
	rules  cache.SharedIndexInformer
	synced []func() bool
	plugin func() (admission.Interface, error)
}

// onDemand returns the plugin that make makes; rules are the objects without which it
// does nothing, more are others that it follows.
func (h *Hooks) onDemand(
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
func (h *Hooks) untilMade(make func() (admission.Interface, error)) func() (admission.Interface, error) {
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
