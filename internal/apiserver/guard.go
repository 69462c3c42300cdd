package apiserver

import (
	"context"
	"sync"
	"time"

	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/authorization/union"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/registry/rbac"
	"github.com/fairlead/fairlead/internal/registry/review"
)

// guard is what stands between a request and the storages, and the loops that
// belong to it.
type guard struct {
	rules      *rbac.Resolver
	aggregator *rbac.Aggregator
	pods       *podIndex
	signer     *signer
	authorizer authorizer.Authorizer
	lists      authorizer.RuleResolver
	tokens     authenticator.Token
}

// newGuard builds the guard on informers that the generic server starts.
func (s *Server) newGuard(client kubernetes.Interface, shared informers.SharedInformerFactory) (*guard, error) {
	rules, err := rbac.NewResolver(shared)
	if err != nil {
		return nil, err
	}
	pods, err := newPodIndex(client)
	if err != nil {
		return nil, err
	}
	g := &guard{rules: rules, pods: pods, aggregator: rbac.NewAggregator(client, shared, s.log), tokens: nodeToken(s.token)}
	nodes := nodeAuthorizer{pods: pods, rules: nodeRules()}
	g.authorizer, err = union.New(
		union.NamedAuthorizer{AuthorizerName: "privileged", Authorizer: authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup)},
		union.NamedAuthorizer{AuthorizerName: "node", Authorizer: authorizer.AuthorizerFunc(nodes.Authorize)},
		union.NamedAuthorizer{AuthorizerName: "rbac", Authorizer: authorizer.AuthorizerFunc(rules.Authorize)},
	)
	if err != nil {
		return nil, err
	}
	g.lists = union.NewRuleResolvers(nodes, rules)
	g.signer = newSigner(client, shared, g.authorizer, s.creds.pki, s.log)
	return g, nil
}

// configure sets who decides about requests.
func (g *guard) configure(c *genericapiserver.Config) {
	c.Authorization.Authorizer = g.authorizer
	c.RuleResolver = g.lists
}

// admission returns the plug-ins of the guard.
func (g *guard) admission() []admission.Interface {
	return []admission.Interface{newNodeRestriction(g.pods)}
}

// security is what the storages need.
func (g *guard) security() registry.Security {
	return registry.Security{
		Authorizer: g.authorizer, Rules: g.rules,
		Reviews: review.Answers{Authorizer: g.authorizer, Rules: g.lists, Tokens: g.tokens},
	}
}

// run does the guard's work besides requests, until ctx ends.
func (g *guard) run(ctx context.Context) {
	var loops sync.WaitGroup
	loops.Go(func() { g.aggregator.Run(ctx) })
	loops.Go(func() { g.pods.run(ctx) })
	loops.Go(func() { g.signer.run(ctx) })
	loops.Wait()
}

// ensurePolicy makes the default roles and waits until requests are decided by
// what is stored.
func (g *guard) ensurePolicy(ctx context.Context, client kubernetes.Interface) error {
	policy := defaultPolicy()
	if err := rbac.Reconcile(ctx, client, policy); err != nil {
		return err
	}
	for !g.rules.Knows(policy) || !g.pods.informer.HasSynced() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}
