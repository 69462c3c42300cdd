package process

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/testbed"
)

// API is the configuration of an administrator of a server that StartAPI starts.
func API(t testing.TB) *rest.Config {
	t.Helper()
	return StartAPI(t).Admin(t)
}

// StartAPI runs an API server with an etcd and without controllers until the test ends, and waits until it is ready. Its
// data is not synced to disk. Where $FAIRLEAD_KUBERNETES is set, it is the real kube-apiserver, with the controllers of a cluster except
// the ones that RunWorkloads and 'fairlead controllers' run. Tests that need the server's options or code use apiservertest.
func StartAPI(t testing.TB) *Server {
	t.Helper()
	if Kubernetes() {
		return startKubernetes(t, os.Getenv(kubernetesEnv))
	}
	dir := t.TempDir()
	program := Program("apiserver")
	if _, err := os.Stat(program); err != nil {
		if err := build("apiserver", dir); err != nil {
			t.Fatal(err)
		}
		program = filepath.Join(dir, "apiserver")
	}
	data, port := filepath.Join(dir, "data"), strconv.Itoa(FreePort(t)) // the same after a restart
	s := &Server{Kubeconfig: filepath.Join(data, "admin.kubeconfig")}
	s.command = func() *exec.Cmd {
		return exec.Command(program, "--data-dir", data, "--secure-port", port)
	}
	s.Start(t)
	s.awaitAPI(t)
	return s
}

func (s *Server) awaitAPI(t testing.TB) {
	t.Helper()
	testbed.Until(t, "the API server to be ready", func() error {
		if s.Ended() {
			t.Fatalf("the API server ended:\n%s", s.Log())
		}
		return s.Ready(t.Context())
	})
}
