package apiserver_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// joined is the identity that a machine gets with the join token.
func joined(t *testing.T, s *apiserver.Server, name, dir string) *join.Node {
	t.Helper()
	boot, err := join.Config(t.Context(), s.URL(), s.Token())
	if err != nil {
		t.Fatal(err)
	}
	n, err := join.NewNode(t.Context(), boot, name, dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestNodes(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	t.Run("certificate", func(t *testing.T) { testNodeCertificate(t, s, admin) })
	t.Run("requests", func(t *testing.T) { testCertificateRequests(t, s, admin) })
	t.Run("own", func(t *testing.T) { testNodeOwns(t, s, admin) })
	t.Run("gone", func(t *testing.T) { testNodeGone(t, s, admin) })
	t.Run("one name", func(t *testing.T) { testOneName(t, s, admin) })
}

func testNodeCertificate(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	dir := t.TempDir()
	first := joined(t, s, "joins", dir)
	cert := func() string {
		b, err := os.ReadFile(filepath.Join(dir, "node.crt"))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	was := cert()
	for _, f := range []string{"node.crt", "node.key"} {
		if st, err := os.Stat(filepath.Join(dir, f)); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", f, st.Mode(), err)
		}
	}
	me, err := kubernetes.NewForConfigOrDie(first.Config()).AuthenticationV1().SelfSubjectReviews().Create(t.Context(),
		&authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil || me.Status.UserInfo.Username != "system:node:joins" {
		t.Errorf("the node is %q, %v", me.Status.UserInfo.Username, err)
	}
	if joined(t, s, "joins", dir); cert() != was {
		t.Error("a certificate that serves was replaced")
	}
	if joined(t, s, "other", dir); cert() == was {
		t.Error("the certificate of another node was taken")
	}
	// The name of a node that lives is not given to another machine.
	seconds, now, holder := int32(600), metav1.NowMicro(), "lives"
	if _, err := admin.CoordinationV1().Leases("kube-node-lease").Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "lives"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &now},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	boot, err := join.Config(t.Context(), s.URL(), s.Token())
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	go func() {
		_, err := join.NewNode(ctx, boot, "lives", t.TempDir(), slog.New(slog.DiscardHandler))
		got <- err
	}()
	eventually(t, "the request is there", func() bool { return requestFor(t, admin, "lives") != nil })
	if r := requestFor(t, admin, "lives"); len(r.Status.Conditions) > 0 {
		t.Errorf("the name of a living node was given away: %v", r.Status.Conditions)
	}
	// When the node has ended, its name is free.
	if err := admin.CoordinationV1().Leases("kube-node-lease").Delete(t.Context(), "lives", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// requestFor is the newest request for the certificate of a node.
func requestFor(t *testing.T, c *kubernetes.Clientset, node string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	all, err := c.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range all.Items {
		b, _ := pem.Decode(all.Items[i].Spec.Request)
		r, err := x509.ParseCertificateRequest(b.Bytes)
		if err == nil && r.Subject.CommonName == "system:node:"+node {
			return &all.Items[i]
		}
	}
	return nil
}

func csr(t *testing.T, cn string, groups ...string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader,
		&x509.CertificateRequest{Subject: pkix.Name{CommonName: cn, Organization: groups}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

// People ask for client certificates with kubectl certificate approve.
func testCertificateRequests(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	api := admin.CertificatesV1().CertificateSigningRequests()
	ask := func(name string, request []byte,
		change func(*certificatesv1.CertificateSigningRequest)) (*certificatesv1.CertificateSigningRequest, error) {
		r := &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				Request: request, SignerName: certificatesv1.KubeAPIServerClientSignerName,
				Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth}, Username: "another-user",
			},
		}
		if change != nil {
			change(r)
		}
		return api.Create(t.Context(), r, metav1.CreateOptions{})
	}
	_, err := ask("bad", []byte("no request"), func(r *certificatesv1.CertificateSigningRequest) {
		r.Spec.SignerName, r.Spec.Usages = "nodomain", []certificatesv1.KeyUsage{"magic"}
		short := int32(1)
		r.Spec.ExpirationSeconds = &short
	})
	invalidAt(t, err, "spec.request", "spec.usages[0]", "spec.signerName", "spec.expirationSeconds")
	approve := func(r *certificatesv1.CertificateSigningRequest, c *kubernetes.Clientset) error {
		r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved,
			Status: corev1.ConditionTrue, Reason: "Test"}}
		_, err := c.CertificatesV1().CertificateSigningRequests().UpdateApproval(t.Context(), r.Name, r, metav1.UpdateOptions{})
		return err
	}
	result := func(name string) (r *certificatesv1.CertificateSigningRequest) {
		eventually(t, name+" is answered", func() bool {
			var err error
			r, err = api.Get(t.Context(), name, metav1.GetOptions{})
			return err == nil && (len(r.Status.Certificate) > 0 || len(r.Status.Conditions) > 1)
		})
		return r
	}
	jane, err := ask("jane", csr(t, "jane", "dev"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if jane.Spec.Username == "another-user" {
		t.Error("the requester may choose the user name of the request")
	}
	node := kubernetes.NewForConfigOrDie(joined(t, s, "approver", t.TempDir()).Config())
	if err := approve(jane.DeepCopy(), node); !apierrors.IsForbidden(err) {
		t.Errorf("a node approves: %v", err)
	}
	if err := approve(jane, admin); err != nil {
		t.Fatal(err)
	}
	b, _ := pem.Decode(result("jane").Status.Certificate)
	leaf, err := x509.ParseCertificate(b.Bytes)
	if err != nil || leaf.Subject.CommonName != "jane" || strings.Join(leaf.Subject.Organization, ",") != "dev" {
		t.Errorf("%v, %v", leaf.Subject, err)
	}
	for name, request := range map[string][]byte{
		"master": csr(t, "mallory", "system:masters"), "nodes": csr(t, "mallory", "system:nodes"), "server": csr(t, "fairlead-apiserver"),
		"controllers": csr(t, "system:fairlead-controllers"), "node": csr(t, "system:node:mallory"), "admin": csr(t, "fairlead-admin"),
	} {
		r, err := ask(name, request, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := approve(r, admin); err != nil {
			t.Fatal(err)
		}
		if r := result(name); len(r.Status.Certificate) > 0 || r.Status.Conditions[1].Type != certificatesv1.CertificateFailed {
			t.Errorf("%s: %+v", name, r.Status)
		}
	}
}

// The certificate of a node whose Node is gone serves to register again, and for
// nothing else, whatever roles all nodes have.
func testNodeGone(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	ctx, get := t.Context(), metav1.GetOptions{}
	c := kubernetes.NewForConfigOrDie(joined(t, s, "gone", t.TempDir()).Config())
	if _, err := admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "all-nodes"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:coredns"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:nodes"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	requests := map[string]func() error{
		"read Services": func() error { _, err := c.CoreV1().Services("").List(ctx, metav1.ListOptions{}); return err },
		"read Pods":     func() error { _, err := c.CoreV1().Pods("").List(ctx, metav1.ListOptions{}); return err },
		"make its Lease": func() error {
			_, err := c.CoordinationV1().Leases("kube-node-lease").Create(ctx, &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Name: "gone"}}, metav1.CreateOptions{})
			return err
		},
		"be an endpoint of DNS": func() error {
			_, err := c.DiscoveryV1().EndpointSlices("kube-system").Create(ctx, ownedSlice(ctx, c, "gone"), metav1.CreateOptions{})
			return err
		},
		"renew its certificate": func() error {
			_, err := c.CertificatesV1().CertificateSigningRequests().Create(ctx, &certificatesv1.CertificateSigningRequest{
				ObjectMeta: metav1.ObjectMeta{GenerateName: "again-"},
				Spec: certificatesv1.CertificateSigningRequestSpec{
					Request: csr(t, "system:node:gone", "system:nodes"), SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
					Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
				},
			}, metav1.CreateOptions{})
			return err
		},
	}
	unregistered := apierrors.IsNotFound
	denied := func() {
		t.Helper()
		for what, do := range requests {
			if err := do(); !apierrors.IsForbidden(err) {
				t.Errorf("a node without Node may %s: %v", what, err)
			}
		}
		if _, err := c.CoreV1().Nodes().Get(ctx, "gone", get); !unregistered(err) {
			t.Errorf("get its Node: %v", err)
		}
	}
	denied()
	if _, err := c.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "gone"},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	other := dnsSlice("other") // as many places as there are others
	other.Endpoints[0].NodeName = nil
	if _, err := admin.DiscoveryV1().EndpointSlices("kube-system").Create(ctx, other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for what, do := range requests {
		if err := do(); err != nil {
			t.Errorf("a registered node may not %s: %v", what, err)
		}
	}
	if err := admin.CoreV1().Nodes().Delete(ctx, "gone", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the deletion counts", func() bool { return apierrors.IsForbidden(requests["read Services"]()) })
	unregistered = apierrors.IsForbidden // a removed machine reads nothing
	denied()
}

// Of two machines that ask for one name at a time, one gets it.
func testOneName(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	joined(t, s, "twin", t.TempDir())
	boot, err := join.Config(t.Context(), s.URL(), s.Token())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if _, err := join.NewNode(ctx, boot, "twin", t.TempDir(), slog.New(slog.DiscardHandler)); err == nil {
		t.Error("two machines have a certificate for one name")
	}
	all, err := admin.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	asked, issued := 0, 0
	for i := range all.Items {
		b, _ := pem.Decode(all.Items[i].Spec.Request)
		if r, err := x509.ParseCertificateRequest(b.Bytes); err == nil && r.Subject.CommonName == "system:node:twin" {
			if asked++; len(all.Items[i].Status.Certificate) > 0 {
				issued++
			}
		}
	}
	if asked != 2 || issued != 1 {
		t.Errorf("%d requests, %d certificates", asked, issued)
	}
}
