package apiserver_test

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"encoding/pem"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	jose "github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/access"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestAuthentication has one server with every way to be recognised, an audit
// log and encryption.
func TestAuthentication(t *testing.T) {
	t.Parallel()
	dir, log := t.TempDir(), filepath.Join(t.TempDir(), "audit.log")
	p := newProvider(t)
	ca := file(t, "ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.server.Certificate().Raw})))
	s, stop := apiservertest.StartStoppable(t, func(o *apiserver.Options) {
		o.DataDir = dir
		o.Auth.TokenFile = file(t, "tokens.csv", "static-secret,sue,u1,\"dev,ops\"\n")
		o.Auth.BootstrapTokens = true
		o.Auth.OIDC = access.OIDCOptions{
			IssuerURL: p.server.URL, ClientID: "fairlead", UsernameClaim: "email", GroupsClaim: "groups", GroupsPrefix: "oidc:",
			CAFile: ca, SigningAlgs: []string{"ES256"}, RequiredClaims: map[string]string{"team": "net"},
		}
		o.Auth.EncryptionConfig = file(t, "encryption.yaml", `
apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - secretbox:
      keys: [{name: one, secret: MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=}]
`)
		o.Auth.Audit = genericoptions.NewAuditOptions()
		o.Auth.Audit.LogOptions.Path = log
		o.Auth.Audit.PolicyFile = file(t, "audit.yaml", `
apiVersion: audit.k8s.io/v1
kind: Policy
rules:
- level: RequestResponse
  resources: [{group: "", resources: [configmaps]}]
  omitStages: [RequestReceived]
- level: None
`)
	})
	defer stop()
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	t.Run("static", func(t *testing.T) {
		u, err := whoami(t, s, "static-secret")
		if err != nil || u.Username != "sue" || u.UID != "u1" || !slices.Contains(u.Groups, "ops") {
			t.Errorf("%+v, %v", u, err)
		}
		if _, err := whoami(t, s, "static-secre"); !apierrors.IsUnauthorized(err) {
			t.Errorf("half a token: %v", err)
		}
	})
	t.Run("bootstrap", func(t *testing.T) { testBootstrapToken(t, s, admin) })
	t.Run("oidc", func(t *testing.T) { testOIDC(t, s, p) })
	const seen, hidden = "value-in-the-clear", "value-under-lock"
	if _, err := admin.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "audited"},
		Data: map[string]string{"k": seen}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "locked"},
		StringData: map[string]string{"k": hidden}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got, err := admin.CoreV1().Secrets("default").Get(t.Context(), "locked", metav1.GetOptions{}); err != nil ||
		string(got.Data["k"]) != hidden {
		t.Errorf("%v, %v", got, err)
	}
	stop()
	if !stored(t, filepath.Join(dir, "etcd"), seen) || stored(t, filepath.Join(dir, "etcd"), hidden) {
		t.Error("the Secret lies in etcd in the clear, or the ConfigMap is not found")
	}
	audited(t, log, "audited")
}

// stored reports whether a file below dir holds text.
func stored(t *testing.T, dir, text string) (found bool) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		found = found || bytes.Contains(data, []byte(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// audited looks for the creation of the ConfigMap, with its body, and that
// nothing else was written down.
func audited(t *testing.T, path, name string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	found := false
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e auditv1.Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		if e.ObjectRef == nil || e.ObjectRef.Resource != "configmaps" {
			t.Errorf("written against the policy: %s", lines.Text())
		}
		found = found || e.Verb == "create" && e.ObjectRef.Name == name && e.User.Username != "" &&
			bytes.Contains(e.RequestObject.Raw, []byte("value-in-the-clear"))
	}
	if !found {
		t.Error("the audit log lacks the ConfigMap")
	}
}

func testBootstrapToken(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	make := func(id string, change map[string]string) {
		data := map[string]string{
			"token-id": id, "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true",
			"auth-extra-groups": "system:bootstrappers:racks", "expiration": time.Now().Add(time.Hour).UTC().Format(time.RFC3339),
		}
		for k, v := range change {
			data[k] = v
		}
		if _, err := c.CoreV1().Secrets("kube-system").Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id}, Type: "bootstrap.kubernetes.io/token", StringData: data,
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	make("aaaaaa", nil)
	make("bbbbbb", map[string]string{"expiration": time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)})
	make("cccccc", map[string]string{"usage-bootstrap-authentication": "false"})
	make("dddddd", map[string]string{"auth-extra-groups": "system:masters"})
	u, err := whoami(t, s, "aaaaaa.0123456789abcdef")
	if err != nil || u.Username != "system:bootstrap:aaaaaa" || !slices.Contains(u.Groups, "system:bootstrappers:racks") ||
		!slices.Contains(u.Groups, "system:bootstrappers") {
		t.Errorf("%+v, %v", u, err)
	}
	for _, bad := range []string{"aaaaaa.0123456789abcdeX", "aaaaaa.fedcba9876543210", "bbbbbb.0123456789abcdef", "cccccc.0123456789abcdef",
		"dddddd.0123456789abcdef", "eeeeee.0123456789abcdef"} {
		if _, err := whoami(t, s, bad); !apierrors.IsUnauthorized(err) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// provider is an OpenID Connect provider: discovery, keys, and a pen.
type provider struct {
	server *httptest.Server
	signer jose.Signer
}

func newProvider(t *testing.T) *provider {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p := &provider{}
	p.signer, err = jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "k"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	answer := func(path string, body func() any) {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			if err := json.NewEncoder(w).Encode(body()); err != nil {
				t.Error(err)
			}
		})
	}
	answer("/.well-known/openid-configuration", func() any {
		return map[string]any{"issuer": p.server.URL, "jwks_uri": p.server.URL + "/keys",
			"id_token_signing_alg_values_supported": []string{"ES256"}}
	})
	answer("/keys", func() any {
		return jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "k", Use: "sig", Algorithm: "ES256"}}}
	})
	p.server = httptest.NewTLSServer(mux)
	t.Cleanup(p.server.Close)
	return p
}

func (p *provider) token(t *testing.T, audience, team string, life time.Duration) string {
	t.Helper()
	text, err := jwt.Signed(p.signer).Claims(map[string]any{
		"iss": p.server.URL, "aud": audience, "exp": time.Now().Add(life).Unix(), "iat": time.Now().Add(-time.Hour).Unix(),
		"sub": "42", "email": "eve@example.com", "email_verified": true, "groups": []string{"dev"}, "team": team,
	}).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func testOIDC(t *testing.T, s *apiserver.Server, p *provider) {
	good := p.token(t, "fairlead", "net", time.Hour)
	// The keys are fetched in the background.
	eventually(t, "the provider's token is recognised", func() bool {
		u, err := whoami(t, s, good)
		return err == nil && u.Username == "eve@example.com" && slices.Contains(u.Groups, "oidc:dev")
	})
	for what, bad := range map[string]string{
		"another audience": p.token(t, "others", "net", time.Hour),
		"a missing claim":  p.token(t, "fairlead", "art", time.Hour),
		"an old token":     p.token(t, "fairlead", "net", -time.Minute),
		"a forged one":     good[:strings.LastIndex(good, ".")+1] + strings.Repeat("A", 86),
	} {
		if _, err := whoami(t, s, bad); !apierrors.IsUnauthorized(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// What cannot work is an error before anything is served.
func TestAuthenticationOptions(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		change func(*access.AuthOptions)
		want   string
	}{
		"half a provider": {func(o *access.AuthOptions) { o.OIDC.IssuerURL = "https://x" }, "--oidc-client-id"},
		"two ways": {func(o *access.AuthOptions) {
			o.OIDC.IssuerURL, o.OIDC.ClientID, o.AuthenticationConfig = "https://x", "y", "z"
		}, "--authentication-config"},
		"a short life": {func(o *access.AuthOptions) { o.ServiceAccountMaxTokenLife = time.Minute }, "--service-account-max-token-expiration"},
	} {
		o := apiserver.Options{DataDir: t.TempDir()}
		c.change(&o.Auth)
		if s, err := apiserver.New(o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", what, err)
			if err == nil {
				s.Close()
			}
		}
	}
	for what, c := range map[string]struct {
		change func(*access.AuthOptions)
		want   string
	}{
		"no tokens":     {func(o *access.AuthOptions) { o.TokenFile = "/nowhere" }, "--token-auth-file"},
		"no encryption": {func(o *access.AuthOptions) { o.EncryptionConfig = "/nowhere" }, "--encryption-provider-config"},
		"unknown fields": {func(o *access.AuthOptions) {
			o.AuthenticationConfig = file(t, "a", "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\nx: y\n")
		}, "--authentication-config"},
		"an issuer of ours": {func(o *access.AuthOptions) {
			o.OIDC.IssuerURL, o.OIDC.ClientID = "https://kubernetes.default.svc.cluster.local", "x"
		}, "OpenID Connect"},
	} {
		o := apiserver.Options{DataDir: t.TempDir(), UnsafeNoFsync: true}
		c.change(&o.Auth)
		s, err := apiserver.New(o)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
