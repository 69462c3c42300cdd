// Package packages installs the Debian package as an administrator does, under a systemd of
// its own, on directories whose changes go with the test.
package packages

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
	"github.com/fairlead/fairlead/internal/testbed/systemd"
)

func TestMain(m *testing.M) {
	os.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	process.Main(func() int { return testbed.Run(m) }, "fairlead", "backend")
}

// makePackages writes the packages of a program, in some formats, and returns their directory.
func makePackages(t *testing.T, program, formats string) string {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command("../../tools/release/package", "amd64", program, dir)
	cmd.Env = append(os.Environ(), "VERSION=v1.0.0", "FORMATS="+formats)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return dir
}

// The same commit gives the same bytes. Packages hold what the file system hierarchy has for
// it, and no file that everybody may write.
func TestPackages(t *testing.T) {
	const formats = "deb rpm tar"
	first, second := makePackages(t, process.Program("backend"), formats), makePackages(t, process.Program("backend"), formats)
	files, err := filepath.Glob(first + "/*")
	if err != nil || len(files) != 4 {
		t.Fatalf("%v, %v; want a tarball, two packages and an SBOM", files, err)
	}
	for _, f := range files {
		a, err1 := os.ReadFile(f)
		b, err2 := os.ReadFile(filepath.Join(second, filepath.Base(f)))
		if err1 != nil || err2 != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs: %v, %v", filepath.Base(f), err1, err2)
		}
	}
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skipf("%v (Debian: dpkg, iproute2, systemd)", err)
	}
	root := t.TempDir()
	if out, err := exec.Command("sh", "-c", `dpkg-deb -x "$1"/*.deb "$2"`, "sh", first, root).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	checkContents(t, root)
}

// checkContents checks names and modes of the package that is unpacked in root.
func checkContents(t *testing.T, root string) {
	t.Helper()
	want := map[string]fs.FileMode{
		"usr/bin/fairlead": 0o755, "etc/fairlead/config.yaml": 0o600, "etc/fairlead/pods.d": fs.ModeDir | 0o700,
		"usr/lib/systemd/system/fairlead-agent.service": 0o644, "usr/share/man/man1": fs.ModeDir | 0o755,
		"usr/share/man/man1/fairlead-agent.1.gz": 0o644, "usr/share/bash-completion/completions/fairlead": 0o644,
	}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		name, _ := filepath.Rel(root, path)
		if mode, ok := want[name]; ok && mode != info.Mode() {
			t.Errorf("%s has mode %v, want %v", name, info.Mode(), mode)
		}
		delete(want, name)
		if info.Mode()&0o022 != 0 && path != root {
			t.Errorf("%s has mode %v", name, info.Mode())
		}
		return err
	})
	if err != nil || len(want) > 0 {
		t.Errorf("%v; missing: %v", err, want)
	}
}

// Versions are ordered as they came about.
func TestVersions(t *testing.T) {
	if _, err := exec.LookPath("dpkg"); err != nil {
		t.Skipf("%v (Debian: dpkg, iproute2, systemd)", err)
	}
	last := ""
	for _, v := range []string{"v1.0.0-rc.1", "v1.0.0-rc.1-3-gabcdef0", "v1.0.0-rc.2", "v1.0.0", "v1.0.0-5-gabcdef0", "v1.0.1", "v1.10.0"} {
		cmd := exec.Command("../../tools/release/version")
		cmd.Env = append(os.Environ(), "VERSION="+v)
		out, err := cmd.Output()
		version := strings.TrimSpace(string(out))
		if err != nil || strings.Contains(version, "-") { // rpm has no hyphen in it
			t.Errorf("%s: %q, %v", v, version, err)
		}
		if last != "" && exec.Command("dpkg", "--compare-versions", last, "lt", version).Run() != nil {
			t.Errorf("%s is not before %s", last, version)
		}
		last = version
	}
}

// shadow has changes below a directory of the machine go to memory, and returns where.
func shadow(t *testing.T, dir string) (changes string) {
	t.Helper()
	upper := t.TempDir()
	if err := syscall.Mount("tmpfs", upper, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(upper, syscall.MNT_DETACH) })
	for _, d := range []string{"changes", "work"} {
		if err := os.Mkdir(filepath.Join(upper, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/changes,workdir=%s/work", dir, upper, upper)
	if err := syscall.Mount("overlay", dir, "overlay", 0, options); err != nil {
		t.Skipf("no overlay of %s: %v", dir, err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return filepath.Join(upper, "changes")
}

// machine is one with systemd on which the package is installed.
type machine struct {
	t       *testing.T
	systemd *systemd.Manager
	// pkg is the file of the package, setup the command that installs or upgrades it.
	pkg   string
	setup []string
	// changes are the directories of what differs from the machine's own.
	changes []string
}

const (
	server, agent = "fairlead-server.service", "fairlead-agent.service"
	address       = "192.0.2.10"
)

// newMachine has the package of a format, and the command that installs it.
func newMachine(t *testing.T, format string, setup ...string) *machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("installs packages, which needs root")
	}
	for _, tool := range []string{setup[0], "ip"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%v (Debian: dpkg, rpm, iproute2, systemd)", err)
		}
	}
	found, err := filepath.Glob(makePackages(t, process.Program("fairlead"), format) + "/*." + format)
	if err != nil || len(found) != 1 {
		t.Fatalf("%v, %v; want a package", found, err)
	}
	t.Setenv("HOME", t.TempDir()) // where Debian's rpm has its database
	var changes []string
	for _, dir := range []string{"/usr", "/etc", "/var"} {
		changes = append(changes, shadow(t, dir))
	}
	_ = os.RemoveAll("/var/lib/fairlead")
	_ = os.RemoveAll("/etc/fairlead")
	if out, err := exec.Command("sh", "-c", "sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0 && "+
		"ip link add eth0 type veth peer name switch && ip link set switch up && "+
		"ip addr add "+address+"/24 dev eth0 && ip link set eth0 up").
		CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "eth0").Run() })
	// The index of manual pages takes longer than all else of an installation.
	if err := os.WriteFile("/etc/dpkg/dpkg.cfg.d/fairlead-test", []byte("no-triggers\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, pkg: found[0], setup: setup, systemd: systemd.Boot(t, nil), changes: changes}
	for _, unit := range []string{server, agent} { // the manager does not see the units of the machine
		if err := os.Symlink("/usr/lib/systemd/system/"+unit, filepath.Join(systemd.UnitDir, unit)); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// install installs or upgrades the package.
func (m *machine) install() {
	m.t.Helper()
	m.systemd.Run(append(m.setup, m.pkg)...)
}

// dropIn adds to a unit, and has the test print what it logs.
func (m *machine) dropIn(unit, text string) {
	m.t.Helper()
	dir, log := filepath.Join(systemd.DropInDir, unit+".d"), "/run/"+unit+".log"
	text = "[Service]\nStandardOutput=append:" + log + "\nStandardError=append:" + log + "\n" + text + "\n"
	if err := os.MkdirAll(dir, 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "test.conf"), []byte(text), 0o644); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		if text, err := os.ReadFile(log); m.t.Failed() {
			m.t.Logf("log of %s: %v\n%s", unit, err, text)
		}
	})
}

// property returns a property of a unit.
func (m *machine) property(unit, name string) string {
	m.t.Helper()
	return m.systemd.Systemctl("show", "--value", "-p", name, unit)
}

// visitor asks a Pod over one connection, while that lasts.
type visitor struct {
	http.Client
	url   string
	dials int
}

func newVisitor(p *corev1.Pod) *visitor {
	v := &visitor{url: "http://" + net.JoinHostPort(p.Status.PodIP, "9376")}
	v.Timeout = 10 * time.Second
	v.Transport = &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		v.dials++
		return new(net.Dialer).DialContext(ctx, network, addr)
	}}
	return v
}

func (v *visitor) ask() error {
	res, err := v.Get(v.url)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return err
}

func TestInstallUpgradeRemove(t *testing.T) {
	m := newMachine(t, "deb", "dpkg", "--force-confdef", "-i")
	before := m.state()
	client, visit := m.begin()

	m.systemd.Systemctl("restart", agent)
	if err := visit.ask(); err != nil {
		t.Error(err)
	}
	m.upgrade(visit)
	m.restore(client)
	if err := visit.ask(); err != nil || visit.dials != 1 {
		t.Errorf("%v; %d connections to the Pod while the server was restored, want one", err, visit.dials)
	}

	m.dropIn(server, "WatchdogSec=5") // a minute is too long for a test
	m.systemd.Systemctl("daemon-reload")
	m.systemd.Systemctl("restart", server)
	m.systemd.Run("kill", "-STOP", m.property(server, "MainPID"))
	testbed.Until(t, "a server that hangs to be started again", func() error {
		if n := m.property(server, "NRestarts"); n == "0" {
			return fmt.Errorf("it is %s", m.property(server, "ActiveState"))
		}
		return nil
	})

	m.systemd.Run("dpkg", "-r", "fairlead")
	for _, unit := range []string{server, agent} {
		if state := m.property(unit, "ActiveState"); state == "active" {
			t.Errorf("%s is %s after the removal", unit, state)
		}
	}
	if err := visit.ask(); err == nil {
		t.Error("the Pod answers after the removal")
	}
	if _, err := os.Stat("/usr/bin/fairlead"); !os.IsNotExist(err) {
		t.Errorf("/usr/bin/fairlead after the removal: %v", err)
	}
	for _, kept := range []string{"/etc/fairlead/config.yaml", "/var/lib/fairlead/pki/ca.key"} {
		if _, err := os.Stat(kept); err != nil {
			t.Errorf("%v: a removal keeps it", err)
		}
	}
	if rules, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil || strings.Contains(string(rules), "fairlead") {
		t.Errorf("rules after the removal: %v\n%s", err, rules)
	}
	m.uninstall(client, before)
}

// The same by rpm, up to an uninstallation that keeps what is the user's.
func TestInstallUpgradeUninstallRPM(t *testing.T) {
	m := newMachine(t, "rpm", "rpm", "-U", "--nodeps", "--replacepkgs") // Debian's rpm knows of no /bin/sh
	_, visit := m.begin()
	m.upgrade(visit)
	m.systemd.Run("/usr/bin/fairlead", "uninstall", "--yes", "--keep-data", "--force")
	if err := visit.ask(); err == nil {
		t.Error("the Pod answers after an uninstallation")
	}
	for _, kept := range []string{"/etc/fairlead/config.yaml", "/var/lib/fairlead/pki/ca.key", "/var/lib/fairlead/etcd"} {
		if _, err := os.Stat(kept); err != nil {
			t.Errorf("%v: --keep-data keeps it", err)
		}
	}
	for _, gone := range []string{"/usr/bin/fairlead", "/usr/lib/systemd/system/" + agent, "/var/lib/fairlead/agent"} {
		if _, err := os.Stat(gone); !os.IsNotExist(err) {
			t.Errorf("%s after an uninstallation: %v", gone, err)
		}
	}
	if out, err := m.systemd.Command(nil, "rpm", "-q", "fairlead"); err == nil {
		t.Errorf("rpm has %s", out)
	}
}

const config = "server:\n  bind-address: [127.0.0.1, " + address + "]\n" +
	"agent:\n  server: https://" + address + ":6443\n  token-file: /var/lib/fairlead/node-token\n  node-name: node1\n"

// begin installs the package and starts a cluster with a Pod, to which the visitor is connected.
func (m *machine) begin() (kubernetes.Interface, *visitor) {
	t := m.t
	t.Helper()
	m.install()
	if err := os.WriteFile("/etc/fairlead/config.yaml", []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	m.systemd.Run("/usr/bin/fairlead", "config", "check")
	m.start()
	cfg, err := clientcmd.BuildConfigFromFlags("", "/var/lib/fairlead/admin.kubeconfig")
	if err != nil {
		t.Fatal(err)
	}
	client := kubernetes.NewForConfigOrDie(cfg)
	visit := newVisitor(m.run(client))
	testbed.Until(t, "the Pod to answer", visit.ask)
	visit.dials = 1
	return client, visit
}

// upgrade installs the package once more. Units are started again; the Pod, connections to it
// and the configuration stay.
func (m *machine) upgrade(visit *visitor) {
	t := m.t
	t.Helper()
	pids := map[string]string{server: m.property(server, "MainPID"), agent: m.property(agent, "MainPID")}
	m.install()
	for unit, before := range pids {
		testbed.Until(t, "the new "+unit, func() error {
			if pid, state := m.property(unit, "MainPID"), m.property(unit, "ActiveState"); pid == before || pid == "0" || state != "active" {
				return fmt.Errorf("process %s, before the upgrade %s, is %s", pid, before, state)
			}
			return nil
		})
	}
	if err := visit.ask(); err != nil || visit.dials != 1 {
		t.Errorf("%v; %d connections to the Pod up to the end of an upgrade, want one", err, visit.dials)
	}
	if text, err := os.ReadFile("/etc/fairlead/config.yaml"); err != nil || string(text) != config {
		t.Errorf("the configuration after an upgrade: %v\n%s", err, text)
	}
}

// restore does what docs/backup.md says: what the backup has is there afterwards, and what was
// made since is not.
func (m *machine) restore(client kubernetes.Interface) {
	t := m.t
	t.Helper()
	add := func(name string) {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := client.CoreV1().ConfigMaps("default").Create(t.Context(), cm, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	add("before")
	m.systemd.Run("/usr/bin/fairlead", "backup", "/var/backups/fairlead.tar")
	add("since")
	m.systemd.Systemctl("stop", server)
	m.systemd.Run("mkdir", "/var/lib/fairlead.old")
	m.systemd.Run("mv", "/var/lib/fairlead/etcd", "/var/lib/fairlead/pki", "/var/lib/fairlead.old/")
	m.systemd.Run("/usr/bin/fairlead", "restore", "/var/backups/fairlead.tar")
	m.systemd.Systemctl("start", server)
	if _, err := client.CoreV1().ConfigMaps("default").Get(t.Context(), "before", metav1.GetOptions{}); err != nil {
		t.Errorf("what was backed up: %v", err)
	}
	if _, err := client.CoreV1().ConfigMaps("default").Get(t.Context(), "since", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("what was made after the backup: %v", err)
	}
	for _, saved := range []string{"/var/lib/fairlead.old", "/var/backups/fairlead.tar"} {
		if err := os.RemoveAll(saved); err != nil {
			t.Error(err)
		}
	}
}

// start starts both units, which it returns from when they are ready.
func (m *machine) start() {
	m.t.Helper()
	m.dropIn(server, "")
	m.dropIn(agent, "")
	m.systemd.Systemctl("daemon-reload")
	m.systemd.Systemctl("start", server)
	m.systemd.Systemctl("start", agent)
}

// run starts a Pod and returns it when it is ready.
func (m *machine) run(client kubernetes.Interface) *corev1.Pod {
	m.t.Helper()
	m.systemd.Run("/usr/bin/fairlead", "run", "-d", "-l", "app=web", "-p", "http=9376", "--ready", "http://:9376/healthz", "--",
		process.Program("backend"))
	var pod *corev1.Pod
	testbed.Until(m.t, "a ready Pod", func() error {
		pods, err := client.CoreV1().Pods("default").List(m.t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil || len(pods.Items) == 0 {
			return fmt.Errorf("%d Pods: %w", len(pods.Items), err)
		}
		pod = &pods.Items[0]
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("%+v", pod.Status)
	})
	return pod
}

// The unit of the server gives it nothing that it does not need: 'systemd-analyze security'
// rates its exposure 2.0 at most, of 10.
func TestServerUnitIsHardened(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skipf("%v (Debian: dpkg, iproute2, systemd)", err)
	}
	out, err := exec.Command("systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=20",
		"../../deploy/systemd/"+server).CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
