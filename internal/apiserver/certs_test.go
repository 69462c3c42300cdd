package apiserver

import (
	"crypto/tls"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

type enqueued int

func (e *enqueued) Enqueue() { *e++ }

// A server that runs for a year renews its certificates and rewrites the files
// made from them.
func TestRunningServerRenews(t *testing.T) {
	t.Parallel()
	now := time.Now()
	s, err := newServer(Options{DataDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var notified enqueued
	s.creds.Serving.AddListener(&notified)
	before, _ := s.creds.Serving.CurrentCertKeyContent()
	admin := read(t, s.Kubeconfig())
	now = now.Add(24 * time.Hour)
	if err := s.creds.Refresh(); err != nil {
		t.Fatal(err)
	}
	if same, _ := s.creds.Serving.CurrentCertKeyContent(); string(same) != string(before) || read(t, s.Kubeconfig()) != admin {
		t.Error("renewed after a day")
	}
	now = now.Add(pki.LeafLife - pki.RenewBefore)
	notified = 0
	if err := s.creds.Refresh(); err != nil {
		t.Fatal(err)
	}
	after, key := s.creds.Serving.CurrentCertKeyContent()
	if string(after) == string(before) || notified != 1 {
		t.Errorf("the serving certificate was not renewed, or its listener not notified once (%d)", notified)
	}
	if _, err := tls.X509KeyPair(after, key); err != nil {
		t.Error(err)
	}
	if read(t, s.Kubeconfig()) == admin {
		t.Error("admin.kubeconfig holds the old certificate")
	}
	cfg, err := clientcmd.LoadFromFile(filepath.Join(filepath.Dir(s.Kubeconfig()), "controllers.kubeconfig"))
	if err != nil || cfg.Clusters["fairlead"].Server != s.URL() {
		t.Errorf("controllers.kubeconfig: %v, %v", cfg, err)
	}
	user := cfg.AuthInfos["fairlead"]
	if read(t, s.ControllersConfig().CertFile) != string(user.ClientCertificateData)+string(user.ClientKeyData) {
		t.Error("the kubeconfig and the running controllers differ")
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
