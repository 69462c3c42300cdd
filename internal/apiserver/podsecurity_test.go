package apiserver_test

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/svc"
)

// take returns the warnings since the last call.
func (w *warnings) take() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := strings.Join(w.text, "\n")
	w.text = nil
	return all
}

// warnedClient is clientAs with its warnings.
func warnedClient(s *apiserver.Server, user string, groups ...string) (*kubernetes.Clientset, *warnings) {
	cfg, w := rest.CopyConfig(s.LoopbackConfig()), &warnings{}
	if user != "" {
		cfg.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	}
	cfg.WarningHandler, cfg.QPS = w, -1
	return kubernetes.NewForConfigOrDie(cfg), w
}

// namespaceWith makes a namespace with labels pod-security.kubernetes.io/KEY.
func namespaceWith(t *testing.T, c kubernetes.Interface, name string, labels ...string) {
	t.Helper()
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	for i := 0; i < len(labels); i += 2 {
		n.Labels["pod-security.kubernetes.io/"+labels[i]] = labels[i+1]
	}
	if _, err := c.CoreV1().Namespaces().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// upstreamPods are the files of Pods that come with k8s.io/pod-security-admission, by
// LEVEL/VERSION/pass|fail.
func upstreamPods(t *testing.T) map[string][]string {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/pod-security-admission").Output()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(strings.TrimSpace(string(out)), "test", "testdata")
	files := map[string][]string{}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && filepath.Ext(path) == ".yaml" {
			dir, _ := filepath.Rel(root, filepath.Dir(path))
			files[dir] = append(files[dir], path)
		}
		return err
	})
	if err != nil || len(files) < 100 {
		t.Fatalf("%d directories of test Pods below %s (%v): want two levels of more than 30 versions", len(files), root, err)
	}
	return files
}

// Every Pod by which Kubernetes tests the levels, at every version, is admitted or
// forbidden as there: for a user by labels, and by the server's default.
func TestPodSecurityOfUpstreamPods(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	bindEdit(t, admin, "ann")
	sent := 0
	for dir, files := range upstreamPods(t) {
		level, rest, _ := strings.Cut(dir, "/")
		version, want, _ := strings.Cut(rest, "/")
		ns := strings.ReplaceAll(level+"-"+version+"-"+want, ".", "-")
		labels := []string{"enforce", level, "enforce-version", version}
		if level == "baseline" && version == "v1.36" {
			labels = nil // what the server does by default
		}
		namespaceWith(t, admin, ns, labels...)
		if _, err := admin.CoreV1().ServiceAccounts(ns).Create(t.Context(),
			&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}); err != nil &&
			!apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		t.Run(dir, func(t *testing.T) {
			ann, _ := warnedClient(s, "ann")
			for _, file := range files {
				sent++
				text, err := os.ReadFile(file)
				var p corev1.Pod
				if err == nil {
					err = yaml.UnmarshalStrict(text, &p)
				}
				if err != nil {
					t.Fatal(err)
				}
				p.Name = "test" // as upstream: the names of some have underscores
				_, err = ann.CoreV1().Pods(ns).Create(t.Context(), &p, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
				switch {
				case want == "pass" && err != nil:
					t.Errorf("%s: %v, want it admitted", filepath.Base(file), err)
				case want == "fail" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "violates PodSecurity \""+level+":")):
					t.Errorf("%s: %v, want it forbidden by level %s", filepath.Base(file), err, level)
				}
			}
		})
	}
	if sent < 4000 {
		t.Errorf("only %d Pods sent", sent)
	}
}

// privileged is a change of a Pod that only the level privileged allows.
func privileged(p *corev1.Pod) {
	p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: new(true)}
}

// A user's Pods are held to the labels of the namespace or the server's default; those
// of users with the right to use pods/privileged to labels alone. The level stands in
// the Pod, and it cannot be forged.
func TestPodSecurity(t *testing.T) {
	log := filepath.Join(t.TempDir(), "audit.log")
	s := apiservertest.StartServer(t, func(o *apiserver.Options) {
		o.Auth.Audit = genericoptions.NewAuditOptions()
		o.Auth.Audit.LogOptions.Path = log
	})
	admin, adminWarns := warnedClient(s, "")
	bindEdit(t, admin, "ann")
	ann, annWarns := warnedClient(s, "ann")
	for ns, labels := range map[string][]string{
		"plain": nil, "open": {"enforce", "privileged"}, "closed": {"enforce", "restricted"},
		"watched": {"enforce", "privileged", "warn", "baseline", "audit", "restricted", "audit-version", "v1.30"},
	} {
		namespaceWith(t, admin, ns, labels...)
		eventually(t, "the account of "+ns, func() bool {
			_, err := admin.CoreV1().ServiceAccounts(ns).Get(t.Context(), "default", metav1.GetOptions{})
			return err == nil
		})
	}
	pods := 0
	try := func(c kubernetes.Interface, ns string, change ...func(*corev1.Pod)) (*corev1.Pod, error) {
		pods++
		return c.CoreV1().Pods(ns).Create(t.Context(), podNamed(fmt.Sprintf("p%d", pods), change...), metav1.CreateOptions{})
	}
	forged := func(p *corev1.Pod) {
		p.Annotations = map[string]string{svc.PodSecurityAnnotation: "privileged", "own": "x"}
	}
	for _, c := range []struct {
		what   string
		client kubernetes.Interface
		ns     string
		change func(*corev1.Pod)
		level  string // "" for a refusal
	}{
		{"a user, by default", ann, "plain", func(*corev1.Pod) {}, "baseline"},
		{"a user who forges the level", ann, "plain", forged, "baseline"},
		{"a user, privileged", ann, "plain", privileged, ""},
		{"a user, host network", ann, "plain", func(p *corev1.Pod) { p.Spec.HostNetwork = true }, ""},
		{"a user, the machine's files", ann, "plain", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}}
		}, ""},
		{"a user where a label allows it", ann, "open", privileged, "privileged"},
		{"a user in a restricted namespace", ann, "closed", func(*corev1.Pod) {}, ""},
		{"a user in kube-system", ann, "kube-system", privileged, ""},
		{"an administrator, by default", admin, "plain", privileged, "privileged"},
		{"an administrator in a restricted namespace", admin, "closed", privileged, ""},
	} {
		p, err := try(c.client, c.ns, c.change)
		switch {
		case c.level == "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "violates PodSecurity")):
			t.Errorf("%s: %v, want 403 by PodSecurity", c.what, err)
		case c.level != "" && err != nil:
			t.Errorf("%s: %v, want it admitted", c.what, err)
		case c.level != "" && p.Annotations[svc.PodSecurityAnnotation] != c.level:
			t.Errorf("%s: level %q, want %q", c.what, p.Annotations[svc.PodSecurityAnnotation], c.level)
		}
	}
	testLevelStays(t, ann, admin)
	testLabels(t, admin, adminWarns)

	annWarns.take()
	if _, err := try(ann, "watched", privileged); err != nil {
		t.Error(err)
	}
	if w := annWarns.take(); !strings.Contains(w, `would violate PodSecurity "baseline:latest": privileged`) {
		t.Errorf("warnings %q, want one of level baseline", w)
	}
	want := `"pod-security.kubernetes.io/audit-violations":"would violate PodSecurity \"restricted:v1.30\"`
	eventually(t, "the audit log has the violation", func() bool {
		b, err := os.ReadFile(log)
		return err == nil && strings.Contains(string(b), want) &&
			strings.Contains(string(b), `"pod-security.kubernetes.io/enforce-policy":"baseline:latest"`)
	})
	metrics, err := admin.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{"enforce", "warn"} {
		want := `pod_security_evaluations_total{decision="deny",mode="` + mode + `",policy_level="baseline"`
		if !strings.Contains(string(metrics), want) {
			t.Errorf("/metrics has no %s", want)
		}
	}

	// The right, in one namespace.
	if _, err := admin.RbacV1().Roles("plain").Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "privileged-pods"},
		Rules: rules("use", "pods/privileged")}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.RbacV1().RoleBindings("plain").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "ann-privileged-pods"}, RoleRef: roleRef("Role", "privileged-pods"),
		Subjects: subjects(rbacv1.Subject{Kind: "User", APIGroup: rbacv1.GroupName, Name: "ann"})}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the right counts", func() bool { _, err := try(ann, "plain", privileged); return err == nil })
}

// testLevelStays tries all ways of a user to change the level of a Pod that exists.
func testLevelStays(t *testing.T, ann, admin kubernetes.Interface) {
	pods := ann.CoreV1().Pods("plain")
	if _, err := pods.Create(t.Context(), podNamed("kept"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	raise := fmt.Sprintf(`{"metadata":{"annotations":{%q:"privileged"}}}`, svc.PodSecurityAnnotation)
	drop := fmt.Sprintf(`{"metadata":{"annotations":{%q:null}}}`, svc.PodSecurityAnnotation)
	for _, patch := range []string{raise, drop} {
		for _, sub := range [][]string{nil, {"status"}} {
			p, err := admin.CoreV1().Pods("plain").Patch(t.Context(), "kept", types.MergePatchType, []byte(patch), metav1.PatchOptions{}, sub...)
			if err != nil || p.Annotations[svc.PodSecurityAnnotation] != "baseline" {
				t.Errorf("patch %s of %v: level %q (%v), want it unchanged", patch, sub, p.Annotations[svc.PodSecurityAnnotation], err)
			}
		}
	}
	err := admin.CoreV1().Pods("plain").Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "kept",
		Annotations: map[string]string{svc.PodSecurityAnnotation: "privileged", "bound": "yes"}},
		Target: corev1.ObjectReference{Kind: "Node", Name: "n"}}, metav1.CreateOptions{})
	p, err2 := pods.Get(t.Context(), "kept", metav1.GetOptions{})
	if err != nil || err2 != nil || p.Annotations[svc.PodSecurityAnnotation] != "baseline" || p.Annotations["bound"] != "yes" {
		t.Errorf("after a binding: annotations %v (%v, %v), want the level unchanged", p.Annotations, err, err2)
	}
}

// testLabels: wrong labels are rejected, and a stricter label warns of Pods that are there.
func testLabels(t *testing.T, admin kubernetes.Interface, warns *warnings) {
	_, err := admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "typo",
		Labels: map[string]string{"pod-security.kubernetes.io/enforce": "basline"}}}, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "basline") {
		t.Errorf("a wrong level: %v, want 422", err)
	}
	warns.take()
	label := []byte(`{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"restricted"}}}`)
	if _, err := admin.CoreV1().Namespaces().Patch(t.Context(), "open", types.MergePatchType, label, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	want := `existing pods in namespace "open" violate the new PodSecurity enforce level "restricted:latest"`
	if w := warns.take(); !strings.Contains(w, want) {
		t.Errorf("warnings %q, want one of the Pods that violate the new level", w)
	}
}

// The default of the server is a flag, which is checked before the start.
func TestPodSecurityDefault(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t, func(o *apiserver.Options) { o.PodSecurity = "restricted:v1.30" })
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	bindEdit(t, admin, "ann")
	_, err := clientAs(s, "ann").CoreV1().Pods("default").Create(t.Context(), podNamed("p"), metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `violates PodSecurity "restricted:v1.30"`) {
		t.Errorf("%v, want 403 by restricted:v1.30", err)
	}
	for _, level := range []string{"strict", "baseline:1.30", "baseline:", ":latest"} {
		if _, err := apiserver.New(apiserver.Options{DataDir: t.TempDir(), PodSecurity: level}); err == nil ||
			!strings.Contains(err.Error(), "--pod-security-default") {
			t.Errorf("%q: %v, want an error that names the flag", level, err)
		}
	}
}
