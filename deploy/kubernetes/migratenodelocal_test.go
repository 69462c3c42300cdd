package kubernetes

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/fairlead/fairlead/internal/testbed/process"
)

// nodeLocalPrograms have the names and labels of NodeLocal DNSCache's manifest. Its program is not run here, and questions go to
// CoreDNS through kube-proxy until fairlead's is there.
const nodeLocalPrograms = `
apiVersion: v1
kind: ConfigMap
metadata: {name: node-local-dns, namespace: kube-system}
data: {Corefile: "cluster.local:53 { forward . __PILLAR__CLUSTER__DNS__ }"}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: node-local-dns, namespace: kube-system, labels: {k8s-app: node-local-dns}}
spec:
  selector: {matchLabels: {k8s-app: node-local-dns}}
  template:
    metadata: {labels: {k8s-app: node-local-dns}}
    spec:
      serviceAccountName: coredns
      hostNetwork: true
      containers: [{name: node-cache, image: ` + placeholderImage + `, args: [infinity]}]
`

// nodeLocal changes from NodeLocal DNSCache to fairlead's server on the node and back with the commands of docs/kubernetes.md.
// Pods ask at the address of kube-dns all the time, and no question is lost.
func (m *migration) nodeLocal() {
	m.Helper()
	server := m.startCoreDNS()
	if server.Addr().String() != "10.96.0.10" {
		m.Fatalf("the Service kube-dns has the address %s; the manifest has 10.96.0.10", server)
	}
	cmd := m.kubectlCommand("apply", "-f", "-")
	cmd.Stdin = strings.NewReader(nodeLocalPrograms)
	if out, err := process.Try(cmd); err != nil {
		m.Fatal(err, out)
	}
	m.kubectl("rollout", "status", "daemonset/node-local-dns", "-n", "kube-system", "--timeout=2m")
	blocks := m.blocks("../../docs/kubernetes.md", "NodeLocal DNSCache")
	if len(blocks) != 4 {
		m.Fatalf("the section has the commands %q", blocks)
	}
	end := m.questions(server)
	m.shell(blocks[:3]...)
	if got := m.nodeLocalRuns(); got != "fairlead-node-local-dns" {
		m.Errorf("after the change there run %s", got)
	}
	m.kubectl("delete", "-f", "nodelocaldns.yaml")
	m.kubectl("wait", "--for=delete", "pod", "-n", "kube-system", "-l", "app.kubernetes.io/name=fairlead-node-local-dns", "--timeout=2m")
	process.Output(m.T, m.node.Command(m.Context(), process.Program("fairlead"), "cleanup"))
	m.shell(blocks[3])
	m.kubectl("rollout", "status", "daemonset/node-local-dns", "-n", "kube-system", "--timeout=2m")
	if got := m.nodeLocalRuns(); got != "node-local-dns" {
		m.Errorf("on the way back there run %s", got)
	}
	end()
}

// nodeLocalRuns are the names of the DaemonSets that have a Pod.
func (m *migration) nodeLocalRuns() string {
	m.Helper()
	var out []string
	for _, line := range strings.Split(m.kubectl("get", "daemonsets", "-n", "kube-system", "-o",
		`jsonpath={range .items[*]}{.metadata.name} {.status.numberReady}{"\n"}{end}`), "\n") {
		if name, ready, _ := strings.Cut(line, " "); strings.Contains(name, "node-local-dns") && ready == "1" {
			out = append(out, name)
		}
	}
	return strings.Join(out, " ")
}

// blocks returns the commands of a section of a document.
func (m *migration) blocks(file, title string) []string {
	m.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		m.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n## "+title+"\n")
	if !ok {
		m.Fatalf("%s has no section %q", file, title)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	return regexp.MustCompile(`(?m)(?:^    .+\n)+`).FindAllString(section, -1)
}

// shell runs commands of a document, as an administrator in the repository's directory.
func (m *migration) shell(blocks ...string) {
	m.Helper()
	dir, bin := m.TempDir(), filepath.Dir(process.Program("kubectl"))
	repository, err := filepath.Abs("../..")
	if err == nil {
		err = os.Symlink(filepath.Join(repository, "deploy"), filepath.Join(dir, "deploy"))
	}
	if err != nil {
		m.Fatal(err)
	}
	for _, block := range blocks {
		cmd := exec.Command("bash", "-euo", "pipefail", "-c", block)
		cmd.Dir, cmd.Env = dir, []string{"KUBECONFIG=" + m.api.Kubeconfig, "HOME=" + dir, "PATH=" + bin + ":" + os.Getenv("PATH")}
		if out, err := process.Try(cmd); err != nil {
			m.Fatalf("%s\n%v\n%s", block, err, out)
		}
	}
}
