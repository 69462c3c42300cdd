package apiserver_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/asn1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
)

const nodeIdentity = "fairlead.dev/node-identity"

// namesake is a second machine that asks for the name of a node.
func namesake(t *testing.T, s *apiserver.Server, name string) (issued func() (*kubernetes.Clientset, error)) {
	t.Helper()
	boot, err := join.Config(t.Context(), s.URL(), s.Token())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	done := make(chan error, 1)
	var n *join.Node
	go func() {
		var err error
		n, err = join.NewNode(ctx, boot, name, t.TempDir(), slog.New(slog.DiscardHandler))
		done <- err
	}()
	return func() (*kubernetes.Clientset, error) {
		if err := <-done; err != nil {
			return nil, err
		}
		return kubernetes.NewForConfigOrDie(n.Config()), nil
	}
}

// forgetRequests deletes the certificate requests for a node: the server rejects a
// second one for a while after the first.
func forgetRequests(t *testing.T, admin *kubernetes.Clientset, node string) {
	t.Helper()
	for r := requestFor(t, admin, node); r != nil; r = requestFor(t, admin, node) {
		if err := admin.CertificatesV1().CertificateSigningRequests().Delete(t.Context(), r.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// A name belongs to the machine that has registered it: the join token does not get
// it while the Node is there, dead or not, and when it has been given to another
// machine the earlier certificate no longer counts.
func TestNamesBelongToMachines(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	ctx, nodes := t.Context(), admin.CoreV1().Nodes()
	first := kubernetes.NewForConfigOrDie(joined(t, s, "one", t.TempDir()).Config())
	register(t, first, "one")
	mine := identityOf(t, first)
	if id := annotation(t, admin, "one"); mine == "" || id != mine {
		t.Fatalf("the Node is bound to %q, want the UID %q of the node's certificate", id, mine)
	}
	for _, patch := range []string{`{"metadata":{"annotations":{"fairlead.dev/node-identity":"x"}}}`,
		`{"metadata":{"annotations":{"fairlead.dev/node-identity":null}}}`} {
		if _, err := first.CoreV1().Nodes().Patch(ctx, "one", types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Error(err)
		}
		if id := annotation(t, admin, "one"); id != mine {
			t.Errorf("after %s by the node: bound to %q", patch, id)
		}
	}
	if uid := uidOf(t, renewed(t, first, "one")); uid != mine {
		t.Errorf("the renewed certificate has UID %q, want %q", uid, mine)
	}

	// The Node has no Lease, as a dead one's that ended, and no recent request.
	forgetRequests(t, admin, "one")
	issued := namesake(t, s, "one")
	eventually(t, "the request is there", func() bool { return requestFor(t, admin, "one") != nil })
	asked := requestFor(t, admin, "one").Name
	// A request for a free name that came later has been answered by then.
	joined(t, s, "later", t.TempDir())
	if r := requestFor(t, admin, "one"); r == nil || r.Name != asked || len(r.Status.Conditions) > 0 {
		t.Fatalf("the name of a registered node was given away: %+v", r)
	}
	if err := nodes.Delete(ctx, "one", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	second, err := issued()
	if err != nil {
		t.Fatal(err)
	}
	register(t, second, "one")
	wantDenied(t, first, "one")
	eventually(t, "the second machine works", func() bool { return readsServices(second) == nil })

	// An administrator may give the name to a third one.
	forgetRequests(t, admin, "one")
	issued = namesake(t, s, "one")
	eventually(t, "the request is there", func() bool { return requestFor(t, admin, "one") != nil })
	r := requestFor(t, admin, "one")
	r.Status.Conditions = append(r.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "KubectlApprove"})
	if _, err := admin.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, r.Name, r, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	third, err := issued()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the third machine works", func() bool { return readsServices(third) == nil })
	wantDenied(t, second, "one")
}

func register(t *testing.T, c *kubernetes.Clientset, name string) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := c.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func annotation(t *testing.T, admin *kubernetes.Clientset, node string) string {
	t.Helper()
	n, err := admin.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return n.Annotations[nodeIdentity]
}

func identityOf(t *testing.T, c *kubernetes.Clientset) string {
	t.Helper()
	me, err := c.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return me.Status.UserInfo.UID
}

func readsServices(c *kubernetes.Clientset) error {
	_, err := c.CoreV1().Services("").List(context.Background(), metav1.ListOptions{Limit: 1})
	return err
}

// wantDenied wants that a machine can no longer act for the Node, nor renew its
// certificate.
func wantDenied(t *testing.T, c *kubernetes.Clientset, node string) {
	t.Helper()
	eventually(t, "the certificate no longer counts", func() bool { return apierrors.IsForbidden(readsServices(c)) })
	if err := readsServices(c); err == nil || !strings.Contains(err.Error(), "delete the Node") &&
		!strings.Contains(err.Error(), "fairlead node admit") {
		t.Errorf("%v, want what to do", err)
	}
	_, err := c.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"a":"b"}}}`), metav1.PatchOptions{})
	if !apierrors.IsForbidden(err) {
		t.Errorf("write its Node: %v", err)
	}
	_, err = c.CertificatesV1().CertificateSigningRequests().Create(t.Context(), renewal(t, node), metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) {
		t.Errorf("renew its certificate: %v", err)
	}
}

func renewal(t *testing.T, node string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{GenerateName: "again-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: csr(t, "system:node:"+node, "system:nodes"), SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		}}
}

// renewed is the certificate that a node gets for itself.
func renewed(t *testing.T, c *kubernetes.Clientset, node string) []byte {
	t.Helper()
	api := c.CertificatesV1().CertificateSigningRequests()
	r, err := api.Create(t.Context(), renewal(t, node), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the certificate is renewed", func() bool {
		r, err = api.Get(t.Context(), r.Name, metav1.GetOptions{})
		return err == nil && len(r.Status.Certificate) > 0
	})
	return r.Status.Certificate
}

// uidOf returns the UID in a certificate.
func uidOf(t *testing.T, cert []byte) string {
	t.Helper()
	b, _ := pem.Decode(cert)
	c, err := x509.ParseCertificate(b.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range c.Subject.Names {
		if n.Type.Equal(asn1.X509UID()) {
			return n.Value.(string)
		}
	}
	return ""
}

// The certificate of a deleted Node does not come back, whatever its machine tries: not by another registration, a
// finalizer, a renewal or a Node that an administrator prepares, until an administrator lets it back.
func TestDeletedNodesAreLockedOut(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	ctx, nodes := t.Context(), admin.CoreV1().Nodes()
	stolen := kubernetes.NewForConfigOrDie(joined(t, s, "stolen", t.TempDir()).Config())
	register(t, stolen, "stolen")
	identity := annotation(t, admin, "stolen")
	eventually(t, "the node works", func() bool { return readsServices(stolen) == nil })

	// While its Node waits for somebody's finalizer it does not count.
	patch := func(c *kubernetes.Clientset, text string) error {
		_, err := c.CoreV1().Nodes().Patch(ctx, "stolen", types.MergePatchType, []byte(text), metav1.PatchOptions{})
		return err
	}
	if err := patch(admin, `{"metadata":{"finalizers":["example.com/wait"]}}`); err != nil {
		t.Fatal(err)
	}
	if err := nodes.Delete(ctx, "stolen", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		t.Fatal(err)
	}
	if all := removals(t, admin); len(all) > 0 {
		t.Errorf("a dry run recorded %v", all)
	}
	hour := int64(3600)
	open, err := stolen.CoreV1().Services("").Watch(ctx, metav1.ListOptions{TimeoutSeconds: &hour})
	if err != nil {
		t.Fatal(err)
	}
	defer open.Stop()
	if err := nodes.Delete(ctx, "stolen", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a watch that was open ends", func() bool {
		for {
			select {
			case _, more := <-open.ResultChan():
				if !more {
					return true
				}
			default:
				return false
			}
		}
	})
	lockedOut := func() bool { return apierrors.IsForbidden(readsServices(stolen)) }
	eventually(t, "a Node that is being deleted no longer counts", lockedOut)
	if err := patch(stolen, `{"metadata":{"labels":{"a":"b"}}}`); !apierrors.IsForbidden(err) {
		t.Errorf("it changes its Node that is being deleted: %v", err)
	}
	if err := patch(admin, `{"metadata":{"finalizers":null}}`); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the Node is gone", func() bool {
		_, err := nodes.Get(ctx, "stolen", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	node := func() *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "stolen"}} }
	_, err = stolen.CoreV1().Nodes().Create(ctx, node(), metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "fairlead node admit stolen") {
		t.Errorf("it registers again: %v", err)
	}
	if _, err := stolen.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("it reads the Nodes: %v", err)
	}
	if _, err := nodes.Create(ctx, node(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if !lockedOut() {
		t.Error("it takes the Node that an administrator prepared")
	}
	if err := nodes.Delete(ctx, "stolen", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}

	// A machine that joins anew has another identity, and works.
	forgetRequests(t, admin, "stolen")
	anew := kubernetes.NewForConfigOrDie(joined(t, s, "stolen", t.TempDir()).Config())
	register(t, anew, "stolen")
	eventually(t, "the new machine works", func() bool { return readsServices(anew) == nil })
	if err := nodes.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "metadata.name=stolen"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the Nodes of a deleted collection count as little",
		func() bool { return apierrors.IsForbidden(readsServices(anew)) })
	if all := removals(t, admin); len(all) != 2 || all[0].Node != "stolen" || all[1].Node != "stolen" || all[0].By == "" {
		t.Errorf("records: %+v", all)
	}

	// An administrator lets the first one back.
	records := admin.CoreV1().ConfigMaps(join.RemovedNamespace)
	if err := records.Delete(ctx, join.RemovedName("stolen", identity), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the machine registers again", func() bool {
		_, err := stolen.CoreV1().Nodes().Create(ctx, node(), metav1.CreateOptions{})
		return err == nil
	})
	eventually(t, "it works", func() bool { return readsServices(stolen) == nil })
}

// removals are the records of removed Nodes.
func removals(t *testing.T, admin *kubernetes.Clientset) (out []join.Removed) {
	t.Helper()
	all, err := admin.CoreV1().ConfigMaps(join.RemovedNamespace).List(t.Context(), metav1.ListOptions{LabelSelector: join.RemovedSelector()})
	if err != nil {
		t.Fatal(err)
	}
	for i := range all.Items {
		r, err := join.ReadRemoved(&all.Items[i])
		if err != nil {
			t.Error(err)
		}
		out = append(out, r)
	}
	return out
}
