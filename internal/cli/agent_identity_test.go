package cli

import (
	"bytes"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/node"
	"github.com/fairlead/fairlead/internal/testbed"
)

// A machine that has joined needs no token to start again, even if its token is gone.
func TestAgentRestartsWithoutToken(t *testing.T) {
	s := apiservertest.StartServer(t)
	log := slog.New(slog.DiscardHandler)
	state := filepath.Join(t.TempDir(), "state")
	identity := func(token base.JoinFlags) (*rest.Config, *join.Node, error) {
		j := node.Joining{Servers: []string{s.URL()}, Token: token}
		return j.Identity(t.Context(), log, "again", state)
	}
	if _, _, err := identity(base.JoinFlags{}); err == nil ||
		!strings.Contains(err.Error(), "--token-file") {
		t.Errorf("a machine that has never joined: %v", err)
	}
	if _, _, err := identity(base.JoinFlags{File: s.TokenFile()}); err != nil {
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
	cfg, node, err := identity(base.JoinFlags{})
	if err != nil || node == nil {
		t.Fatalf("the second start: %v", err)
	}
	if _, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("with the kept certificate: %v", err)
	}
}

// An agent with a token that needs approval asks, and joins when it is approved.
func TestAgentJoinsByApproval(t *testing.T) {
	s := apiservertest.StartServer(t)
	var out bytes.Buffer
	if code := run(t.Context(), []string{"token", "create", "--needs-approval", "--kubeconfig", s.Kubeconfig()},
		base.Streams{Out: &out, Err: &out}); code != 0 {
		t.Fatal(out.String())
	}
	j := node.Joining{Servers: []string{s.URL()}, Token: base.JoinFlags{Text: out.String()}, ApprovalTimeout: time.Minute}
	state := filepath.Join(t.TempDir(), "state")
	var cfg *rest.Config
	joined := make(chan error, 1)
	go func() {
		var err error
		cfg, _, err = j.Identity(t.Context(), slog.New(slog.DiscardHandler), "waits", state)
		joined <- err
	}()
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig()).CertificatesV1().CertificateSigningRequests()
	var r *certificatesv1.CertificateSigningRequest
	testbed.Until(t, "the request", func() error {
		all, err := admin.List(t.Context(), metav1.ListOptions{})
		if err == nil && len(all.Items) != 1 {
			err = fmt.Errorf("%d requests, want one", len(all.Items))
		}
		if err == nil {
			r = &all.Items[0]
		}
		return err
	})
	r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
		{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test"}}
	if _, err := admin.UpdateApproval(t.Context(), r.Name, r, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := testbed.Receive(t, "the node to join", joined); err != nil {
		t.Fatal(err)
	}
	if _, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("with the certificate: %v", err)
	}
}
