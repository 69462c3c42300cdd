package apiserver_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/svc"
)

// tokenFor makes a join token for a number of nodes, and returns how a machine with it reaches the server.
func tokenFor(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset, nodes int) (*rest.Config, join.Token) {
	t.Helper()
	server, err := join.Parse(s.Token())
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := join.Config(t.Context(), s.URL(), s.Token())
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(cfg.CAData)
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	token := join.New(ca)
	if token.Hash != server.Hash {
		t.Fatal("another authority")
	}
	if _, err := admin.CoreV1().Secrets(join.SecretNamespace).Create(t.Context(), token.Object(time.Now().Add(time.Hour), nodes, ""),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	cfg.BearerToken = token.String()
	return cfg, token
}

// joinAs has a machine join by a token and register with an address.
func joinAs(t *testing.T, boot *rest.Config, name, addr string) (*kubernetes.Clientset, error) {
	t.Helper()
	n, err := join.NewNode(t.Context(), boot, name, t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	c := kubernetes.NewForConfigOrDie(n.Config())
	_, err = c.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: addr}}},
	}, metav1.CreateOptions{})
	return c, err
}

// A stolen join token makes as many nodes as it is for, at a rate, leaves few and small requests, and does not take
// kube-dns.
func TestStolenJoinToken(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	t.Run("count", func(t *testing.T) { testTokenUses(t, s, admin) })
	t.Run("requests", func(t *testing.T) { testTokenFloods(t, s, admin) })
	t.Run("dns", func(t *testing.T) { testTokenDNS(t, s, admin) })
	t.Run("rate", func(t *testing.T) { testTokenRate(t, s, admin) })
}

func testTokenUses(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	boot, token := tokenFor(t, s, admin, 2)
	for i := range 2 {
		if _, err := joinAs(t, boot, fmt.Sprintf("count-%d", i), "192.0.2.1"); err != nil {
			t.Fatal(err)
		}
	}
	_, err := joinAs(t, boot, "count-2", "192.0.2.1")
	if err == nil || !strings.Contains(err.Error(), "is for 2 nodes") || !strings.Contains(err.Error(), "fairlead token create") {
		t.Errorf("a third node by a token for two: %v", err)
	}
	// A name that an administrator has taken away does not give the token another node.
	if err := admin.CoreV1().Nodes().Delete(t.Context(), "count-1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := joinAs(t, boot, "count-1", "192.0.2.1"); err == nil {
		t.Error("the machine of a removed node joined again by its old token")
	}
	secret, err := admin.CoreV1().Secrets(join.SecretNamespace).Get(t.Context(), join.SecretName(token.ID), metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if l, err := join.List(secret); err != nil || l.Nodes != 2 || strings.Join(l.Joined, " ") != "count-0 count-1" {
		t.Errorf("the token shows %+v, %v", l, err)
	}
}

// requestWith is a request for the certificate of a node.
func requestWith(t *testing.T, node string, size int) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	r := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "node-csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: csr(t, "system:node:"+node, "system:nodes"), SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	}
	r.Spec.Request = append(r.Spec.Request, strings.Repeat("#", size)...)
	return r
}

func testTokenFloods(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	boot, _ := tokenFor(t, s, admin, 1)
	api := kubernetes.NewForConfigOrDie(boot).CertificatesV1().CertificateSigningRequests()
	_, err := api.Create(t.Context(), requestWith(t, "large", 16<<10), metav1.CreateOptions{})
	if !apierrors.IsRequestEntityTooLargeError(err) {
		t.Errorf("a request of more than 16 KiB: %v", err)
	}
	other := requestWith(t, "other", 0)
	other.Spec.SignerName = certificatesv1.KubeAPIServerClientSignerName
	if _, err := api.Create(t.Context(), other, metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a request for the certificate of a user: %v", err)
	}
	// The name of a node that has registered is not given away, so these requests stay.
	if _, err := admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "in-use"},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	kept := 0
	for range 60 {
		_, err := api.Create(t.Context(), requestWith(t, "in-use", 0), metav1.CreateOptions{})
		if err == nil {
			kept++
		} else if !apierrors.IsTooManyRequests(err) {
			t.Fatal(err)
		}
	}
	if kept != 41 {
		t.Errorf("%d requests of a token for one node were kept, want 41", kept)
	}
}

// behindDNS tries to list a node's DNS server.
func behindDNS(ctx context.Context, c *kubernetes.Clientset, node, addr string) error {
	e := ownedSlice(ctx, c, node)
	e.Endpoints[0].Addresses[0] = addr
	_, err := c.DiscoveryV1().EndpointSlices("kube-system").Create(ctx, e, metav1.CreateOptions{})
	return err
}

func testTokenDNS(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	ctx := t.Context()
	boot, _ := tokenFor(t, s, admin, 4)
	clients := make([]*kubernetes.Clientset, 4)
	for i := range clients {
		var err error
		name, addr := fmt.Sprintf("dns-%d", i), fmt.Sprintf("192.0.2.%d", 10+i)
		if clients[i], err = joinAs(t, boot, name, addr); err != nil {
			t.Fatal(err)
		}
		switch err := behindDNS(ctx, clients[i], name, addr); {
		case i < 2 && err != nil:
			t.Errorf("%s is no endpoint of kube-dns: %v", name, err)
		case i >= 2 && !apierrors.IsForbidden(err):
			t.Errorf("%s is one endpoint too many of its token: %v", name, err)
		}
	}
	// One that exists may be written again.
	if _, err := clients[0].DiscoveryV1().EndpointSlices("kube-system").Update(ctx, func() *discoveryv1.EndpointSlice {
		e := ownedSlice(ctx, clients[0], "dns-0")
		e.Endpoints[0].Addresses[0] = "192.0.2.10"
		return e
	}(), metav1.UpdateOptions{}); err != nil {
		t.Error(err)
	}
	// It may not choose itself; an administrator may choose it.
	patch := []byte(`{"metadata":{"labels":{"` + svc.DNSServerLabel + `":"true"}}}`)
	_, err := clients[2].CoreV1().Nodes().Patch(ctx, "dns-2", types.MergePatchType, patch, metav1.PatchOptions{})
	if !apierrors.IsForbidden(err) {
		t.Errorf("a node chooses itself: %v", err)
	}
	if _, err := admin.CoreV1().Nodes().Patch(ctx, "dns-2", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the chosen node is an endpoint", func() bool { return behindDNS(ctx, clients[2], "dns-2", "192.0.2.12") == nil })
	// One other endpoint does not make a place; three do.
	if err := behindDNS(ctx, clients[3], "dns-3", "192.0.2.13"); !apierrors.IsForbidden(err) {
		t.Errorf("three of four endpoints are of one token: %v", err)
	}
	for i := range 2 {
		e := dnsSlice(fmt.Sprintf("by-hand-%d", i))
		e.Endpoints[0].NodeName = nil
		if _, err := admin.DiscoveryV1().EndpointSlices("kube-system").Create(ctx, e, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := behindDNS(ctx, clients[3], "dns-3", "192.0.2.13"); err != nil {
		t.Errorf("the third of six endpoints of a token: %v", err)
	}
}

func testTokenRate(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	boot, token := tokenFor(t, s, admin, 100)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	const machines = 30
	begun := time.Now()
	for i := range machines {
		dir := t.TempDir()
		wg.Go(func() {
			_, _ = join.NewNode(ctx, boot, fmt.Sprintf("rate-%d", i), dir, slog.New(slog.DiscardHandler))
		})
	}
	joined := func() int {
		secret, err := admin.CoreV1().Secrets(join.SecretNamespace).Get(ctx, join.SecretName(token.ID), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		l, err := join.List(secret)
		if err != nil {
			t.Fatal(err)
		}
		return len(l.Joined)
	}
	eventually(t, "all machines ask", func() bool {
		all, err := admin.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for i := range all.Items {
			if all.Items[i].Spec.UID == token.ID {
				n++
			}
		}
		return n == machines
	})
	n, after := joined(), time.Since(begun)
	if most := 11 + int(after.Seconds()/2); n > most {
		t.Errorf("%d machines joined in %s, want %d at most", n, after, most)
	}
	eventually(t, "machines join", func() bool { return joined() > 0 })
}
