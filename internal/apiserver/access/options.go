package access

import (
	"errors"
	"fmt"
	"time"

	genericoptions "k8s.io/apiserver/pkg/server/options"
)

// defaultIssuer is the name of the issuer of ServiceAccount tokens: the
// Service by which Pods find the API.
const defaultIssuer = "https://kubernetes.default.svc.cluster.local"

// AuthOptions configure authentication, the audit log and encryption at rest.
// Files are given by their paths; empty means none.
type AuthOptions struct {
	// ServiceAccountIssuer is the issuer in ServiceAccount tokens, a URL;
	// default https://kubernetes.default.svc.cluster.local.
	ServiceAccountIssuer string
	// APIAudiences are the audiences of tokens for this API; default the issuer.
	APIAudiences []string
	// ServiceAccountMaxTokenLife bounds the life of tokens; zero means unbounded.
	ServiceAccountMaxTokenLife time.Duration

	// TokenFile has a line "token,user,uid,"group,..."" for each static token.
	TokenFile string
	// BootstrapTokens accepts Secrets of type bootstrap.kubernetes.io/token
	// in kube-system.
	BootstrapTokens bool
	// OIDC accepts tokens of one OpenID Connect provider; AuthenticationConfig is
	// a file that describes several.
	OIDC                 OIDCOptions
	AuthenticationConfig string

	// OpenHealth answers /livez, /readyz and /healthz without credentials.
	OpenHealth bool

	// Audit configures the audit log; nil for none.
	Audit *genericoptions.AuditOptions
	// EncryptionConfig is a file with the encryption of kinds in etcd (kind
	// EncryptionConfiguration of apiserver.config.k8s.io).
	EncryptionConfig string
}

// OIDCOptions describe an OpenID Connect provider. Without IssuerURL
// there is no provider.
type OIDCOptions struct {
	IssuerURL, ClientID string
	// UsernameClaim defaults to "sub". UsernamePrefix defaults to the issuer
	// and "#", except for the claim "email"; "-" means none.
	UsernameClaim, UsernamePrefix string
	GroupsClaim, GroupsPrefix     string
	// CAFile has the authorities of the provider's certificate; default the
	// system's.
	CAFile string
	// SigningAlgs are the accepted signature algorithms; default RS256.
	SigningAlgs []string
	// RequiredClaims must be in a token with these values.
	RequiredClaims map[string]string
}

// Complete fills in the defaults and rejects what cannot work.
func (o *AuthOptions) Complete() error {
	if o.ServiceAccountIssuer == "" {
		o.ServiceAccountIssuer = defaultIssuer
	}
	if len(o.APIAudiences) == 0 {
		o.APIAudiences = []string{o.ServiceAccountIssuer}
	}
	if o.ServiceAccountMaxTokenLife != 0 && o.ServiceAccountMaxTokenLife < 10*time.Minute {
		return fmt.Errorf("--service-account-max-token-expiration is %s: want 10m or more", o.ServiceAccountMaxTokenLife)
	}
	if (o.OIDC.IssuerURL == "") != (o.OIDC.ClientID == "") {
		return errors.New("--oidc-issuer-url and --oidc-client-id belong together: give both or none")
	}
	if o.OIDC.IssuerURL != "" && o.AuthenticationConfig != "" {
		return errors.New("--authentication-config takes the place of the --oidc flags: give one or the others")
	}
	if o.OIDC.UsernameClaim == "" {
		o.OIDC.UsernameClaim = "sub"
	}
	if o.Audit == nil {
		return nil
	}
	if log := o.Audit.LogOptions; min(log.MaxAge, log.MaxBackups, log.MaxSize) < 0 { // k8s.io/apiserver asks only if there is a log
		return errors.New("--audit-log-maxage, --audit-log-maxbackup and --audit-log-maxsize must not be negative")
	}
	return errors.Join(o.Audit.Validate()...)
}
