package apiserver

import (
	"context"
	"crypto/subtle"
	"crypto/x509"
	"fmt"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/request/union"
	"k8s.io/apiserver/pkg/authentication/request/websocket"
	requestx509 "k8s.io/apiserver/pkg/authentication/request/x509"
	tokencache "k8s.io/apiserver/pkg/authentication/token/cache"
	"k8s.io/apiserver/pkg/authentication/token/tokenfile"
	tokenunion "k8s.io/apiserver/pkg/authentication/token/union"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// Identities of the system's own parts.
const (
	// GroupControllers is the group of the controllers' client certificate.
	GroupControllers = "system:fairlead-controllers"
	// UserControllers is its user.
	UserControllers = "system:fairlead-controllers"
	// GroupBootstrappers is the group of users with the join token or a bootstrap
	// token: it may request the certificate of a node.
	GroupBootstrappers = "system:bootstrappers"
	// UserNodeToken is the user of the join token.
	UserNodeToken = "system:node-token"
	// UserAgentClient is the user of the server at agents.
	UserAgentClient = "fairlead-apiserver"
	// userAdmin is the user of admin.kubeconfig, in group system:masters.
	userAdmin = "fairlead-admin"
	// userServer is the name in the server's own certificate.
	userServer = "fairlead-server"
)

// tokenCacheTime is how long an authenticated token is cached, and so how long one
// may outlive what it is bound to.
const tokenCacheTime = 2 * time.Second

// newAuthenticator accepts client certificates of the authority, and tokens. There
// is no anonymous user: all other requests are answered 401.
func newAuthenticator(ca *x509.Certificate, tokens authenticator.Token) authenticator.Request {
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	opts := requestx509.DefaultVerifyOptions()
	opts.Roots = roots
	return group.NewAuthenticatedGroupAdder(union.New(
		requestx509.New(opts, requestx509.CommonNameUserConversion),
		bearertoken.New(tokens),
		websocket.NewProtocolAuthenticator(tokens),
	))
}

// newTokens accepts the join token, those of accounts, and the kinds of tokens that
// the options enable.
func (s *Server) newTokens(ctx context.Context, client kubernetes.Interface, accounts authenticator.Token) (authenticator.Token, error) {
	o := s.opts.Auth
	plain := []authenticator.Token{nodeToken(s.token)}
	if o.TokenFile != "" {
		static, err := tokenfile.NewCSV(o.TokenFile)
		if err != nil {
			return nil, fmt.Errorf("--token-auth-file %s: %w", o.TokenFile, err)
		}
		plain = append(plain, static)
	}
	if o.BootstrapTokens {
		plain = append(plain, bootstrapTokens{client: client, now: time.Now})
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

// nodeToken authenticates the join token.
type nodeToken join.Token

// AuthenticateToken compares in constant time.
func (t nodeToken) AuthenticateToken(_ context.Context, given string) (*authenticator.Response, bool, error) {
	want := join.Token(t).String()
	if subtle.ConstantTimeCompare([]byte(given), []byte(want)) != 1 {
		return nil, false, nil
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: UserNodeToken, Groups: []string{GroupBootstrappers}}}, true, nil
}
