package cli

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// A machine that has joined needs no token to start again, even if its token is gone.
func TestAgentRestartsWithoutToken(t *testing.T) {
	s := apiservertest.StartServer(t)
	log := slog.New(slog.DiscardHandler)
	f := &agentFlags{}
	f.nodeName, f.stateDir = "again", filepath.Join(t.TempDir(), "state")
	if _, _, err := f.identity(t.Context(), log, []string{s.URL()}, joinFlags{}, ""); err == nil ||
		!strings.Contains(err.Error(), "--token-file") {
		t.Errorf("a machine that has never joined: %v", err)
	}
	if _, _, err := f.identity(t.Context(), log, []string{s.URL()}, joinFlags{file: s.TokenFile()}, ""); err != nil {
		t.Fatal(err)
	}
	token, err := join.Parse(s.Token())
	if err != nil {
		t.Fatal(err)
	}
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	if err := admin.CoreV1().Secrets(join.SecretNamespace).Delete(t.Context(), join.SecretName(token.ID), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	cfg, node, err := f.identity(t.Context(), log, []string{s.URL()}, joinFlags{}, "")
	if err != nil || node == nil {
		t.Fatalf("the second start: %v", err)
	}
	if _, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("with the kept certificate: %v", err)
	}
}
