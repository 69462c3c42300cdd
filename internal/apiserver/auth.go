package apiserver

import (
	"context"
	"crypto/subtle"
	"crypto/x509"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/request/union"
	"k8s.io/apiserver/pkg/authentication/request/websocket"
	requestx509 "k8s.io/apiserver/pkg/authentication/request/x509"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// Identities of the system's own parts.
const (
	// GroupControllers is the group of the controllers' client certificate.
	GroupControllers = "system:fairlead-controllers"
	// UserControllers is its user.
	UserControllers = "system:fairlead-controllers"
	// GroupBootstrappers is the group of whoever presents the join token or a
	// bootstrap token: it may ask for the certificate of a node.
	GroupBootstrappers = "system:bootstrappers"
	// UserNodeToken is the user of the join token.
	UserNodeToken = "system:node-token"
	// UserAgentClient is the identity the server shows to agents.
	UserAgentClient = "fairlead-apiserver"
	// userAdmin is the user of admin.kubeconfig, in group system:masters.
	userAdmin = "fairlead-admin"
)

// newAuthenticator recognises client certificates of the authority and the
// join token. Nobody is anonymous: everything else is answered 401.
func newAuthenticator(ca *x509.Certificate, token join.Token) authenticator.Request {
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	opts := requestx509.DefaultVerifyOptions()
	opts.Roots = roots
	tokens := nodeToken(token)
	return group.NewAuthenticatedGroupAdder(union.New(
		requestx509.New(opts, requestx509.CommonNameUserConversion),
		bearertoken.New(tokens),
		websocket.NewProtocolAuthenticator(tokens),
	))
}

// nodeToken recognises the join token.
type nodeToken join.Token

// AuthenticateToken compares in constant time.
func (t nodeToken) AuthenticateToken(_ context.Context, given string) (*authenticator.Response, bool, error) {
	want := join.Token(t).String()
	if subtle.ConstantTimeCompare([]byte(given), []byte(want)) != 1 {
		return nil, false, nil
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: UserNodeToken, Groups: []string{GroupBootstrappers}}}, true, nil
}
