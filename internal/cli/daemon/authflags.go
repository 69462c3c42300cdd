package daemon

import (
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	genericoptions "k8s.io/apiserver/pkg/server/options"

	"github.com/fairlead/fairlead/internal/apiserver/access"
)

// addAuthFlags adds the flags of authentication, audit and encryption, by the
// names that kube-apiserver has for them.
func addAuthFlags(cmd *cobra.Command, o *access.AuthOptions) {
	flags := cmd.Flags()
	flags.StringVar(&o.ServiceAccountIssuer, "service-account-issuer", "",
		"issuer in ServiceAccount tokens, a URL (default https://kubernetes.default.svc.cluster.local)")
	flags.StringSliceVar(&o.APIAudiences, "api-audiences", nil, "audiences of tokens for this API (default: the issuer)")
	flags.DurationVar(&o.ServiceAccountMaxTokenLife, "service-account-max-token-expiration", 0,
		"longest life of a ServiceAccount token, 10m or more (default: as requested)")
	flags.StringVar(&o.TokenFile, "token-auth-file", "", `file of static tokens, a line of token,user,uid,"group1,group2" each`)
	flags.BoolVar(&o.BootstrapTokens, "enable-bootstrap-token-auth", false,
		"recognise Secrets of type bootstrap.kubernetes.io/token in kube-system")
	flags.StringVar(&o.AuthenticationConfig, "authentication-config", "",
		"file that describes OpenID Connect providers (AuthenticationConfiguration), in place of the --oidc flags")
	flags.StringVar(&o.OIDC.IssuerURL, "oidc-issuer-url", "", "URL of an OpenID Connect provider whose tokens are recognised")
	flags.StringVar(&o.OIDC.ClientID, "oidc-client-id", "", "audience of the provider's tokens for this API")
	flags.StringVar(&o.OIDC.UsernameClaim, "oidc-username-claim", "sub", "claim that is the user's name")
	flags.StringVar(&o.OIDC.UsernamePrefix, "oidc-username-prefix", "",
		"prefix of users' names, - for none (default: the issuer and #, none for the claim email)")
	flags.StringVar(&o.OIDC.GroupsClaim, "oidc-groups-claim", "", "claim that lists the user's groups")
	flags.StringVar(&o.OIDC.GroupsPrefix, "oidc-groups-prefix", "", "prefix of groups")
	flags.StringVar(&o.OIDC.CAFile, "oidc-ca-file", "", "authorities of the provider's certificate (default: the system's)")
	flags.StringSliceVar(&o.OIDC.SigningAlgs, "oidc-signing-algs", []string{"RS256"}, "signatures admitted")
	flags.StringToStringVar(&o.OIDC.RequiredClaims, "oidc-required-claim", nil, "claim=value that a token must have")
	flags.BoolVar(&o.OpenHealth, "anonymous-health", false, "answer /livez, /readyz and /healthz without credentials")
	flags.StringVar(&o.EncryptionConfig, "encryption-provider-config", "",
		"file that describes which kinds are encrypted in etcd, and how (EncryptionConfiguration)")
	o.Audit = genericoptions.NewAuditOptions()
	all := pflag.NewFlagSet("audit", pflag.ContinueOnError)
	o.Audit.AddFlags(all)
	// The usual ones are shown; the tuning of batches is there all the same.
	shown := []string{
		"audit-policy-file", "audit-log-path", "audit-log-maxage", "audit-log-maxbackup", "audit-log-maxsize",
		"audit-log-format", "audit-log-compress", "audit-webhook-config-file",
	}
	all.VisitAll(func(f *pflag.Flag) {
		f.Hidden = !slices.Contains(shown, f.Name)
		flags.AddFlag(f)
	})
}
