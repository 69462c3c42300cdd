package access

import (
	"context"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	configinstall "k8s.io/apiserver/pkg/apis/apiserver/install"
	"k8s.io/apiserver/pkg/apis/apiserver/validation"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"
	"k8s.io/apiserver/plugin/pkg/authenticator/token/oidc"
	"k8s.io/utils/ptr"
)

// oidcTokens returns an authenticator for each provider that the options name. It
// follows the keys of its provider until ctx ends.
func oidcTokens(ctx context.Context, o AuthOptions) ([]authenticator.Token, error) {
	config := &apiserverconfig.AuthenticationConfiguration{}
	algorithms := oidc.AllValidSigningAlgorithms()
	var err error
	switch {
	case o.AuthenticationConfig != "":
		if config, err = loadAuthentication(o.AuthenticationConfig); err != nil {
			return nil, fmt.Errorf("--authentication-config %s: %w", o.AuthenticationConfig, err)
		}
	case o.OIDC.IssuerURL != "":
		provider, err := o.OIDC.provider()
		if err != nil {
			return nil, err
		}
		config.JWT = []apiserverconfig.JWTAuthenticator{provider}
		if algorithms = o.OIDC.SigningAlgs; len(algorithms) == 0 {
			algorithms = []string{"RS256"}
		}
	default:
		return nil, nil
	}
	disallowed := []string{o.ServiceAccountIssuer}
	if errs := validation.ValidateAuthenticationConfiguration(authenticationcel.NewDefaultCompiler(), config, disallowed); len(errs) > 0 {
		return nil, fmt.Errorf("the OpenID Connect providers: %w", errs.ToAggregate())
	}
	var out []authenticator.Token
	for _, p := range config.JWT {
		opts := oidc.Options{JWTAuthenticator: p, SupportedSigningAlgs: algorithms, DisallowedIssuers: disallowed}
		if p.Issuer.CertificateAuthority != "" {
			opts.CAContentProvider = staticCA(p.Issuer.CertificateAuthority)
		}
		a, err := oidc.New(ctx, opts)
		if err != nil {
			return nil, fmt.Errorf("OpenID Connect provider %s: %w", p.Issuer.URL, err)
		}
		out = append(out, a)
	}
	return out, nil
}

type staticCA string

// CurrentCABundleContent returns the authorities as PEM.
func (s staticCA) CurrentCABundleContent() []byte { return []byte(s) }

// provider converts the flags into an entry of the configuration file.
func (o OIDCOptions) provider() (apiserverconfig.JWTAuthenticator, error) {
	prefix := o.UsernamePrefix
	switch {
	case prefix == "-":
		prefix = ""
	case prefix == "" && o.UsernameClaim != "email":
		prefix = o.IssuerURL + "#"
	}
	p := apiserverconfig.JWTAuthenticator{
		Issuer: apiserverconfig.Issuer{URL: o.IssuerURL, Audiences: []string{o.ClientID}},
		ClaimMappings: apiserverconfig.ClaimMappings{
			Username: apiserverconfig.PrefixedClaimOrExpression{Claim: o.UsernameClaim, Prefix: ptr.To(prefix)},
		},
	}
	if o.GroupsClaim != "" {
		p.ClaimMappings.Groups = apiserverconfig.PrefixedClaimOrExpression{Claim: o.GroupsClaim, Prefix: ptr.To(o.GroupsPrefix)}
	}
	for claim, value := range o.RequiredClaims {
		p.ClaimValidationRules = append(p.ClaimValidationRules, apiserverconfig.ClaimValidationRule{Claim: claim, RequiredValue: value})
	}
	if o.CAFile != "" {
		ca, err := os.ReadFile(o.CAFile)
		if err != nil {
			return p, fmt.Errorf("--oidc-ca-file: %w", err)
		}
		p.Issuer.CertificateAuthority = string(ca)
	}
	return p, nil
}

// loadAuthentication reads an AuthenticationConfiguration of
// apiserver.config.k8s.io; unknown fields are an error.
func loadAuthentication(file string) (*apiserverconfig.AuthenticationConfiguration, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	s := runtime.NewScheme()
	configinstall.Install(s)
	codecs := serializer.NewCodecFactory(s, serializer.EnableStrict)
	obj, err := runtime.Decode(codecs.UniversalDecoder(), data)
	if err != nil {
		return nil, err
	}
	c, ok := obj.(*apiserverconfig.AuthenticationConfiguration)
	if !ok {
		return nil, fmt.Errorf("the file holds a %T; want an AuthenticationConfiguration", obj)
	}
	if c.Anonymous != nil && c.Anonymous.Enabled {
		return nil, fmt.Errorf("anonymous requests are not served here; leave anonymous out, or set enabled: false")
	}
	return c, nil
}
