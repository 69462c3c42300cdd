package apiserver_test

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
)

func TestJoinTokens(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	t.Run("end", func(t *testing.T) { testTokenEnds(t, s, admin) })
	t.Run("joined", func(t *testing.T) { testJoinedNeedsNoToken(t, s) })
	t.Run("first second", func(t *testing.T) { testJoinBeforeRoles(t, s, admin) })
}

// A token is recognised until its end, or until it is revoked.
func testTokenEnds(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	secrets := admin.CoreV1().Secrets(join.SecretNamespace)
	own, err := join.Parse(s.Token())
	if err != nil {
		t.Fatal(err)
	}
	secret, err := secrets.Get(t.Context(), join.SecretName(own.ID), metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := join.List(secret)
	if life := time.Until(l.End); err != nil || life < 23*time.Hour || life > 24*time.Hour {
		t.Errorf("the token of the start is %+v, %v: want an end after a day", l, err)
	}
	forged := own
	forged.Secret = strings.Repeat("a", len(own.Secret))
	for _, x := range []struct {
		what  string
		token string
		valid bool
	}{
		{"the token of the start", own.String(), true},
		{"one with another secret", forged.String(), false},
		{"a new one", issueToken(t, s, admin, time.Now().Add(time.Minute)), true},
		{"one without an end", issueToken(t, s, admin, time.Time{}), true},
		{"one that has ended", issueToken(t, s, admin, time.Now().Add(-time.Second)), false},
		{"a revoked one", revoke(t, admin, issueToken(t, s, admin, time.Time{})), false},
	} {
		if got := recognised(t, s, x.token); got != x.valid {
			t.Errorf("%s is recognised: %v, want %v", x.what, got, x.valid)
		}
	}
}

// The Secret of a token that has ended goes.
func TestEndedTokensAreDeleted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, stop := apiservertest.StartStoppable(t, func(o *apiserver.Options) { o.DataDir = dir })
	defer stop()
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	name := func(end time.Time) string {
		token, err := join.Parse(issueToken(t, s, admin, end))
		if err != nil {
			t.Fatal(err)
		}
		return join.SecretName(token.ID)
	}
	ended, valid, endless := name(time.Now().Add(-time.Second)), name(time.Now().Add(time.Hour)), name(time.Time{})
	stop()
	s = apiservertest.StartServer(t, func(o *apiserver.Options) { o.DataDir = dir })
	secrets := kubernetes.NewForConfigOrDie(s.LoopbackConfig()).CoreV1().Secrets(join.SecretNamespace)
	eventually(t, "the Secret is deleted", func() bool {
		_, err := secrets.Get(t.Context(), ended, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	for _, name := range []string{valid, endless} {
		if _, err := secrets.Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			t.Error(err)
		}
	}
}

func issueToken(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset, end time.Time) string {
	t.Helper()
	own, err := join.Parse(s.Token())
	if err != nil {
		t.Fatal(err)
	}
	id := strings.ToLower(rand.Text())
	fresh := join.Token{Hash: own.Hash, ID: id[:6], Secret: id[:16]}
	if _, err := admin.CoreV1().Secrets(join.SecretNamespace).Create(t.Context(), fresh.Object(end, join.DefaultNodes, ""),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return fresh.String()
}

func revoke(t *testing.T, admin *kubernetes.Clientset, token string) string {
	t.Helper()
	parsed, err := join.Parse(token)
	if err != nil {
		t.Fatal(err)
	}
	if err := admin.CoreV1().Secrets(join.SecretNamespace).Delete(t.Context(),
		join.SecretName(parsed.ID), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	return token
}

func recognised(t *testing.T, s *apiserver.Server, token string) bool {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots(t, s)}}}
	defer client.CloseIdleConnections()
	req, err := http.NewRequest(http.MethodGet, s.URL()+"/version", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// A machine that has joined starts again without a token, and without a server.
func testJoinedNeedsNoToken(t *testing.T, s *apiserver.Server) {
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	if _, err := join.Open(s.URL(), "again", dir, log); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a machine that has never joined: %v", err)
	}
	joined(t, s, "again", dir)
	n, err := join.Open(s.URL(), "again", dir, log)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kubernetes.NewForConfigOrDie(n.Config()).CoreV1().Nodes().Create(t.Context(),
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "again"}}, metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
	if !n.Of(s.Token()) || n.Of(apiservertest.StartServer(t).Token()) {
		t.Error("the clusters of tokens are mixed up")
	}
	if _, err := join.Open(s.URL(), "other", dir, log); err == nil {
		t.Error("the certificate of another name was taken")
	}
}

// In the first second of a server the roles of those who join are not there yet.
func testJoinBeforeRoles(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	bindings := admin.RbacV1().ClusterRoleBindings()
	const name = "system:node-bootstrapper"
	b, err := bindings.Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := bindings.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	boot, err := join.Config(t.Context(), s.URL(), s.Token())
	if err != nil {
		t.Fatal(err)
	}
	early := kubernetes.NewForConfigOrDie(boot).CertificatesV1().CertificateSigningRequests()
	eventually(t, "the rights are gone", func() bool {
		_, err := early.List(t.Context(), metav1.ListOptions{})
		return err != nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	tried := &tries{first: make(chan struct{})}
	got := make(chan error, 1)
	go func() {
		_, err := join.NewNode(ctx, boot, "early", t.TempDir(), slog.New(tried))
		got <- err
	}()
	select {
	case <-tried.first: // it was rejected, and tries again
	case err := <-got:
		t.Fatalf("the join ended with %v", err)
	}
	b.ResourceVersion, b.UID = "", ""
	if _, err := bindings.Create(t.Context(), b, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// tries is a log that reports its first line.
type tries struct {
	slog.Handler
	once  sync.Once
	first chan struct{}
}

func (*tries) Enabled(context.Context, slog.Level) bool { return true }

func (x *tries) Handle(context.Context, slog.Record) error {
	x.once.Do(func() { close(x.first) })
	return nil
}

// An audit log without a policy has who did what, and not with what.
func TestAuditWithoutPolicy(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "audit.log")
	s := apiservertest.StartServer(t, func(o *apiserver.Options) {
		o.Auth.Audit = genericoptions.NewAuditOptions()
		o.Auth.Audit.LogOptions.Path = file
	})
	c := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	if _, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "audited"}, Data: map[string]string{"a": "content"},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the line of the audit log", func() bool {
		text, err := os.ReadFile(file)
		return err == nil && strings.Contains(string(text), `"name":"audited"`) && strings.Contains(string(text), `"level":"Metadata"`)
	})
	if text, _ := os.ReadFile(file); strings.Contains(string(text), `"content"`) {
		t.Error("the log has what was written")
	}
}

// The server's health, and nothing else, is answered without credentials if that is
// asked for. A wrong credential is no credential.
func TestOpenHealth(t *testing.T) {
	for _, open := range []bool{false, true} {
		s := apiservertest.StartServer(t, func(o *apiserver.Options) { o.Auth.OpenHealth = open })
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots(t, s)}}}
		for path, health := range map[string]bool{
			"/livez": true, "/readyz": true, "/healthz": true, "/version": false, "/readyz/ping": false, "/api": false, "/metrics": false,
		} {
			want := http.StatusUnauthorized
			if open && health {
				want = http.StatusOK
			}
			resp, err := client.Get(s.URL() + path)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != want {
				t.Errorf("open health %v, %s: %s, want %d", open, path, resp.Status, want)
			}
		}
		client.CloseIdleConnections()
	}
}
