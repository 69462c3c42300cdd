package apiserver_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/certs"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/apiserver/rotation"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed/etcd"
)

// certificates asks a server for the state of its certificates.
func certificates(t *testing.T, c kubernetes.Interface) certs.Status {
	t.Helper()
	text, err := c.CoreV1().RESTClient().Get().AbsPath(certs.Path).DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var s certs.Status
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// rotate asks a server for a step of a rotation.
func rotate(t *testing.T, c kubernetes.Interface, do string, force bool) error {
	t.Helper()
	r := c.CoreV1().RESTClient().Post().AbsPath(certs.Path).Param("do", do)
	if force {
		r = r.Param("force", "1")
	}
	return r.Do(t.Context()).Error()
}

func awaitStep(t *testing.T, c kubernetes.Interface, want rotation.Step) {
	t.Helper()
	eventually(t, "the step "+string(want), func() bool { return certificates(t, c).Rotation.Step == want })
}

// machine is a node that follows the authorities and reports.
type machine struct {
	*join.Node
	name, dir string
	admin     kubernetes.Interface
}

func newMachine(t *testing.T, s *apiserver.Server, admin kubernetes.Interface, name string) *machine {
	t.Helper()
	m := &machine{name: name, dir: t.TempDir(), admin: admin}
	m.Node = joined(t, s, name, m.dir)
	register(t, kubernetes.NewForConfigOrDie(m.Config()), name)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = m.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return m
}

func (m *machine) file(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(m.dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// now returns the configuration of a client with the certificate of this moment: others use theirs for a while.
func (m *machine) now(t *testing.T) *rest.Config {
	t.Helper()
	cfg := m.Config()
	if err := rest.LoadTLSFiles(cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := tls.X509KeyPair(cfg.CertData, cfg.KeyData); err != nil {
		t.Fatal(err)
	}
	return cfg
}

// report writes what the agent of the node does.
func (m *machine) report(t *testing.T) pki.Report {
	t.Helper()
	leaf, err := pki.Parse(m.file(t, "node.crt"))
	if err != nil {
		t.Fatal(err)
	}
	r := pki.ReportOf(m.file(t, "ca.crt"), leaf)
	annotations := map[string]string{svc.AuthoritiesAnnotation: r.String()}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if err != nil {
		t.Fatal(err)
	}
	nodes := kubernetes.NewForConfigOrDie(m.now(t)).CoreV1().Nodes()
	_, err = nodes.Patch(t.Context(), m.name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		t.Fatalf("node %s cannot report: %v", m.name, err)
	}
	return r
}

// fresh returns a client of a kubeconfig with its own connections.
func fresh(t *testing.T, kubeconfig []byte) *kubernetes.Clientset {
	t.Helper()
	cfg, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Dial = (&net.Dialer{}).DialContext // else client-go shares connections
	return kubernetes.NewForConfigOrDie(cfg)
}

func works(t *testing.T, what string, c kubernetes.Interface) {
	t.Helper()
	if _, err := c.CoreV1().Services("default").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

// pair are two servers on one etcd with one authority.
func pair(t *testing.T) (first, second *apiserver.Server) {
	t.Helper()
	store := etcd.URL(etcd.Start(t))
	dirs := []string{t.TempDir(), t.TempDir()}
	start := func(i int, advertise string) *apiserver.Server {
		return apiservertest.StartServer(t, func(o *apiserver.Options) {
			o.DataDir, o.Etcd.Servers, o.AdvertiseAddress = dirs[i], []string{store}, netip.MustParseAddr(advertise)
			o.Log = slog.New(slog.DiscardHandler)
		})
	}
	first = start(0, "192.0.2.1")
	copyAuthority(t, dirs[0], dirs[1])
	return first, start(1, "192.0.2.2")
}

// copyAuthority copies what servers of one cluster have in common.
func copyAuthority(t *testing.T, from, to string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(to, "pki"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"pki/ca.crt", "pki/ca.key", "pki/sa.key"} {
		if err := os.WriteFile(filepath.Join(to, name), []byte(fileText(t, filepath.Join(from, name))), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func fileText(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A whole rotation with two servers and two nodes, none of which starts again: everybody works at every step, with
// what he had before until the end, and with nothing of the old authority after it.
func TestRotation(t *testing.T) {
	t.Parallel()
	first, second := pair(t)
	kubeconfig, token := []byte(fileText(t, first.Kubeconfig())), first.Token()
	old, admin := fresh(t, kubeconfig), kubernetes.NewForConfigOrDie(first.LoopbackConfig())
	one, two := newMachine(t, first, admin, "one"), newMachine(t, second, admin, "two")
	before := certificates(t, admin).Authorities

	if err := rotate(t, admin, "begin", false); err != nil {
		t.Fatal(err)
	}
	one.report(t)
	eventually(t, "only node two is awaited", func() bool {
		one.report(t)
		s := certificates(t, admin).Rotation
		return s.Step == rotation.Trust && len(s.Waiting) == 1 && strings.HasPrefix(s.Waiting[0], "node two does not report")
	})
	works(t, "the old kubeconfig, while both are trusted", old)
	everybody := func() (issuers []string) { return []string{one.report(t).Issuer, two.report(t).Issuer} }
	eventually(t, "the new authority signs", func() bool { everybody(); return certificates(t, admin).Rotation.Step == rotation.Sign })
	next := certificates(t, admin).Rotation.New
	eventually(t, "all have certificates of the new authority", func() bool {
		for _, c := range []*apiserver.Server{first, second} {
			s := certificates(t, kubernetes.NewForConfigOrDie(c.LoopbackConfig()))
			for _, f := range s.Certificates {
				if f.Issuer != next {
					return false
				}
			}
		}
		return strings.Join(everybody(), " ") == next+" "+next
	})
	for _, s := range []*apiserver.Server{first, second} {
		works(t, "the new kubeconfig", fresh(t, []byte(fileText(t, s.Kubeconfig()))))
		works(t, "the controllers", kubernetes.NewForConfigOrDie(s.ControllersConfig()))
		works(t, "the server itself", kubernetes.NewForConfigOrDie(s.LoopbackConfig()))
	}
	works(t, "the old kubeconfig, which knows only the old authority", fresh(t, kubeconfig))
	boot, err := join.Config(t.Context(), first.URL(), token)
	if err != nil {
		t.Fatalf("a token of before: %v", err)
	}
	if _, err := join.NewNode(t.Context(), boot, "three", t.TempDir(), slog.New(slog.DiscardHandler)); err != nil {
		t.Errorf("a token of before: %v", err)
	}

	err = rotate(t, admin, "finish", false)
	if !apierrors.IsConflict(err) || !strings.Contains(err.Error(), "fairlead-admin") || strings.Count(err.Error(), "does not know yet") != 2 {
		t.Errorf("finished although an administrator has just used a certificate of the old authority, and others may have: %v", err)
	}
	if err := rotate(t, admin, "finish", true); err != nil {
		t.Fatal(err)
	}
	finished(t, first, second, before[0].Issuer, next)
	eventually(t, "the nodes trust the new authority alone", func() bool {
		a, b := one.report(t), two.report(t)
		return len(a.Trusts) == 1 && a.Trusts[0] == next && len(b.Trusts) == 1 && b.Trusts[0] == next
	})
	if _, err := fresh(t, kubeconfig).CoreV1().Services("default").List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("the old kubeconfig after the end: %v", err)
	}
	if _, err := join.Config(t.Context(), first.URL(), token); err == nil || !strings.Contains(err.Error(), "fairlead token create") {
		t.Errorf("a token of before, after the end: %v", err)
	}
	joined(t, first, "four", t.TempDir())
	// A crash between the two writes of a renewal leaves another key in node.key, which earlier versions read.
	if err := os.WriteFile(filepath.Join(one.dir, "node.key"), two.file(t, "node.key"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := join.Open(first.URL(), "one", one.dir, slog.New(slog.DiscardHandler)); err != nil {
		t.Errorf("a node that was killed while it renewed its certificate: %v", err)
	}
}

// finished checks that two servers have only the authority next.
func finished(t *testing.T, first, second *apiserver.Server, old, next string) {
	t.Helper()
	for _, s := range []*apiserver.Server{first, second} {
		c := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
		eventually(t, "one authority is left", func() bool {
			all := certificates(t, c).Authorities
			return len(all) == 1 && all[0].Issuer == next
		})
		dir := filepath.Dir(s.Kubeconfig())
		if text := fileText(t, filepath.Join(dir, "pki/ca.key")); strings.Count(text, "BEGIN") != 1 {
			t.Errorf("the old key is still in %s", dir)
		}
		works(t, "the kubeconfig at the end", fresh(t, []byte(fileText(t, s.Kubeconfig()))))
		eventually(t, "Pods are given the new authority alone", func() bool {
			m, err := c.CoreV1().ConfigMaps("default").Get(t.Context(), "kube-root-ca.crt", metav1.GetOptions{})
			return err == nil && m.Data["ca.crt"] == fileText(t, filepath.Join(dir, "pki/ca.crt"))
		})
		secret, err := c.CoreV1().Secrets("kube-system").Get(t.Context(), rotation.SecretName, metav1.GetOptions{})
		if err != nil || string(secret.Data["old"]) != old {
			t.Errorf("the state: %v, %v", secret, err)
		}
	}
}

// A rotation is aborted while both are trusted, and after the new one has signed: what that has signed is then
// recognised until the end, and not afterwards.
func TestRotationIsAborted(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	node := newMachine(t, s, admin, "one")
	before := certificates(t, admin).Authorities[0].Issuer
	steps := []struct {
		do    string
		force bool
		want  rotation.Step
	}{
		{"begin", false, rotation.Trust}, {"abort", false, rotation.Done},
		{"begin", false, rotation.Trust}, {"begin", true, rotation.Sign}, {"abort", false, rotation.Back}, {"finish", true, rotation.Done},
	}
	var given []byte // the kubeconfig of the step in which the new authority signs
	for _, step := range steps {
		if err := rotate(t, admin, step.do, step.force); err != nil {
			t.Fatalf("%s: %v", step.do, err)
		}
		awaitStep(t, admin, step.want)
		signs := before
		if step.want == rotation.Sign {
			signs = certificates(t, admin).Rotation.New
		}
		eventually(t, "the server's and the node's certificates after "+step.do, func() bool {
			for _, f := range certificates(t, admin).Certificates {
				if f.Issuer != signs {
					return false
				}
			}
			leaf, err := pki.Parse(node.file(t, "node.crt"))
			return err == nil && pki.ReportOf(node.file(t, "ca.crt"), leaf).Issuer == signs
		})
		works(t, "the node", kubernetes.NewForConfigOrDie(node.now(t)))
		works(t, "the kubeconfig", fresh(t, []byte(fileText(t, s.Kubeconfig()))))
		if step.want == rotation.Sign {
			given = []byte(fileText(t, s.Kubeconfig()))
		} else if step.want == rotation.Back {
			works(t, "a kubeconfig of the new authority, until the end", fresh(t, given))
		}
	}
	eventually(t, "the old authority alone is left", func() bool {
		all := certificates(t, admin).Authorities
		return len(all) == 1 && all[0].Issuer == before && strings.Count(string(node.file(t, "ca.crt")), "BEGIN") == 1
	})
	if _, err := fresh(t, given).CoreV1().Services("default").List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("a kubeconfig of the authority that was given up, after the end: %v", err)
	}
	for do, want := range map[string]string{"abort": "no rotation", "finish": "no rotation", "turn": "want renew"} {
		if err := rotate(t, admin, do, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s after the end: %v", do, err)
		}
	}
}

// A server that ends at any step goes on there when it starts again; one that was off for all of it, and has
// the old authority, says what to do.
func TestRotationSurvivesRestarts(t *testing.T) {
	t.Parallel()
	store, dir, late := etcd.URL(etcd.Start(t)), t.TempDir(), t.TempDir()
	var log logBuffer
	advertised := map[string]netip.Addr{dir: netip.MustParseAddr("192.0.2.1"), late: netip.MustParseAddr("192.0.2.2")}
	start := func(dir string) (*apiserver.Server, func()) {
		return apiservertest.StartStoppable(t, func(o *apiserver.Options) {
			o.DataDir, o.Etcd.Servers, o.AdvertiseAddress = dir, []string{store}, advertised[dir]
			o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelError}))
		})
	}
	s, stop := start(dir)
	copyAuthority(t, dir, late)
	before := fileText(t, filepath.Join(dir, "pki/ca.crt"))
	// Nothing reports for this Node: the step Trust does not end by itself.
	_, err := kubernetes.NewForConfigOrDie(s.LoopbackConfig()).CoreV1().Nodes().Create(t.Context(),
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "silent"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		do   string
		want rotation.Step
	}{{"begin", rotation.Trust}, {"begin", rotation.Sign}, {"finish", rotation.Done}} {
		admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
		if err := rotate(t, admin, step.do, step.want != rotation.Trust); err != nil {
			t.Fatalf("%s: %v", step.do, err)
		}
		stop() // with the step in its files, or not yet
		s, stop = start(dir)
		admin = kubernetes.NewForConfigOrDie(s.LoopbackConfig())
		awaitStep(t, admin, step.want)
		authorities := 2
		if step.want == rotation.Done {
			authorities = 1
		}
		eventually(t, "the server has followed "+string(step.want), func() bool {
			s := certificates(t, admin)
			for _, f := range s.Certificates {
				if f.Issuer != s.Authorities[0].Issuer {
					return false
				}
			}
			return len(s.Authorities) == authorities
		})
		works(t, "the kubeconfig", fresh(t, []byte(fileText(t, s.Kubeconfig()))))
	}
	stop()
	if fileText(t, filepath.Join(dir, "pki/ca.crt")) == before {
		t.Error("the authority is the old one")
	}
	// Copies of pki/ that were made while the end came have the old authority, and no key of it.
	now := fileText(t, filepath.Join(dir, "pki/ca.crt"))
	if err := os.WriteFile(filepath.Join(dir, "pki/ca.crt"), []byte(now+before), 0o600); err != nil {
		t.Fatal(err)
	}
	s, stop = start(dir)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	eventually(t, "the old authority is not trusted any more", func() bool { return len(certificates(t, admin).Authorities) == 1 })
	_, stopLate := start(late)
	eventually(t, "the status names a server with the old authority", func() bool {
		waiting := certificates(t, admin).Rotation.Waiting
		return slices.ContainsFunc(waiting, func(w string) bool {
			return strings.HasPrefix(w, "server 192.0.2.2:") && strings.HasSuffix(w, "copy pki/ of another server there and restart it")
		})
	})
	stopLate()
	stop()
	s, stop = start(late)
	err = rotate(t, kubernetes.NewForConfigOrDie(s.LoopbackConfig()), "begin", false)
	if err == nil || !strings.Contains(err.Error(), "copy pki/ of another server") {
		t.Errorf("a server with the old authority begins a rotation: %v", err)
	}
	eventually(t, "a server with the old authority says so", func() bool {
		return strings.Contains(log.String(), "was rotated while this server was off: copy pki/ of another server here and restart")
	})
	stop()
}

// What cannot be rotated, who may not ask, and a state that no server has written.
func TestRotationIsRejected(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, stop := apiservertest.StartStoppable(t, func(o *apiserver.Options) { o.DataDir = dir })
	stop()
	if err := os.Rename(filepath.Join(dir, "pki/ca.key"), filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	s, stop := apiservertest.StartStoppable(t, func(o *apiserver.Options) { o.DataDir = dir })
	err := rotate(t, kubernetes.NewForConfigOrDie(s.LoopbackConfig()), "begin", false)
	stop()
	if err == nil || !strings.Contains(err.Error(), "was provided by an installer") {
		t.Errorf("without ca.key: %v", err)
	}
	if err := os.Rename(filepath.Join(dir, "ca.key"), filepath.Join(dir, "pki/ca.key")); err != nil {
		t.Fatal(err)
	}
	var log logBuffer
	s = apiservertest.StartServer(t, func(o *apiserver.Options) {
		o.DataDir, o.Log = dir, slog.New(slog.NewTextHandler(&log, nil))
	})
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	node := kubernetes.NewForConfigOrDie(joined(t, s, "one", t.TempDir()).Config())
	register(t, node, "one")
	allPaths := rest.CopyConfig(s.LoopbackConfig())
	allPaths.Impersonate = rest.ImpersonationConfig{UserName: "operator"}
	operator := kubernetes.NewForConfigOrDie(allPaths)
	if _, err := admin.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "all-paths"},
		Rules:      []rbacv1.PolicyRule{{NonResourceURLs: []string{"*"}, Verbs: []string{"*"}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "all-paths"}, Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, Name: "operator"}},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "all-paths"},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the operator may read the certificates", func() bool {
		_, err := operator.CoreV1().RESTClient().Get().AbsPath(certs.Path).DoRaw(t.Context())
		return err == nil
	})
	if err := rotate(t, operator, "begin", true); !apierrors.IsForbidden(err) {
		t.Errorf("who may use all paths begins a rotation: %v", err)
	}
	for what, c := range map[string]kubernetes.Interface{"a node": node, "a tenant": kubernetes.NewForConfigOrDie(tenantConfig(s))} {
		if err := rotate(t, c, "begin", true); !apierrors.IsForbidden(err) {
			t.Errorf("%s begins a rotation: %v", what, err)
		}
		if _, err := c.CoreV1().RESTClient().Get().AbsPath(certs.Path).DoRaw(t.Context()); !apierrors.IsForbidden(err) {
			t.Errorf("%s reads the certificates: %v", what, err)
		}
	}
	before := fileText(t, filepath.Join(dir, "pki/ca.crt"))
	forged := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: rotation.SecretName}, Data: map[string][]byte{
		"step": []byte("sign"), "old": []byte(certificates(t, admin).Authorities[0].Issuer), "sealed": bytes.Repeat([]byte("x"), 500),
	}}
	if _, err := admin.CoreV1().Secrets("kube-system").Create(t.Context(), forged, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the forged state is reported", func() bool {
		return strings.Contains(log.String(), "was not written by a server of this cluster")
	})
	if fileText(t, filepath.Join(dir, "pki/ca.crt")) != before {
		t.Error("a forged state has changed the authority")
	}
}

func tenantConfig(s *apiserver.Server) *rest.Config {
	cfg := s.LoopbackConfig()
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "ann", Groups: []string{"system:authenticated"}}
	return cfg
}
