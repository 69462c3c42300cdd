package access

import (
	"context"
	"fmt"
	"time"

	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/anonymous"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/request/union"
	"k8s.io/apiserver/pkg/authentication/request/websocket"
	tokencache "k8s.io/apiserver/pkg/authentication/token/cache"
	"k8s.io/apiserver/pkg/authentication/token/tokenfile"
	tokenunion "k8s.io/apiserver/pkg/authentication/token/union"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/certs"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// Identities of the system's own parts.
const (
	// GroupBootstrappers is the group of users with the join token or a bootstrap
	// token: it may request the certificate of a node.
	GroupBootstrappers = "system:bootstrappers"
	// UserNodeToken is the user of the join token.
	UserNodeToken = "system:node-token"
)

// tokenCacheTime is how long an authenticated token is cached, and so how long one
// may outlive what it is bound to.
const tokenCacheTime = 2 * time.Second

// healthPaths are answered without credentials if the options ask for it.
func healthPaths() []apiserverconfig.AnonymousAuthCondition {
	return []apiserverconfig.AnonymousAuthCondition{{Path: "/livez"}, {Path: "/readyz"}, {Path: "/healthz"}}
}

// newAuthenticator accepts client certificates of the authorities, and tokens. All other requests are answered
// 401, except requests for the server's health if openHealth is set.
func newAuthenticator(clients *certs.ClientCAs, tokens authenticator.Token, openHealth bool) authenticator.Request {
	known := group.NewAuthenticatedGroupAdder(union.New(
		clients.Authenticator(),
		bearertoken.New(tokens),
		websocket.NewProtocolAuthenticator(tokens),
	))
	if !openHealth {
		return known
	}
	return union.NewFailOnError(known, anonymous.NewAuthenticator(healthPaths()))
}

// newTokens accepts the join token, tokens of ServiceAccounts, and the kinds of tokens that the options
// enable.
func newTokens(
	ctx context.Context, o AuthOptions, client kubernetes.Interface, authorities func() *pki.Bundle, accounts authenticator.Token,
) (authenticator.Token, error) {
	secrets := bootstrapTokens{client: client, now: time.Now}
	plain := []authenticator.Token{nodeTokens{authorities, secrets}}
	if o.TokenFile != "" {
		static, err := tokenfile.NewCSV(o.TokenFile)
		if err != nil {
			return nil, fmt.Errorf("--token-auth-file %s: %w", o.TokenFile, err)
		}
		plain = append(plain, static)
	}
	if o.BootstrapTokens {
		plain = append(plain, secrets)
	}
	all := []authenticator.Token{accounts}
	for _, t := range plain {
		all = append(all, authenticator.WrapAudienceAgnosticToken(o.APIAudiences, t))
	}
	providers, err := oidcTokens(ctx, o)
	if err != nil {
		return nil, err
	}
	for _, p := range providers {
		all = append(all, authenticator.WrapAudienceAgnosticToken(o.APIAudiences, p))
	}
	return tokencache.New(tokenunion.New(all...), true, tokenCacheTime, 0), nil
}

// nodeTokens authenticates join tokens, by their Secrets.
type nodeTokens struct {
	authorities func() *pki.Bundle
	secrets     bootstrapTokens
}

// AuthenticateToken has no opinion of tokens of another form. The user's UID is the
// token's ID.
func (n nodeTokens) AuthenticateToken(ctx context.Context, given string) (*authenticator.Response, bool, error) {
	t, err := join.Parse(given)
	if err != nil || !n.authorities().Trusts(t.Hash) {
		return nil, false, nil //nolint:nilerr // a token of another kind
	}
	if t.Approval {
		s, err := n.secrets.secret(ctx, t.ID, t.Secret, join.UsageApproval)
		if s == nil || err != nil {
			return nil, false, err
		}
		return &authenticator.Response{User: requesterWith(t.ID)}, true, nil
	}
	r, ok, err := n.secrets.AuthenticateToken(ctx, t.ID+"."+t.Secret)
	if !ok || err != nil {
		return nil, false, err
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: UserNodeToken, UID: t.ID, Groups: r.User.GetGroups()}}, true, nil
}
