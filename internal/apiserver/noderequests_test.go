package apiserver_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Machines join by requests that an administrator approves, and a token for that is good for nothing else.
func TestJoinByApproval(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	a := approvals{t, s, kubernetes.NewForConfigOrDie(s.LoopbackConfig())}
	t.Run("approved after a restart", a.approvedAfterRestart)
	t.Run("denied", a.denied)
	t.Run("never answered", a.neverAnswered)
	t.Run("a name in use", a.nameInUse)
	t.Run("nothing else", a.nothingElse)
	t.Run("who approves", a.whoApproves)
	t.Run("a right that comes later", a.rightComesLater)
	t.Run("a flood", a.flood) // last: it fills all places
}

type approvals struct {
	*testing.T
	s     *apiserver.Server
	admin *kubernetes.Clientset
}

// token returns a new token that needs approval.
func (a approvals) token(t *testing.T) join.Token {
	t.Helper()
	token, err := join.Parse(a.s.Token())
	if err != nil {
		t.Fatal(err)
	}
	random := strings.ToLower(rand.Text())
	token.ID, token.Secret, token.Approval = random[:6], random[6:22], true
	secret := token.Object(time.Now().Add(time.Hour), join.DefaultNodes, "")
	if _, err := a.admin.CoreV1().Secrets(join.SecretNamespace).Create(t.Context(), secret,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return token
}

func (a approvals) config(t *testing.T, token join.Token) *rest.Config {
	t.Helper()
	cfg, err := join.Config(t.Context(), a.s.URL(), token.String())
	if err != nil {
		t.Fatal(err)
	}
	cfg.QPS = -1
	return cfg
}

// start begins to join; the error, nil when it has joined, comes by the channel.
func (a approvals) start(ctx context.Context, t *testing.T, token join.Token, name, dir string, within time.Duration) chan error {
	t.Helper()
	cfg, got := a.config(t, token), make(chan error, 1)
	go func() {
		_, err := join.NewApprovedNode(ctx, cfg, name, dir, within, slog.New(slog.DiscardHandler))
		got <- err
	}()
	return got
}

// requested returns the request for a node's certificate when there is one.
func (a approvals) requested(t *testing.T, node string) (r *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	eventually(t, "the request for "+node, func() bool { r = requestFor(t, a.admin, node); return r != nil })
	return r
}

// decide runs kubectl certificate, where there is a kubectl, or does the same.
func (a approvals) decide(t *testing.T, verb string, r *certificatesv1.CertificateSigningRequest) {
	t.Helper()
	program := os.Getenv("FAIRLEAD_KUBECTL")
	if program == "" {
		program, _ = exec.LookPath("kubectl")
	}
	if program != "" {
		out, err := exec.CommandContext(t.Context(), program, "--kubeconfig", a.s.Kubeconfig(), "certificate", verb, r.Name).CombinedOutput()
		if err != nil {
			t.Fatalf("kubectl certificate %s: %v: %s", verb, err, out)
		}
		return
	}
	if err := decide(t, a.admin, verb, r); err != nil {
		t.Fatal(err)
	}
}

func decide(t *testing.T, c kubernetes.Interface, verb string, r *certificatesv1.CertificateSigningRequest) error {
	t.Helper()
	k := certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test",
	}
	if verb == "deny" {
		k.Type, k.Message = certificatesv1.CertificateDenied, "This CSR was denied by a test"
	}
	r = r.DeepCopy()
	r.Status.Conditions = append(r.Status.Conditions, k)
	_, err := c.CertificatesV1().CertificateSigningRequests().UpdateApproval(t.Context(), r.Name, r, metav1.UpdateOptions{})
	return err
}

// A machine that starts again while it waits goes on with its key and its request.
func (a approvals) approvedAfterRestart(t *testing.T) {
	token, dir := a.token(t), t.TempDir()
	ctx, stop := context.WithCancel(t.Context())
	first := a.start(ctx, t, token, "asks", dir, time.Hour)
	r := a.requested(t, "asks")
	stop()
	if err := <-first; err == nil {
		t.Fatal("it has joined without approval")
	}
	if st, err := os.Stat(filepath.Join(dir, "request.key")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the request's key: %v, %v", st, err)
	}
	second := a.start(t.Context(), t, token, "asks", dir, time.Hour)
	a.decide(t, "approve", r)
	if err := <-second; err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "request.key")); !os.IsNotExist(err) {
		t.Errorf("the request's key stays: %v", err)
	}
	all, err := a.admin.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(all.Items) != 1 {
		t.Errorf("%d requests, %v: want one", len(all.Items), err)
	}
	n, err := join.Open(a.s.URL(), "asks", dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kubernetes.NewForConfigOrDie(n.Config()).CoreV1().Nodes().Create(t.Context(),
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "asks"}}, metav1.CreateOptions{}); err != nil {
		t.Errorf("with the certificate: %v", err)
	}
}

func (a approvals) denied(t *testing.T) {
	token, dir := a.token(t), t.TempDir()
	got := a.start(t.Context(), t, token, "denied", dir, time.Hour)
	r := a.requested(t, "denied")
	a.decide(t, "deny", r)
	if err := <-got; err == nil || !strings.Contains(err.Error(), r.Name+" is Denied: ") || !strings.Contains(err.Error(), "denied by") {
		t.Errorf("denied: %v", err)
	}
	if err := <-a.start(t.Context(), t, token, "denied", dir, time.Hour); err == nil || !strings.Contains(err.Error(), "is Denied") {
		t.Errorf("the next start asks again: %v", err)
	}
}

func (a approvals) neverAnswered(t *testing.T) {
	ctx, token := t.Context(), a.token(t)
	err := <-a.start(ctx, t, token, "waits", t.TempDir(), 5*time.Second)
	if err == nil || !strings.Contains(err.Error(), "was not approved within 5s") ||
		!strings.Contains(err.Error(), "kubectl certificate approve "+join.RequestsOf(token.ID)) {
		t.Errorf("never answered: %v", err)
	}

	// Without an API server there is nothing to approve.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg := a.config(t, token)
	cfg.Host = "https://" + l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = join.NewApprovedNode(ctx, cfg, "asks-nobody", t.TempDir(), time.Second, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "has not taken the request") || !strings.Contains(err.Error(), "connection refused") ||
		strings.Contains(err.Error(), "kubectl certificate approve") {
		t.Errorf("a server that is not there: %v", err)
	}
}

// A name is not taken from a node, nor given to two machines: neither when it is asked for nor when the request is approved.
func (a approvals) nameInUse(t *testing.T) {
	token := a.token(t)
	api := kubernetes.NewForConfigOrDie(a.config(t, token)).CertificatesV1().CertificateSigningRequests()
	first, err := api.Create(t.Context(), nodeRequest(t, token.ID, "wanted"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := api.Create(t.Context(), nodeRequest(t, token.ID, "wanted"), metav1.CreateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("a second machine asks for the name: %v", err)
	}
	seconds, now, holder := int32(600), metav1.NowMicro(), "wanted"
	if _, err := a.admin.CoordinationV1().Leases("kube-node-lease").Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "wanted"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &now},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	a.decide(t, "approve", first)
	eventually(t, "the request fails", func() bool {
		first, err = api.Get(t.Context(), first.Name, metav1.GetOptions{})
		return err == nil && len(first.Status.Conditions) == 2
	})
	if k := first.Status.Conditions[1]; k.Type != certificatesv1.CertificateFailed || len(first.Status.Certificate) > 0 {
		t.Errorf("the name of a living node was given away: %+v", first.Status)
	}
	if _, err := api.Create(t.Context(), nodeRequest(t, token.ID, "wanted"), metav1.CreateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("a machine asks for the name of a living node: %v", err)
	}
}

// nodeRequest returns a request as an agent with a token makes it.
func nodeRequest(t *testing.T, id, node string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}}, key)
	if err != nil {
		t.Fatal(err)
	}
	name, err := join.RequestName(id, node, key.Public())
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	}
}

func (a approvals) nothingElse(t *testing.T) {
	ctx, get := t.Context(), metav1.GetOptions{}
	token, other := a.token(t), a.token(t)
	c := kubernetes.NewForConfigOrDie(a.config(t, token))
	api := c.CertificatesV1().CertificateSigningRequests()
	foreign, err := kubernetes.NewForConfigOrDie(a.config(t, other)).CertificatesV1().CertificateSigningRequests().Create(ctx,
		nodeRequest(t, other.ID, "foreign"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	own, err := api.Create(ctx, nodeRequest(t, token.ID, "own"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := api.Get(ctx, own.Name, get); err != nil {
		t.Errorf("get its own request: %v", err)
	}
	create := func(change func(*certificatesv1.CertificateSigningRequest)) error {
		r := nodeRequest(t, token.ID, "more")
		change(r)
		_, err := api.Create(ctx, r, metav1.CreateOptions{})
		return err
	}
	for what, err := range map[string]error{
		"list requests":    second(api.List(ctx, metav1.ListOptions{})),
		"watch requests":   second(api.Watch(ctx, metav1.ListOptions{})),
		"get another's":    second(api.Get(ctx, foreign.Name, get)),
		"approve":          decide(t, c, "approve", own),
		"delete":           api.Delete(ctx, own.Name, metav1.DeleteOptions{}),
		"read Nodes":       second(c.CoreV1().Nodes().List(ctx, metav1.ListOptions{})),
		"read its Secret":  second(c.CoreV1().Secrets(join.SecretNamespace).Get(ctx, join.SecretName(token.ID), get)),
		"read the version": second(c.Discovery().ServerVersion()),
		"ask another signer": create(func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.SignerName = certificatesv1.KubeAPIServerClientSignerName
		}),
		"be an administrator": create(func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Request = csr(t, "mallory", "system:masters")
		}),
		"ask for another name": create(func(r *certificatesv1.CertificateSigningRequest) {
			r.Spec.Request = nodeRequest(t, token.ID, "less").Spec.Request
		}),
		"take a name of another's request": create(func(r *certificatesv1.CertificateSigningRequest) {
			r.Name = join.RequestsOf(other.ID) + "a"
		}),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("the token may %s: %v", what, err)
		}
	}
	plain := token
	plain.Approval = false
	if recognised(t, a.s, plain.String()) || recognised(t, a.s, token.ID+"."+token.Secret) {
		t.Error("the token is recognised as one that needs no approval")
	}
	if r := requestFor(t, a.admin, "own"); len(r.Status.Conditions) > 0 {
		t.Errorf("the request was decided on: %+v", r.Status)
	}
}

func second[T any](_ T, err error) error { return err }

// A right that comes after the request counts: a server that has just started may not know all roles and Nodes yet.
func (a approvals) rightComesLater(t *testing.T) {
	allow := func(name, resource string) {
		roles := a.admin.RbacV1()
		role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{{
			Verbs: []string{"create"}, APIGroups: []string{"certificates.k8s.io"}, Resources: []string{resource},
		}}}
		_, err1 := roles.ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{})
		_, err2 := roles.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "late"}},
		}, metav1.CreateOptions{})
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
	}
	allow("late-requests", "certificatesigningrequests")
	config := a.s.LoopbackConfig()
	config.Impersonate.UserName = "late"
	var r *certificatesv1.CertificateSigningRequest
	testbed.Until(t, "the right to request", func() (err error) {
		r, err = kubernetes.NewForConfigOrDie(config).CertificatesV1().CertificateSigningRequests().Create(t.Context(),
			nodeRequest(t, "late", "late"), metav1.CreateOptions{})
		return err
	})
	allow("late-approvals", "certificatesigningrequests/nodeclient")
	testbed.Until(t, "the approval", func() error {
		r, err := a.admin.CertificatesV1().CertificateSigningRequests().Get(t.Context(), r.Name, metav1.GetOptions{})
		if err == nil && len(r.Status.Certificate) == 0 {
			err = fmt.Errorf("it is %+v", r.Status)
		}
		return err
	})
}

// An editor cannot approve; who has the right for the signer can.
func (a approvals) whoApproves(t *testing.T) {
	token := a.token(t)
	r, err := kubernetes.NewForConfigOrDie(a.config(t, token)).CertificatesV1().CertificateSigningRequests().Create(t.Context(),
		nodeRequest(t, token.ID, "judged"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	roles := a.admin.RbacV1()
	if _, err := roles.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "decider"},
		Rules: []rbacv1.PolicyRule{{Verbs: []string{"update"}, APIGroups: []string{"certificates.k8s.io"},
			Resources: []string{"certificatesigningrequests/approval"}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	as := func(name string, bound ...string) kubernetes.Interface {
		for _, role := range bound {
			if _, err := roles.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
				ObjectMeta: metav1.ObjectMeta{Name: name + "-" + role[strings.LastIndex(role, ":")+1:]},
				RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
				Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
			}, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		cfg := rest.CopyConfig(a.s.LoopbackConfig())
		cfg.Impersonate.UserName = name
		return kubernetes.NewForConfigOrDie(cfg)
	}
	editor, decider := as("editor", "edit"), as("decider", "decider")
	approver := as("approver", "decider", "system:certificates.k8s.io:kube-apiserver-client-kubelet-approver")
	eventually(t, "the approver may approve", func() bool {
		err = decide(t, approver, "deny", r)
		return !apierrors.IsForbidden(err)
	})
	if err != nil {
		t.Errorf("the approver: %v", err)
	}
	for who, c := range map[string]kubernetes.Interface{"an editor": editor, "without the signer": decider} {
		if err := decide(t, c, "approve", r); !apierrors.IsForbidden(err) {
			t.Errorf("%s approves: %v", who, err)
		}
	}
}

// The pending requests of a token are bounded, and so are those of all tokens.
func (a approvals) flood(t *testing.T) {
	made := func() int {
		token := a.token(t)
		api := kubernetes.NewForConfigOrDie(a.config(t, token)).CertificatesV1().CertificateSigningRequests()
		var n atomic.Int64
		var asking sync.WaitGroup
		for i := range 45 {
			r := nodeRequest(t, token.ID, fmt.Sprintf("flood-%s-%d", token.ID, i))
			asking.Go(func() {
				_, err := api.Create(t.Context(), r, metav1.CreateOptions{})
				if err == nil {
					n.Add(1)
				} else if !apierrors.IsTooManyRequests(err) {
					t.Error(err)
				}
			})
		}
		asking.Wait()
		return int(n.Load())
	}
	total := made()
	if total != 40 {
		t.Errorf("%d requests of one token: want 40", total)
	}
	for range 3 {
		total += made()
	}
	if total > 120 || total < 110 { // a few were pending before
		t.Errorf("%d requests in all: want no more than 120", total)
	}
}
