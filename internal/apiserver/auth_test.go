package apiserver_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
)

func TestIdentities(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := apiservertest.StartServer(t, func(o *apiserver.Options) { o.DataDir = dir })
	t.Run("anonymous", func(t *testing.T) { testAnonymous(t, s) })
	t.Run("kubeconfig", func(t *testing.T) { testKubeconfig(t, s) })
	t.Run("join", func(t *testing.T) { testJoin(t, s) })
	t.Run("rules", func(t *testing.T) { testRules(t, s) })
	t.Run("modes", func(t *testing.T) { testModes(t, dir) })
}

func testAnonymous(t *testing.T, s *apiserver.Server) {
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots(t, s)}}}
	defer client.CloseIdleConnections()
	for _, path := range []string{"/api/v1/namespaces", "/healthz", "/version", "/metrics"} {
		for _, token := range []string{"", "wrong", s.Token() + "x"} {
			req, err := http.NewRequest(http.MethodGet, s.URL()+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			if token != "" {
				req.Header.Set("Authorization", "Bearer "+token)
			}
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusUnauthorized {
				t.Errorf("%s with token %q: %s, want 401", path, token, resp.Status)
			}
		}
	}
}

func roots(t *testing.T, s *apiserver.Server) *x509.CertPool {
	pool, cfg := x509.NewCertPool(), s.LoopbackConfig()
	if err := rest.LoadTLSFiles(cfg); err != nil {
		t.Fatal(err)
	}
	if !pool.AppendCertsFromPEM(cfg.CAData) {
		t.Fatal("no authority")
	}
	return pool
}

func testKubeconfig(t *testing.T, s *apiserver.Server) {
	cfg, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("the administrator may not: %v", err)
	}
}

func testJoin(t *testing.T, s *apiserver.Server) {
	cfg, err := join.Config(t.Context(), s.URL(), s.Token())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Services("").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("the token alone gives more than a certificate: %v", err)
	}
	other := apiservertest.StartServer(t)
	if _, err := join.Config(t.Context(), s.URL(), other.Token()); err == nil || !strings.Contains(err.Error(), "not of the token's cluster") {
		t.Errorf("another cluster's token: %v", err)
	}
	for _, bad := range []string{"", "fairlead1.x.y", "abc", "fairlead2." + strings.Repeat("a", 64) + ".s"} {
		if _, err := join.Config(t.Context(), s.URL(), bad); err == nil {
			t.Errorf("token %q was accepted", bad)
		}
	}
	if _, err := join.Config(t.Context(), "http://127.0.0.1", s.Token()); err == nil {
		t.Error("a server without TLS was accepted")
	}
}

// testRules asks for what the parts need, and for more.
func testRules(t *testing.T, s *apiserver.Server) {
	clients := map[string]*kubernetes.Clientset{
		"node":        kubernetes.NewForConfigOrDie(joined(t, s, "n", t.TempDir()).Config()),
		"controllers": kubernetes.NewForConfigOrDie(s.ControllersConfig()),
	}
	type request struct {
		who, what string
		allowed   bool
		do        func(context.Context, *kubernetes.Clientset) error
	}
	list := metav1.ListOptions{}
	for _, r := range []request{
		{"node", "register", true, func(ctx context.Context, c *kubernetes.Clientset) error {
			_, err := c.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, metav1.CreateOptions{})
			return err
		}},
		{"node", "list services", true, func(ctx context.Context, c *kubernetes.Clientset) error {
			_, err := c.CoreV1().Services("").List(ctx, list)
			return err
		}},
		{"node", "list endpointslices", true, func(ctx context.Context, c *kubernetes.Clientset) error {
			_, err := c.DiscoveryV1().EndpointSlices("").List(ctx, list)
			return err
		}},
		{"node", "list secrets", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			_, err := c.CoreV1().Secrets("").List(ctx, list)
			return err
		}},
		{"node", "delete a node", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			return c.CoreV1().Nodes().Delete(ctx, "n", metav1.DeleteOptions{})
		}},
		{"node", "create a service", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			_, err := c.CoreV1().Services("default").Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "s"}}, metav1.CreateOptions{})
			return err
		}},
		{"node", "create a pod", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			_, err := c.CoreV1().Pods("default").Create(ctx, podNamed("p"), metav1.CreateOptions{})
			return err
		}},
		{"node", "exec", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			return c.CoreV1().RESTClient().Post().AbsPath("/api/v1/namespaces/default/pods/p/exec").Do(ctx).Error()
		}},
		{"node", "write a lease elsewhere", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			return c.CoordinationV1().Leases("kube-system").Delete(ctx, "x", metav1.DeleteOptions{})
		}},
		{"node", "read metrics", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			return c.CoreV1().RESTClient().Get().AbsPath("/metrics").Do(ctx).Error()
		}},
		{"controllers", "delete a namespace's secrets", true, func(ctx context.Context, c *kubernetes.Clientset) error {
			return c.CoreV1().Secrets("default").DeleteCollection(ctx, metav1.DeleteOptions{}, list)
		}},
		// The garbage collector reads the metadata of every kind, for which RBAC has
		// no verb of its own; upstream's has the same rights.
		{"controllers", "read a secret", true, func(ctx context.Context, c *kubernetes.Clientset) error {
			_, err := c.CoreV1().Secrets("default").Get(ctx, "x", metav1.GetOptions{})
			return err
		}},
		{"controllers", "create a secret", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			_, err := c.CoreV1().Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{})
			return err
		}},
		{"controllers", "create a privileged pod", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			pod := podNamed("p")
			pod.Spec.HostNetwork = true
			_, err := c.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
			return err
		}},
		{"controllers", "create a config map", false, func(ctx context.Context, c *kubernetes.Clientset) error {
			object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "x"}}
			_, err := c.CoreV1().ConfigMaps("default").Create(ctx, object, metav1.CreateOptions{})
			return err
		}},
		{"controllers", "watch pods", true, func(ctx context.Context, c *kubernetes.Clientset) error {
			w, err := c.CoreV1().Pods("").Watch(ctx, list)
			if err == nil {
				w.Stop()
			}
			return err
		}},
	} {
		err := r.do(t.Context(), clients[r.who])
		if got := !apierrors.IsForbidden(err); got != r.allowed {
			t.Errorf("%s, %s: allowed %v, want %v (%v)", r.who, r.what, got, r.allowed, err)
		}
	}
}

func testModes(t *testing.T, dir string) {
	secret := map[string]bool{"admin.kubeconfig": true, "controllers.kubeconfig": true, "node-token": true, "pki": true, "etcd": true}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		top, _, _ := strings.Cut(rel, "/")
		info, err := d.Info()
		if err != nil || !secret[top] || info.Mode()&os.ModeSocket != 0 {
			return err
		}
		delete(secret, rel)
		if mode := info.Mode().Perm(); mode&0o077 != 0 {
			t.Errorf("%s has mode %v: others may read it", rel, mode)
		}
		return nil
	})
	if err != nil || len(secret) != 0 {
		t.Errorf("missing: %v, %v", secret, err)
	}
}

// A second listener, as fairlead up has it, serves the same.
func TestSeveralAddresses(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t, func(o *apiserver.Options) {
		o.BindAddresses = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")}
	})
	for _, a := range []string{"127.0.0.1", "127.0.0.2"} {
		cfg := rest.CopyConfig(s.LoopbackConfig())
		cfg.Host = "https://" + netip.AddrPortFrom(netip.MustParseAddr(a), s.Port()).String()
		cfg.ServerName = ""
		if _, err := kubernetes.NewForConfigOrDie(cfg).Discovery().ServerVersion(); err != nil {
			t.Errorf("%s: %v", a, err)
		}
	}
}
