package apiserver

import (
	"context"
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
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/registry/rbac"
	"github.com/fairlead/fairlead/internal/registry/review"
)

// guard is authentication, authorization and admission, with the loops that belong
// to them.
type guard struct {
	rules      *rbac.Resolver
	aggregator *rbac.Aggregator
	pods       *podIndex
	tls        *tlsIndex
	synced     func() bool // the Nodes
	signer     *signer
	authorizer authorizer.Authorizer
	resolver   authorizer.RuleResolver

	issuer   *accounts.Issuer
	maxLife  time.Duration
	keeper   *accounts.Keeper
	plugins  []admission.Interface
	tokens   authenticator.Token
	requests authenticator.Request
	server   string // the URL of this server for others
}

// newGuard builds the guard on informers that the generic server starts. Its
// background work ends with ctx.
func (s *Server) newGuard(ctx context.Context, client kubernetes.Interface, shared informers.SharedInformerFactory) (*guard, error) {
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
	g := &guard{rules: rules, pods: pods, tls: named, aggregator: rbac.NewAggregator(client, shared, s.log),
		maxLife: s.opts.Auth.ServiceAccountMaxTokenLife, server: s.publicURL()}
	known := shared.Core().V1().Nodes()
	index := nodeIndex{known.Lister()}
	g.synced = known.Informer().HasSynced
	nodes := nodeAuthorizer{pods: pods, tls: named, nodes: index, rules: nodeRules()}
	requests := newNodeRequests(client, shared)
	g.authorizer, err = union.New(
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
	g.signer = newSigner(requests, shared, g.authorizer, s.creds.pki, s.log)
	g.keeper = accounts.NewKeeper(client, shared, s.creds.pki.AuthoritiesPEM, s.log)
	o := s.opts.Auth
	g.issuer, err = accounts.NewIssuer(o.ServiceAccountIssuer, o.APIAudiences, s.dir.file("pki/sa.key"), s.dir.file("pki/sa.pub"))
	if err != nil {
		return nil, err
	}
	lister := shared.Core().V1().ServiceAccounts().Lister()
	roles := authorizer.AuthorizerFunc(rules.Authorize)
	g.plugins = []admission.Interface{accounts.NewAdmission(lister, client), newNodeRestriction(pods, index, roles),
		newCheckAdmission(g.authorizer), requests}
	if !s.opts.AllowServiceExternalIPs {
		g.plugins = append(g.plugins, newExternalIPAdmission(g.authorizer))
	}
	g.tokens, err = s.newTokens(ctx, client, &accounts.Authenticator{
		Issuer: g.issuer, Accounts: lister, Pods: pods.uid, Client: client, Now: time.Now,
	})
	if err != nil {
		return nil, err
	}
	g.requests = newAuthenticator(s.creds.clients, g.tokens, o.OpenHealth)
	return g, nil
}

// configure sets the authenticator and the authorizer.
func (g *guard) configure(c *genericapiserver.Config) {
	c.Authorization.Authorizer = g.authorizer
	c.RuleResolver = g.resolver
	c.Authentication.Authenticator = g.requests
	c.Authentication.APIAudiences = g.issuer.Audiences
}

// serve adds the discovery documents by which others verify tokens.
func (g *guard) serve(s *genericapiserver.GenericAPIServer) error {
	documents, err := g.issuer.Discovery(g.server)
	if err != nil {
		return err
	}
	for path, h := range documents {
		s.Handler.NonGoRestfulMux.Handle(path, h)
	}
	return nil
}

// security returns what the storages need of the guard. resolve finds the resource of a
// kind.
func (g *guard) security(resolve func(schema.GroupVersionKind) (schema.GroupVersionResource, error)) registry.Security {
	return registry.Security{
		Authorizer: g.authorizer, Rules: g.rules,
		Reviews: review.Answers{Authorizer: g.authorizer, Rules: g.resolver, Tokens: g.tokens, Audiences: g.issuer.Audiences},
		Tokens:  g.issuer, MaxTokenLife: g.maxLife, Resolve: resolve,
	}
}

// run does the guard's background work until ctx ends.
func (g *guard) run(ctx context.Context) {
	var loops sync.WaitGroup
	loops.Go(func() { g.aggregator.Run(ctx) })
	loops.Go(func() { g.pods.run(ctx) })
	loops.Go(func() { g.tls.run(ctx) })
	loops.Go(func() { g.signer.run(ctx) })
	loops.Go(func() { g.keeper.Run(ctx) })
	loops.Wait()
}

// ensurePolicy makes the default roles and waits until the authorizers know them.
func (g *guard) ensurePolicy(ctx context.Context, client kubernetes.Interface) error {
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
