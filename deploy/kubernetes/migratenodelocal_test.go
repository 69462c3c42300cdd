package kubernetes

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/fairlead/fairlead/internal/testbed/process"
)

// nodeLocalPrograms have the names and labels of NodeLocal DNSCache's manifest. Its program is not run here, and questions go to
// CoreDNS through kube-proxy until fairlead's is there.
func nodeLocalPrograms() string {
	return `
apiVersion: v1
kind: ConfigMap
metadata: {name: node-local-dns, namespace: kube-system}
data: {Corefile: "cluster.local:53 { forward . __PILLAR__CLUSTER__DNS__ }"}
---` + placeholder("DaemonSet", "kube-system", "node-local-dns", "k8s-app: node-local-dns",
		"serviceAccountName: coredns, hostNetwork: true")
}

// nodeLocal changes from NodeLocal DNSCache to fairlead's server on the node and back with the commands of docs/kubernetes.md.
// Pods ask at the address of kube-dns all the time, and no question is lost.
func (m *migration) nodeLocal(server netip.AddrPort) {
	m.Helper()
	if server.Addr().String() != "10.96.0.10" {
		m.Fatalf("the Service kube-dns has the address %s; the manifest has 10.96.0.10", server)
	}
	m.apply(nodeLocalPrograms())
	m.kubectl("rollout", "status", "daemonset/node-local-dns", "-n", "kube-system", "--timeout=2m")
	steps := blocks(section(m.T, "kubernetes.md", "NodeLocal DNSCache"))
	if len(steps) != 5 {
		m.Fatalf("the section has the commands %q", steps)
	}
	asking := m.questions(server, 1)
	m.shell(steps[:3]...)
	if got := m.nodeLocalRuns(); got != "fairlead-node-local-dns" {
		m.Errorf("after the change, %s runs", got)
	}
	m.shell(steps[3])
	process.Output(m.T, m.node.Command(m.Context(), process.Program("fairlead"), "cleanup"))
	m.shell(steps[4])
	m.kubectl("rollout", "status", "daemonset/node-local-dns", "-n", "kube-system", "--timeout=2m")
	if got := m.nodeLocalRuns(); got != "node-local-dns" {
		m.Errorf("on the way back, %s runs", got)
	}
	asking.end(1)
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

// blocks returns the commands of a section.
func blocks(section string) []string {
	return regexp.MustCompile(`(?m)(?:^    .+\n)+`).FindAllString(section, -1)
}

// shell runs commands of a document, as an administrator in the repository's directory.
func (r *rig) shell(steps ...string) {
	r.Helper()
	dir, bin := r.TempDir(), filepath.Dir(process.Program("kubectl"))
	repository, err := filepath.Abs("../..")
	if err == nil {
		err = os.Symlink(filepath.Join(repository, "deploy"), filepath.Join(dir, "deploy"))
	}
	if err != nil {
		r.Fatal(err)
	}
	for _, step := range steps {
		cmd := exec.Command("bash", "-euo", "pipefail", "-c", step)
		cmd.Dir, cmd.Env = dir, []string{"KUBECONFIG=" + r.api.Kubeconfig, "HOME=" + dir, "PATH=" + bin + ":" + os.Getenv("PATH")}
		if out, err := process.Try(cmd); err != nil {
			r.Fatalf("%s\n%v\n%s", step, err, out)
		}
	}
}
