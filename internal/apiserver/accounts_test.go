package apiserver_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	jose "github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

func TestServiceAccounts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, stop := apiservertest.StartStoppable(t, func(o *apiserver.Options) { o.DataDir = dir })
	defer stop()
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	t.Run("namespaces", func(t *testing.T) { testNamespaceHasAccount(t, admin) })
	t.Run("admission", func(t *testing.T) { testAccountAdmission(t, admin) })
	t.Run("requests", func(t *testing.T) { testTokenRequests(t, admin) })
	t.Run("bound", func(t *testing.T) { testBoundTokens(t, s, admin) })
	t.Run("audiences", func(t *testing.T) { testAudiences(t, s, admin) })
	t.Run("discovery", func(t *testing.T) { testDiscovery(t, s, admin) })
	t.Run("nodes", func(t *testing.T) { testNodeTokens(t, s, admin) })
	token := tokenOf(t, admin, "default", nil)
	if st, err := os.Stat(filepath.Join(dir, "pki", "sa.key")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the signing key: %v, %v", st, err)
	}
	stop()
	s = apiservertest.StartServer(t, func(o *apiserver.Options) { o.DataDir = dir })
	if _, err := whoami(t, s, token); err != nil {
		t.Errorf("a token did not survive a restart: %v", err)
	}
}

func testNamespaceHasAccount(t *testing.T, c *kubernetes.Clientset) {
	if _, err := c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "fresh"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	there := func(ns string) func() bool {
		return func() bool {
			_, err := c.CoreV1().ServiceAccounts(ns).Get(t.Context(), "default", metav1.GetOptions{})
			cm, cmErr := c.CoreV1().ConfigMaps(ns).Get(t.Context(), "kube-root-ca.crt", metav1.GetOptions{})
			return err == nil && cmErr == nil && strings.Contains(cm.Data["ca.crt"], "BEGIN CERTIFICATE")
		}
	}
	for _, ns := range []string{"fresh", "default", "kube-system"} {
		eventually(t, ns+" has its account", there(ns))
	}
	if err := c.CoreV1().ServiceAccounts("fresh").Delete(t.Context(), "default", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.CoreV1().ConfigMaps("fresh").Delete(t.Context(), "kube-root-ca.crt", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what was deleted is back", there("fresh"))
	if _, err := c.CoreV1().ConfigMaps("fresh").Patch(t.Context(), "kube-root-ca.crt", types.MergePatchType,
		[]byte(`{"data":{"ca.crt":"x"}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what was damaged is repaired", there("fresh"))
}

func testAccountAdmission(t *testing.T, c *kubernetes.Clientset) {
	no := false
	// Before anything has made the account of a new namespace, a Pod comes.
	if _, err := c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "quick"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p, err := c.CoreV1().Pods("quick").Create(t.Context(), podNamed("a"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	v := p.Spec.Volumes
	if p.Spec.ServiceAccountName != "default" || len(v) != 1 || !strings.HasPrefix(v[0].Name, "kube-api-access-") ||
		len(v[0].Projected.Sources) != 3 ||
		*v[0].Projected.Sources[0].ServiceAccountToken.ExpirationSeconds != 3607 {
		t.Errorf("%+v", p.Spec)
	}
	if m := p.Spec.Containers[0].VolumeMounts; len(m) != 1 || m[0].MountPath != "/var/run/secrets/kubernetes.io/serviceaccount" ||
		!m[0].ReadOnly {
		t.Errorf("%+v", m)
	}
	plain, err := c.CoreV1().Pods("quick").Create(t.Context(),
		podNamed("b", func(p *corev1.Pod) { p.Spec.AutomountServiceAccountToken = &no }), metav1.CreateOptions{})
	if err != nil || len(plain.Spec.Volumes) > 0 {
		t.Errorf("a token for a Pod that wants none: %+v, %v", plain.Spec.Volumes, err)
	}
	if _, err := c.CoreV1().ServiceAccounts("quick").Create(t.Context(), &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Name: "quiet"}, AutomountServiceAccountToken: &no,
		ImagePullSecrets: []corev1.LocalObjectReference{{Name: "pull"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	quiet, err := c.CoreV1().Pods("quick").Create(t.Context(), podNamed("c", func(p *corev1.Pod) { p.Spec.ServiceAccountName = "quiet" }),
		metav1.CreateOptions{})
	if err != nil || len(quiet.Spec.Volumes) > 0 || len(quiet.Spec.ImagePullSecrets) != 1 {
		t.Errorf("%+v, %v", quiet.Spec, err)
	}
	_, err = c.CoreV1().Pods("quick").Create(t.Context(), podNamed("d", func(p *corev1.Pod) { p.Spec.ServiceAccountName = "missing" }),
		metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "missing") {
		t.Errorf("an account that is not there: %v", err)
	}
}

func request(change func(*authenticationv1.TokenRequestSpec)) *authenticationv1.TokenRequest {
	r := &authenticationv1.TokenRequest{}
	if change != nil {
		change(&r.Spec)
	}
	return r
}

func tokenOf(t *testing.T, c *kubernetes.Clientset, namespace string, change func(*authenticationv1.TokenRequestSpec)) string {
	t.Helper()
	r, err := c.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), "default", request(change), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Status.Token
}

// bearer is a client with a token and nothing else.
func bearer(s *apiserver.Server, token string) *kubernetes.Clientset {
	cfg := rest.AnonymousClientConfig(s.LoopbackConfig())
	cfg.BearerToken = token
	return kubernetes.NewForConfigOrDie(cfg)
}

func whoami(t *testing.T, s *apiserver.Server, token string) (authenticationv1.UserInfo, error) {
	t.Helper()
	r, err := bearer(s, token).AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{},
		metav1.CreateOptions{})
	if err != nil {
		return authenticationv1.UserInfo{}, err
	}
	return r.Status.UserInfo, nil
}

func testTokenRequests(t *testing.T, c *kubernetes.Clientset) {
	api := c.CoreV1().ServiceAccounts("default")
	r, err := api.CreateToken(t.Context(), "default", request(nil), metav1.CreateOptions{})
	if err != nil || *r.Spec.ExpirationSeconds != 3600 ||
		!slices.Equal(r.Spec.Audiences, []string{"https://kubernetes.default.svc.cluster.local"}) {
		t.Fatalf("%+v, %v", r, err)
	}
	short, long := int64(60), int64(1)<<33
	_, err = api.CreateToken(t.Context(), "default", request(func(s *authenticationv1.TokenRequestSpec) { s.ExpirationSeconds = &short }),
		metav1.CreateOptions{})
	invalidAt(t, err, "spec.expirationSeconds")
	_, err = api.CreateToken(t.Context(), "default", request(func(s *authenticationv1.TokenRequestSpec) { s.ExpirationSeconds = &long }),
		metav1.CreateOptions{})
	invalidAt(t, err, "spec.expirationSeconds")
	if _, err = api.CreateToken(t.Context(), "missing", request(nil), metav1.CreateOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("an account that is not there: %v", err)
	}
	bind := func(kind, name string, uid types.UID) error {
		_, err := api.CreateToken(t.Context(), "default", request(func(s *authenticationv1.TokenRequestSpec) {
			s.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: kind, Name: name, UID: uid}
		}), metav1.CreateOptions{})
		return err
	}
	if _, err := api.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "else"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for name, account := range map[string]string{"of-default": "default", "of-else": "else"} {
		if _, err := c.CoreV1().Pods("default").Create(t.Context(),
			podNamed(name, func(p *corev1.Pod) { p.Spec.ServiceAccountName = account }), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := bind("Pod", "of-default", ""); err != nil {
		t.Error(err)
	}
	if err := bind("Pod", "of-default", "another"); !apierrors.IsConflict(err) {
		t.Errorf("another UID: %v", err)
	}
	if err := bind("Pod", "of-else", ""); !apierrors.IsBadRequest(err) {
		t.Errorf("a Pod of another account: %v", err)
	}
	if err := bind("ConfigMap", "x", ""); !apierrors.IsBadRequest(err) {
		t.Errorf("another kind: %v", err)
	}
	if err := bind("Secret", "x", ""); !apierrors.IsNotFound(err) {
		t.Errorf("a Secret that is not there: %v", err)
	}
}

// A token ends with what it is bound to.
func testBoundTokens(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
	pod, err := c.CoreV1().Pods("default").Create(t.Context(), podNamed("bound"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	secret, err := c.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "bound"}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node, err := c.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "bound"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	to := func(kind string, uid types.UID) func(*authenticationv1.TokenRequestSpec) {
		return func(s *authenticationv1.TokenRequestSpec) {
			s.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: kind, Name: "bound", UID: uid}
		}
	}
	for _, b := range []struct {
		kind   string
		uid    types.UID
		extra  string
		remove func() error
	}{
		{"Pod", pod.UID, "authentication.kubernetes.io/pod-name",
			func() error { return c.CoreV1().Pods("default").Delete(t.Context(), "bound", now) }},
		{"Secret", secret.UID, "", func() error { return c.CoreV1().Secrets("default").Delete(t.Context(), "bound", now) }},
		{"Node", node.UID, "authentication.kubernetes.io/node-name",
			func() error { return c.CoreV1().Nodes().Delete(t.Context(), "bound", now) }},
	} {
		used, unused := tokenOf(t, c, "default", to(b.kind, b.uid)), tokenOf(t, c, "default", to(b.kind, b.uid))
		u, err := whoami(t, s, used)
		if err != nil || u.Username != "system:serviceaccount:default:default" ||
			!slices.Contains(u.Groups, "system:serviceaccounts:default") || !slices.Contains(u.Groups, "system:authenticated") {
			t.Errorf("%s: %+v, %v", b.kind, u, err)
		}
		if b.extra != "" && !slices.Equal(u.Extra[b.extra], []string{"bound"}) {
			t.Errorf("%s: %v", b.kind, u.Extra)
		}
		if err := b.remove(); err != nil {
			t.Fatal(err)
		}
		for _, token := range []string{unused, used} {
			eventually(t, "a token ends with its "+b.kind, func() bool {
				_, err := whoami(t, s, token)
				return apierrors.IsUnauthorized(err)
			})
		}
	}
	// Roles may be bound to accounts.
	token := tokenOf(t, c, "default", nil)
	list := func() error {
		_, err := bearer(s, token).CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
		return err
	}
	if err := list(); !apierrors.IsForbidden(err) {
		t.Errorf("an account may do something without a role: %v", err)
	}
	if _, err := c.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "account"}, RoleRef: roleRef("ClusterRole", "view"),
		Subjects: subjects(rbacv1.Subject{Kind: "ServiceAccount", Name: "default"}),
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the account may list", func() bool { return list() == nil })
}

func testAudiences(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	token := tokenOf(t, c, "default", func(s *authenticationv1.TokenRequestSpec) { s.Audiences = []string{"vault"} })
	if _, err := whoami(t, s, token); !apierrors.IsUnauthorized(err) {
		t.Errorf("a token for others was taken: %v", err)
	}
	review := func(token string, audiences ...string) authenticationv1.TokenReviewStatus {
		r, err := c.AuthenticationV1().TokenReviews().Create(t.Context(), &authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: audiences},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return r.Status
	}
	if r := review(token, "vault", "x"); !r.Authenticated || !slices.Equal(r.Audiences, []string{"vault"}) {
		t.Errorf("%+v", r)
	}
	if r := review(token); r.Authenticated {
		t.Errorf("%+v", r)
	}
	// One letter of the signature changed.
	at := strings.LastIndex(token, ".") + 1
	other := "A"
	if token[at] == 'A' {
		other = "B"
	}
	if r := review(token[:at]+other+token[at+1:], "vault"); r.Authenticated || r.Error == "" {
		t.Errorf("a forged token: %+v", r)
	}
}

// Others recognise tokens by the published keys.
func testDiscovery(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	token := tokenOf(t, c, "default", nil)
	account := bearer(s, token)
	get := func(path string, into any) {
		raw, err := account.CoreV1().RESTClient().Get().AbsPath(path).DoRaw(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(raw, into); err != nil {
			t.Fatal(err)
		}
	}
	var config struct {
		Issuer  string   `json:"issuer"`
		JWKSURI string   `json:"jwks_uri"`
		Algs    []string `json:"id_token_signing_alg_values_supported"`
	}
	get("/.well-known/openid-configuration", &config)
	if config.Issuer != "https://kubernetes.default.svc.cluster.local" || config.JWKSURI != s.URL()+"/openid/v1/jwks" ||
		!slices.Equal(config.Algs, []string{"ES256"}) {
		t.Errorf("%+v", config)
	}
	var keys jose.JSONWebKeySet
	get("/openid/v1/jwks", &keys)
	parsed, err := jwt.ParseSigned(token, []jose.SignatureAlgorithm{jose.ES256})
	if err != nil {
		t.Fatal(err)
	}
	var claims jwt.Claims
	if k := keys.Key(parsed.Headers[0].KeyID); len(k) != 1 || !k[0].IsPublic() || parsed.Claims(k[0], &claims) != nil ||
		claims.Issuer != config.Issuer {
		t.Errorf("the token is not of the published keys: %+v", claims)
	}
}

// A node gets tokens of the its own accounts Pods alone, bound to them.
func testNodeTokens(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	node := kubernetes.NewForConfigOrDie(joined(t, s, "tokens", t.TempDir()).Config())
	if _, err := node.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "tokens"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pods := map[string]types.UID{}
	for name, n := range map[string]string{"here": "tokens", "there": "elsewhere"} {
		if _, err := c.CoreV1().ServiceAccounts("default").Create(t.Context(),
			&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		p, err := c.CoreV1().Pods("default").Create(t.Context(),
			podNamed(name, onNode(n), func(p *corev1.Pod) { p.Spec.ServiceAccountName = name }), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		pods[name] = p.UID
	}
	ask := func(account, pod string) error {
		_, err := node.CoreV1().ServiceAccounts("default").CreateToken(t.Context(), account, request(func(s *authenticationv1.TokenRequestSpec) {
			if pod != "" {
				s.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod, UID: pods[pod]}
			}
		}), metav1.CreateOptions{})
		return err
	}
	if err := ask("here", "here"); err != nil {
		t.Error(err)
	}
	for _, r := range [][2]string{{"here", ""}, {"there", "there"}, {"here", "there"}} {
		if err := ask(r[0], r[1]); !apierrors.IsForbidden(err) {
			t.Errorf("a token of %q bound to %q: %v", r[0], r[1], err)
		}
	}
}
