// Package access decides who a client is and what it may do: authentication by certificates and tokens, the
// node authorizer and the restriction of nodes, the default roles, and the signer of certificate requests.
package access

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/authorization/union"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/accounts"
	"github.com/fairlead/fairlead/internal/apiserver/certs"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/registry/rbac"
	"github.com/fairlead/fairlead/internal/registry/review"
)

// Guard is authentication, authorization and admission, with the loops that belong
// to them.
type Guard struct {
	rules      *rbac.Resolver
	aggregator *rbac.Aggregator
	pods       *podIndex
	tls        *tlsIndex
	removed    *removedNodes
	synced     func() bool // the Nodes
	signer     *signer
	Authorizer authorizer.Authorizer
	resolver   authorizer.RuleResolver

	issuer   *accounts.Issuer
	maxLife  time.Duration
	Keeper   *accounts.Keeper
	Plugins  []admission.Interface
	tokens   authenticator.Token
	requests authenticator.Request
	server   string // the URL of this server for others
	log      *slog.Logger
}

// Options are what a guard needs.
type Options struct {
	Auth      AuthOptions
	Client    kubernetes.Interface
	Informers informers.SharedInformerFactory
	// PKI signs the certificates of nodes and users, Clients verifies them.
	PKI     *pki.Directory
	Clients *certs.ClientCAs
	// AccountKey and AccountPublicKey are the files with the keys of ServiceAccount tokens.
	AccountKey, AccountPublicKey string
	// Server is the URL of this server for others.
	Server string
	// OwnNode returns the name of the node in this process, "" if there is none.
	OwnNode func() string
	Log     *slog.Logger
}

// NewGuard builds the guard on informers that the generic server starts. Its
// background work ends with ctx.
func NewGuard(ctx context.Context, o Options) (*Guard, error) {
	client, shared := o.Client, o.Informers
	rules, err := rbac.NewResolver(shared)
	if err != nil {
		return nil, err
	}
	pods, err := newPodIndex(client)
	if err != nil {
		return nil, err
	}
	named, err := newTLSIndex(client)
	if err != nil {
		return nil, err
	}
	removed, err := newRemovedNodes(client, shared.Core().V1().Nodes(), o.OwnNode)
	if err != nil {
		return nil, err
	}
	g := &Guard{rules: rules, pods: pods, tls: named, removed: removed, aggregator: rbac.NewAggregator(client, shared, o.Log),
		maxLife: o.Auth.ServiceAccountMaxTokenLife, server: o.Server, log: o.Log}
	known := shared.Core().V1().Nodes()
	index := nodeIndex{known.Lister()}
	g.synced = known.Informer().HasSynced
	nodes := nodeAuthorizer{pods: pods, tls: named, nodes: index, removed: removed, rules: nodeRules()}
	requests := newNodeRequests(client, shared, func() time.Duration { return o.PKI.Life })
	g.Authorizer, err = union.New(
		union.NamedAuthorizer{AuthorizerName: "privileged", Authorizer: authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup)},
		union.NamedAuthorizer{AuthorizerName: "requester", Authorizer: authorizer.AuthorizerFunc(authorizeRequester)},
		union.NamedAuthorizer{AuthorizerName: "node", Authorizer: authorizer.AuthorizerFunc(nodes.Authorize)},
		union.NamedAuthorizer{AuthorizerName: "acme", Authorizer: authorizer.AuthorizerFunc(named.authorizeOrders)},
		union.NamedAuthorizer{AuthorizerName: "rbac", Authorizer: authorizer.AuthorizerFunc(rules.Authorize)},
	)
	if err != nil {
		return nil, err
	}
	g.resolver = union.NewRuleResolvers(nodes, rules)
	g.signer = newSigner(requests, shared, g.Authorizer, removed, o.PKI, o.Log)
	g.Keeper = accounts.NewKeeper(client, shared, o.PKI.AuthoritiesPEM, o.Log)
	g.issuer, err = accounts.NewIssuer(o.Auth.ServiceAccountIssuer, o.Auth.APIAudiences, o.AccountKey, o.AccountPublicKey)
	if err != nil {
		return nil, err
	}
	lister := shared.Core().V1().ServiceAccounts().Lister()
	roles := authorizer.AuthorizerFunc(rules.Authorize)
	restriction := newNodeRestriction(pods, index, removed, newDNSPlaces(client, index), roles)
	g.Plugins = []admission.Interface{accounts.NewAdmission(lister, client), restriction, requests}
	g.tokens, err = newTokens(ctx, o.Auth, client, o.PKI.Bundle, &accounts.Authenticator{
		Issuer: g.issuer, Accounts: lister, Pods: pods.uid, Client: client, Now: time.Now,
	})
	if err != nil {
		return nil, err
	}
	g.requests = newAuthenticator(o.Clients, g.tokens, o.Auth.OpenHealth)
	return g, nil
}

// Configure sets the authenticator and the authorizer.
func (g *Guard) Configure(c *genericapiserver.Config) {
	c.Authorization.Authorizer = g.Authorizer
	c.RuleResolver = g.resolver
	c.Authentication.Authenticator = g.requests
	c.Authentication.APIAudiences = g.issuer.Audiences
}

// Last is the plugin of admission that must be asked after all others: it prepares what the write then does.
func (g *Guard) Last() admission.Interface { return g.removed }

// EndRemoved returns next, which answers requests that are authorized. Those of a node end when its Node is deleted.
func (g *Guard) EndRemoved(next http.Handler) http.Handler { return g.removed.endOpen(next) }

// Serve adds the discovery documents by which others verify tokens.
func (g *Guard) Serve(s *genericapiserver.GenericAPIServer) {
	for path, h := range g.issuer.Discovery(g.server) {
		s.Handler.NonGoRestfulMux.Handle(path, h)
	}
}

// Security returns what the storages need of the guard. resolve finds the resource of a
// kind.
func (g *Guard) Security(resolve func(schema.GroupVersionKind) (schema.GroupVersionResource, error)) registry.Security {
	return registry.Security{
		Authorizer: g.Authorizer, Rules: g.rules,
		Reviews: review.Answers{Authorizer: g.Authorizer, Rules: g.resolver, Tokens: g.tokens, Audiences: g.issuer.Audiences},
		Tokens:  g.issuer, MaxTokenLife: g.maxLife, Resolve: resolve,
	}
}

// Run does the guard's background work until ctx ends.
func (g *Guard) Run(ctx context.Context) {
	var loops sync.WaitGroup
	loops.Go(func() { g.aggregator.Run(ctx) })
	loops.Go(func() { g.pods.run(ctx) })
	loops.Go(func() { g.tls.run(ctx) })
	loops.Go(func() { g.removed.run(ctx) })
	loops.Go(func() { g.removed.sweep(ctx, g.log) })
	loops.Go(func() { g.signer.run(ctx) })
	loops.Go(func() { g.Keeper.Run(ctx) })
	loops.Go(func() { g.issuer.Follow(ctx, g.log) })
	loops.Wait()
}

// EnsurePolicy makes the default roles and waits until the authorizers know them.
func (g *Guard) EnsurePolicy(ctx context.Context, client kubernetes.Interface) error {
	policy := defaultPolicy()
	if err := rbac.Reconcile(ctx, client, policy); err != nil {
		return err
	}
	for !g.rules.Knows(policy) || !g.pods.informer.HasSynced() || !g.tls.informer.HasSynced() || !g.synced() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}
