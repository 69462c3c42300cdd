package cli

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/testbed"
)

// An administrator locks a machine out, also one whose DNS server was listed in a slice that no Node owns, and lets it
// back.
func TestNodeRemoveAndAdmit(t *testing.T) {
	s := apiservertest.StartServer(t)
	fairlead := func(want int, args ...string) string {
		t.Helper()
		var out bytes.Buffer
		code := run(context.Background(), append(append([]string{"node"}, args...), "--kubeconfig", s.Kubeconfig()),
			base.Streams{Out: &out, Err: &out})
		if code != want {
			t.Errorf("fairlead node %v: exit code %d: %s", args, code, &out)
		}
		return out.String()
	}
	boot, err := join.Config(t.Context(), s.URL(), s.Token())
	if err != nil {
		t.Fatal(err)
	}
	identity, err := join.NewNode(t.Context(), boot, "lost", t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	machine := kubernetes.NewForConfigOrDie(identity.Config())
	register := func() error {
		_, err := machine.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "lost"}}, metav1.CreateOptions{})
		return err
	}
	if err := register(); err != nil {
		t.Fatal(err)
	}
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	dns, node := admin.DiscoveryV1().EndpointSlices("kube-system"), "lost"
	if _, err := dns.Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "kube-dns-lost", Labels: map[string]string{discoveryv1.LabelServiceName: "kube-dns"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}, NodeName: &node}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	fairlead(exitUsage, "remove")
	fairlead(exitFailed, "remove", "nosuch")
	token, err := join.Parse(s.Token())
	if err != nil {
		t.Fatal(err)
	}
	if out := fairlead(exitDone, "remove", "lost"); !strings.Contains(out, "node lost removed") || !strings.Contains(out, token.ID) {
		t.Errorf("it prints %q, want the token that is still valid", out)
	}
	if _, err := dns.Get(t.Context(), "kube-dns-lost", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the endpoint of its DNS server: %v", err)
	}
	if err := register(); !apierrors.IsForbidden(err) {
		t.Errorf("it registers again: %v", err)
	}
	if out := fairlead(exitDone, "removed"); !strings.Contains(out, "lost") {
		t.Errorf("the list is\n%s", out)
	}
	fairlead(exitFailed, "admit", "nosuch")
	fairlead(exitFailed, "admit", "lost", "--identity", "other")
	fairlead(exitDone, "admit", "lost")
	testbed.Until(t, "the machine to register again", register)
}
