package controller

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

func document(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../../docs/loadbalancer.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The commands of docs/loadbalancer.md print what stands below them.
func TestCommandsOfTheDocument(t *testing.T) {
	program := os.Getenv("FAIRLEAD_KUBECTL")
	if program == "" {
		var err error
		if program, err = exec.LookPath("kubectl"); err != nil {
			t.Skip("no kubectl in PATH and none named by FAIRLEAD_KUBECTL")
		}
	}
	block := regexp.MustCompile("(?s)<!-- run by internal/lb/controller/docs_test.go " +
		"-->\n```console\n(.*?)```").FindStringSubmatch(document(t))
	if block == nil {
		t.Fatal("docs/loadbalancer.md has no marked block")
	}
	server := apiservertest.StartServer(t)
	r := &rig{TB: t, config: server.LoopbackConfig(), own: server.ControllersConfig()}
	r.run(func(o *Options) { o.Pools = []FlagPool{flagPool(t, "default", "192.0.2.100-192.0.2.119")} })
	home := t.TempDir()
	run := func(command string) (string, error) {
		cmd := exec.CommandContext(t.Context(), program, strings.Fields(command)...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+server.Kubeconfig(), "HOME="+home)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	command, out, ran := "", "", 0
	for line := range strings.Lines(block[1]) {
		line = strings.TrimSuffix(line, "\n")
		next, isCommand := strings.CutPrefix(line, "$ kubectl ")
		if isCommand {
			var err error
			if out, err = run(next); err != nil {
				t.Fatalf("%s: %v\n%s", next, err, out)
			}
			command = next
			ran++
			continue
		}
		// Objects and Events come a moment later.
		r.eventually(command, func() (err error) {
			if !strings.Contains(out, line) {
				out, err = run(command)
			}
			if err == nil && !strings.Contains(out, line) {
				return errString(command + " printed " + out + ", want " + line)
			}
			return err
		})
	}
	if ran < 5 {
		t.Errorf("only %d commands were run", ran)
	}
}

type errString string

func (e errString) Error() string { return string(e) }

// The objects of the document, which is to be read before such a Service is made (behaviour
// 185), are accepted, and its roles and those of the manifest are all that the controller needs.
func TestObjectsOfTheDocument(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, stop := r.run(nil) // installs the kinds
	stop()
	blocks := regexp.MustCompile("(?s)<!-- applied by internal/lb/controller/docs_test.go "+
		"-->\n```yaml\n(.*?)```").FindAllStringSubmatch(document(t), -1)
	if len(blocks) != 3 {
		t.Fatalf("%d marked blocks, want 3", len(blocks))
	}
	manifest, err := os.ReadFile("../../../deploy/kubernetes/lb.yaml")
	r.must(err)
	texts := strings.Split(string(manifest), "\n---\n")
	for _, b := range blocks {
		texts = append(texts, strings.Split(b[1], "---\n")...)
	}
	applyAll(r, texts)
	config := rest.CopyConfig(r.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:kube-system:fairlead-lb",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"}}
	r.own = config
	r.run(func(o *Options) { o.LeaderElect, o.Pools = true, r.flagPools("192.0.2.0/28") })
	r.service("one")
	r.wants("one", "192.0.2.0")
	r.wantEvent("one", ensured, "192.0.2.0")
	r.delete("one")
	r.wantClaims(map[string]string{})
	secrets := kubernetes.NewForConfigOrDie(config).CoreV1().Secrets("default")
	for selector, allowed := range map[string]bool{"metadata.name=web-cert": true, "metadata.name=other": false, "": false} {
		_, err := secrets.List(t.Context(), metav1.ListOptions{FieldSelector: selector})
		if allowed && err != nil || !allowed && !apierrors.IsForbidden(err) {
			t.Errorf("Secrets with %q: %v; allowed %t", selector, err, allowed)
		}
	}
}

// applyAll creates objects, but no workloads.
func applyAll(r *rig, texts []string) {
	r.Helper()
	client := dynamic.NewForConfigOrDie(r.config)
	for _, text := range texts {
		o := &unstructured.Unstructured{}
		r.must(yaml.Unmarshal([]byte(text), &o.Object))
		gvk := o.GroupVersionKind()
		if gvk.Group == "apps" {
			continue
		}
		resource := schema.GroupVersionResource{Group: gvk.Group, Version: gvk.Version, Resource: strings.ToLower(gvk.Kind) + "s"}
		var api dynamic.ResourceInterface = client.Resource(resource)
		if ns := o.GetNamespace(); ns != "" {
			api = client.Resource(resource).Namespace(ns)
		}
		_, err := api.Create(r.Context(), o, metav1.CreateOptions{})
		r.must(err)
	}
}
