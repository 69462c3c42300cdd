// Package helm holds the Helm chart of fairlead's components, and tests it with helm itself.
package helm

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

func TestMain(m *testing.M) {
	process.Main(func() int { return testbed.Run(m) }, "apiserver")
}

// manifests is where the chart is written as it is rendered with its defaults, a file for each component.
const manifests = "../kubernetes"

// kubeVersion is the release of Kubernetes that the chart is rendered for without a cluster.
const kubeVersion = "1.37.2"

// everything enables all components.
var everything = []string{"--set=proxy.enabled=true", "--set=nodeLocalDNS.enabled=true", "--set=nodeLocalDNS.addresses={10.96.0.10}"}

// helm is the program, with a home of its own.
type helm struct {
	*testing.T
	program string
	env     []string
}

func buildHelm(t *testing.T) string {
	t.Helper()
	program := os.Getenv("FAIRLEAD_HELM")
	if program == "" {
		program = process.Build(t, "test/helm", "helm.sh/helm/v3/cmd/helm", "-ldflags=-s -w")
	}
	return program
}

// TestChart runs the tests of the chart with one build of helm.
func TestChart(t *testing.T) {
	program := buildHelm(t)
	for name, test := range map[string]func(*helm){
		"manifests": testManifestsAreTheChart, "values": testValues, "release": testRelease,
	} {
		t.Run(name, func(t *testing.T) {
			test(&helm{t, program, []string{"HOME=" + t.TempDir(), "PATH=" + os.Getenv("PATH")}})
		})
	}
}

func (h *helm) try(args ...string) (string, error) {
	cmd := exec.CommandContext(h.Context(), h.program, args...)
	cmd.Env = h.env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err != nil {
		return stderr.String(), err
	}
	return stdout.String(), nil
}

func (h *helm) run(args ...string) string {
	h.Helper()
	out, err := h.try(args...)
	if err != nil {
		h.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// render returns the documents of each template.
func (h *helm) render(args ...string) map[string][]string {
	h.Helper()
	out := map[string][]string{}
	text := h.run(append([]string{"template", "fairlead", "fairlead", "--kube-version=" + kubeVersion}, args...)...)
	for document := range strings.SplitSeq(strings.TrimPrefix(text, "---\n"), "\n---\n") {
		source, rest, _ := strings.Cut(strings.TrimPrefix(document, "# Source: fairlead/templates/"), "\n")
		out[source] = append(out[source], strings.TrimSpace(rest)+"\n")
	}
	return out
}

// The chart is without fault, and the manifests of deploy/kubernetes are what it gives with its defaults. UPDATE=1 writes
// them.
func testManifestsAreTheChart(h *helm) {
	h.run("lint", "--strict", "fairlead")
	h.run(append([]string{"lint", "--strict", "fairlead"}, everything...)...)
	all := h.render(everything...)
	// Without the proxy's flags, which steps of the documentation add.
	beside := h.render("--set=drain.enabled=true", "--set=hubbleRelay.enabled=true")
	for _, name := range []string{"drain.yaml", "hubble-relay.yaml"} {
		all[name] = beside[name]
	}
	apart := h.render("--set=lb.controller.enabled=true")
	all["lb-controller.yaml"] = slices.Concat(apart["lb.yaml"], apart["lb-controller.yaml"])
	if of := h.render("--set=lb.controller=null"); !slices.Equal(of["lb.yaml"], all["lb.yaml"]) { // as with --reuse-values of an older chart
		h.Errorf("without the value lb.controller: %q", of["lb.yaml"])
	}
	if len(all) != 8 {
		h.Fatalf("the chart has %d components", len(all))
	}
	for name, documents := range all {
		file, got := filepath.Join(manifests, name), strings.Join(documents, "---\n")
		if os.Getenv("UPDATE") != "" {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				h.Fatal(err)
			}
		}
		if want, err := os.ReadFile(file); err != nil || string(want) != got {
			h.Errorf("%s differs from the chart, which is the source: run this test with UPDATE=1 (%v)", file, err)
		}
	}
	var kustomization struct{ Resources []string }
	text, err := os.ReadFile(filepath.Join(manifests, "kustomization.yaml"))
	if err == nil {
		err = yaml.Unmarshal(text, &kustomization)
	}
	if err != nil {
		h.Fatal(err)
	}
	byDefault := h.render()
	for name, documents := range byDefault {
		if !slices.Equal(documents, all[name]) || !slices.Contains(kustomization.Resources, name) {
			h.Errorf("%s is not the same with kubectl apply -k", name)
		}
	}
	if len(byDefault) != len(kustomization.Resources) {
		h.Errorf("kubectl apply -k has %v, and the chart %d components by default", kustomization.Resources, len(byDefault))
	}
}

// Wrong values are refused with their path, before anything is installed.
func testValues(h *helm) {
	args := []string{"template", "fairlead", "fairlead", "--kube-version=" + kubeVersion}
	wrong := map[string]string{
		"dns.replica=3":                       "at '/dns': additional properties 'replica' not allowed",
		"dns.replicas=0":                      "at '/dns/replicas'",
		"controllers.replicas=many":           "at '/controllers/replicas'",
		"kubeProxy.enabled=true":              "'kubeProxy' not allowed",
		"nodeLocalDNS.addresses={kube-dns}":   "at '/nodeLocalDNS/addresses/0'",
		"nodeLocalDNS.upstreams={}":           "at '/nodeLocalDNS/upstreams/0'",
		"lb.args={lb-announce}":               "at '/lb/args/0'",
		"lb.bgpSecrets={Rack1,a\\, b}":        "at '/lb/bgpSecrets/0'",
		"lb.controller.replicas=0":            "at '/lb/controller/replicas'",
		"lb.controller.enable=true":           "at '/lb/controller': additional properties 'enable' not allowed",
		"image.pullPolicy=Sometimes":          "at '/image/pullPolicy'",
		"image.digest=sha256:12":              "at '/image/digest'",
		"image.repository=a b":                "at '/image/repository'",
		"proxy.healthzPort=0":                 "at '/proxy/healthzPort'",
		"proxy.maxUnavailable=0%":             "at '/proxy/maxUnavailable'",
		"proxy.config=/etc/passwd":            "at '/proxy/config'",
		"controllers.leaseName=a: b":          "at '/controllers/leaseName'",
		"controllers.resources.limits.gpu=1":  "'gpu' not allowed",
		"controllers.tolerations[0].key=1":    "at '/controllers/tolerations/0/key'",
		"controllers.priorityClassName=":      "at '/controllers/priorityClassName'",
		"dns.podDisruptionBudget.enabled=yes": "at '/dns/podDisruptionBudget/enabled'",
		"drain.wait=5":                        "at '/drain/wait'",
		"drain.port=0":                        "at '/drain/port'",
		"hubbleRelay.replicas=2":              "'replicas' not allowed",
	}
	all := slices.Clone(args)
	for set := range wrong {
		all = append(all, "--set="+set)
	}
	out, err := h.try(all...)
	for set, want := range wrong {
		if err == nil || !strings.Contains(out, want) {
			h.Errorf("%s: %v, %s; want %s", set, err, out, want)
		}
	}
	out, err = h.try(append(args, "--set=nodeLocalDNS.enabled=true")...)
	if err == nil || !strings.Contains(out, "at '/nodeLocalDNS/addresses'") {
		h.Errorf("node-local DNS without addresses: %v, %s", err, out)
	}
	// Without kube-proxy's rules nothing leads to the address of the Service kubernetes.
	withoutFile := []string{"--set=proxy.enabled=true", "--set=proxy.configMap=", "--set=proxy.args={--cluster-cidr=10.244.0.0/16}"}
	out, err = h.try(append(args, withoutFile...)...)
	if err == nil || !strings.Contains(out, "at '/proxy/apiServer/host'") {
		h.Errorf("the proxy without a ConfigMap and a way to the API server: %v, %s", err, out)
	}
	withoutFile = append(withoutFile, "--set=proxy.apiServer.host=api.example.com", "--set=proxy.apiServer.port=443")
	out = strings.Join(h.render(withoutFile...)["proxy.yaml"], "")
	for _, want := range []string{
		`{name: KUBERNETES_SERVICE_HOST, value: "api.example.com"}`, `{name: KUBERNETES_SERVICE_PORT, value: "443"}`,
	} {
		if !strings.Contains(out, want) || strings.Contains(out, "--config=") {
			h.Errorf("%q is not in\n%s", want, out)
		}
	}
	withDrain := h.render("--set=proxy.enabled=true", "--set=drain.enabled=true", "--set=drain.port=12345", "--set=drain.wait=3s")
	out = strings.Join(withDrain["proxy.yaml"], "")
	if !strings.Contains(out, "- --drain-port=12345\n        - --drain-wait=3s\n") {
		h.Errorf("the proxy has no --drain-port:\n%s", out)
	}
	withoutFile = append(withoutFile, "--set=hubbleRelay.enabled=true")
	for _, of := range [][]string{{"--set=proxy.enabled=true", "--set=hubbleRelay.enabled=true"}, withoutFile} {
		out = strings.Join(h.render(of...)["proxy.yaml"], "")
		for _, want := range []string{
			"- --hubble-relay-token-file=/var/run/secrets/fairlead/hubble-relay/token\n",
			"- {name: hubble-relay, mountPath: /var/run/secrets/fairlead/hubble-relay, readOnly: true}\n",
			"projected: {sources: [{serviceAccountToken: {audience: fairlead-hubble-relay, path: token}}]}\n",
		} {
			if !strings.Contains(out, want) {
				h.Errorf("%q is not in\n%s", want, out)
			}
		}
	}
	if out, err := h.try("template", "fairlead", "fairlead", "--kube-version=1.35.0", "--set=drain.enabled=true"); err == nil {
		h.Errorf("drain is rendered for Kubernetes 1.35, which serves no MutatingAdmissionPolicy of v1:\n%s", out)
	}
	if out, err := h.try("template", "fairlead", "fairlead", "--kube-version=1.32.9"); err == nil {
		h.Errorf("it is rendered for Kubernetes 1.32, which has no IPAddress objects of networking.k8s.io/v1:\n%s", out)
	}
	out = strings.Join(h.render("--set=lb.args={--lb-announce=bgp}", "--set=lb.bgpSecrets={rack1,rack2}", "--set=imagePullSecrets={pull}",
		"--set=image.digest=sha256:"+strings.Repeat("0", 64))["lb.yaml"], "")
	for _, want := range []string{
		`- "--lb-announce=bgp"`, "resourceNames: [fairlead-lb, rack1, rack2]", "- name: pull", "image: fairlead/fairlead@sha256:000",
	} {
		if !strings.Contains(out, want) {
			h.Errorf("%q is not in\n%s", want, out)
		}
	}
}

// A release is installed, changed, taken back and removed, and nothing of it stays.
func testRelease(h *helm) {
	server := process.StartAPI(h.T)
	h.env = append(h.env, "KUBECONFIG="+server.Kubeconfig)
	client := server.Client
	replicas := func() int32 {
		d, err := client.AppsV1().Deployments("kube-system").Get(h.Context(), "fairlead-dns", metav1.GetOptions{})
		if err != nil {
			h.Fatal(err)
		}
		return *d.Spec.Replicas
	}
	notes := h.run(append([]string{"install", "fairlead", "fairlead", "-n", "kube-system"}, everything...)...)
	if !strings.Contains(notes, "scale deployment/coredns --replicas=0") || replicas() != 2 {
		h.Errorf("%d replicas, and the notes %s", replicas(), notes)
	}
	h.run("upgrade", "fairlead", "fairlead", "-n", "kube-system", "--reuse-values", "--set=dns.replicas=3", "--set=proxy.enabled=false")
	if n := replicas(); n != 3 {
		h.Errorf("%d replicas after the upgrade", n)
	}
	h.run("rollback", "fairlead", "1", "-n", "kube-system")
	daemons := func() (names []string) {
		list, err := client.AppsV1().DaemonSets("kube-system").List(context.Background(), metav1.ListOptions{})
		if err != nil {
			h.Fatal(err)
		}
		for _, d := range list.Items {
			names = append(names, d.Name)
		}
		slices.Sort(names)
		return names
	}
	if n := daemons(); replicas() != 2 || !slices.Equal(n, []string{"fairlead-lb", "fairlead-node-local-dns", "fairlead-proxy"}) {
		h.Errorf("%d replicas and %v after the rollback", replicas(), n)
	}
	h.run("uninstall", "fairlead", "-n", "kube-system", "--wait=false")
	roles, err := client.RbacV1().ClusterRoles().List(h.Context(), metav1.ListOptions{})
	if err != nil {
		h.Fatal(err)
	}
	for _, r := range roles.Items {
		if strings.HasPrefix(r.Name, "fairlead-") && r.Annotations["meta.helm.sh/release-name"] != "" {
			h.Errorf("the ClusterRole %s stays", r.Name)
		}
	}
	if n := daemons(); len(n) > 0 {
		h.Errorf("the DaemonSets %v stay", n)
	}
}
