package packages

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/testbed"
)

// foreign matches what dpkg, systemd and the test itself leave.
var foreign = regexp.MustCompile(`^/(lib/(dpkg|systemd)|log|cache|run/(systemd|lock|dbus|fairlead-.*\.log|.*\.pid))(/|$)|` +
	`machine-id|\.wh\.|init\.scope|fairlead-test|-\.mount|/(etc|var|usr)\b.*overlay`)

// state is what the machine has: files that are not its own, rules, devices, parameters,
// mounts, control groups, processes and units.
func (m *machine) state() (lines []string) {
	m.t.Helper()
	add := func(line string) {
		if line = strings.TrimSpace(line); !foreign.MatchString(line) {
			lines = append(lines, line)
		}
	}
	for _, root := range append([]string{"/run"}, m.changes...) {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if root != "/run" {
				path = strings.TrimPrefix(path, root)
			}
			// A directory of the machine is among the changes once anything was in it.
			if err == nil && (root == "/run" || !d.IsDir() || strings.Contains(path, "fairlead")) {
				add(path)
			}
			return err
		})
		if err != nil {
			m.t.Fatal(err)
		}
	}
	for _, command := range [][]string{
		{"cat", "/proc/self/mounts"}, {"find", "/sys/fs/cgroup", "-type", "d"},
		{"ps", "-e", "-o", "comm="}, {"systemctl", "list-units", "--all", "--plain", "--no-legend", "fairlead*"},
	} {
		for line := range strings.Lines(m.systemd.Run(command...)) {
			add(line)
		}
	}
	return append(lines, testbed.KernelState(m.t, exec.Command)...)
}

// uninstall removes everything by 'fairlead uninstall', and compares the machine with what
// it was before the installation.
func (m *machine) uninstall(client kubernetes.Interface, before []string) {
	t := m.t
	m.install()
	if text, err := os.ReadFile("/etc/fairlead/config.yaml"); err != nil || string(text) != config {
		t.Fatalf("the configuration of the first installation: %v\n%s", err, text)
	}
	m.start()
	m.run(client)
	uninstall := func(stdin string, args ...string) (string, error) {
		return m.systemd.Command(strings.NewReader(stdin), append([]string{"/usr/bin/fairlead", "uninstall"}, args...)...)
	}
	other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node2"}}
	if _, err := client.CoreV1().Nodes().Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if out, err := uninstall("", "--yes"); err == nil || !strings.Contains(out, "other machines are joined") ||
		!strings.Contains(out, "node2") {
		t.Errorf("with another node: %v\n%s", err, out)
	}
	if out, err := uninstall("", "--yes", "--force", "--data-dir", "/var/lib"); err == nil ||
		!strings.Contains(out, "no data of a server or an agent") {
		t.Errorf("a directory that is not fairlead's: %v\n%s", err, out)
	}
	if out, err := uninstall("no\n", "--force"); err == nil || !strings.Contains(out, "not confirmed") {
		t.Errorf("without a confirmation: %v\n%s", err, out)
	}
	if pid := m.property(agent, "MainPID"); pid == "0" {
		t.Error("the agent does not run after an uninstallation that was rejected")
	}
	if left := cmp.Diff(before, m.state()); left == "" {
		t.Error("an installation differs in nothing that this test could miss")
	}
	out, err := uninstall("yes\n", "--force")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if left := cmp.Diff(before, m.state()); left != "" {
		t.Errorf("the machine before the installation and after 'fairlead uninstall':\n%s\nit said:\n%s", left, out)
	}
}
