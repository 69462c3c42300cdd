// Package systemd boots a systemd of a test's own: the machine's program, as the first
// process of a PID namespace, with its own control group. The test must be inside
// testbed.Main, whose private /run the manager uses.
package systemd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// UnitDir is where the manager looks for units, and DropInDir where an administrator's
// additions are; the machine's are hidden from the test.
const (
	UnitDir   = "/run/units"
	DropInDir = "/etc/systemd/system"
)

// program is where every distribution has it.
const program = "/lib/systemd/systemd"

// units are what every Manager has: nothing to start, and a bus.
var units = map[string]string{
	"boot.target": "[Unit]\nDefaultDependencies=no\n",
	// What units depend on without a word of it.
	"sysinit.target": "[Unit]\nDefaultDependencies=no\n", "basic.target": "[Unit]\nDefaultDependencies=no\n",
	"shutdown.target": "[Unit]\nDefaultDependencies=no\n",
	"dbus.socket":     "[Unit]\nDefaultDependencies=no\n[Socket]\nListenStream=/run/dbus/system_bus_socket\n",
	"dbus.service": "[Unit]\nDefaultDependencies=no\nRequires=dbus.socket\n[Service]\nType=notify\n" +
		"ExecStart=dbus-daemon --system --address=systemd: --nofork --nopidfile --systemd-activation --syslog-only\n",
}

// boot is run by a shell that is in the new control group: $1 is its directory.
const boot = `echo $$ >"$1/cgroup.procs" && exec unshare --pid --mount --fork --cgroup --kill-child sh -c '
	mount -t proc proc /proc && umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup &&
	exec ` + program + ` --system --unit=boot.target --log-target=console --log-level=notice --show-status=no'`

// Manager is a systemd that runs.
type Manager struct {
	t testing.TB
	// parent is the process whose child the manager is.
	parent int
}

// Boot starts a Manager with the services in files, NAME.service by what is in [Service].
// It skips the test where there is no systemd, or not what it needs: the right to control
// groups, the bus's user, and a kernel that lists children (CONFIG_PROC_CHILDREN).
func Boot(t testing.TB, services map[string]string) *Manager {
	t.Helper()
	for _, tool := range []string{program, "systemctl", "dbus-daemon", "unshare", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%v (Debian: systemd, dbus-daemon, util-linux)", err)
		}
	}
	if _, err := user.Lookup("messagebus"); err != nil { // Debian's name
		if _, other := user.Lookup("dbus"); other != nil {
			t.Skipf("the bus cannot become its user: %v; %v", err, other)
		}
	}
	if _, err := os.Stat("/proc/thread-self/children"); err != nil {
		t.Skipf("the kernel does not list children: %v", err)
	}
	group := newGroup(t)
	m := &Manager{t: t}
	for _, dir := range []string{UnitDir, "/run/dbus", "/run/lock"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mount("tmpfs", DropInDir, "tmpfs", 0, ""); err != nil {
		t.Fatalf("hide %s: %v", DropInDir, err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(DropInDir, syscall.MNT_DETACH) })
	for name, text := range units {
		m.write(name, text)
	}
	for name, text := range services {
		m.write(name, "[Unit]\nDefaultDependencies=no\nStartLimitIntervalSec=0\n[Service]\n"+text+"\n")
	}
	var log bytes.Buffer
	cmd := exec.Command("sh", "-c", boot, "sh", group)
	cmd.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+UnitDir+":"+DropInDir, "container=fairlead-test")
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.WaitDelay = testbed.Patience // a process that keeps the log open would hold up the test's end
	wait, err := process.Launch(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // the namespace ends with it
		_ = wait()             // by the signal
		if t.Failed() {
			t.Logf("systemd's log:\n%s", log.String())
		}
		for _, dir := range []string{UnitDir, "/run/dbus", "/run/systemd"} {
			_ = os.RemoveAll(dir)
		}
		removeGroup(t, group)
	})
	m.parent = cmd.Process.Pid
	testbed.Until(t, "systemd to run", func() error {
		out, err := m.command("is-system-running")
		if out != "running" {
			return fmt.Errorf("%s: %w", out, err)
		}
		return nil
	})
	// A group with its own process gives its controllers to no group in it, and this one
	// is not the manager's to move.
	_ = os.WriteFile(filepath.Join(filepath.Dir(group), "cgroup.procs"), []byte(strconv.Itoa(m.parent)), 0)
	m.Systemctl("start", "dbus.service")
	return m
}

func (m *Manager) write(name, text string) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(UnitDir, name), []byte(text), 0o644); err != nil {
		m.t.Fatal(err)
	}
}

// Systemctl runs systemctl, which must succeed.
func (m *Manager) Systemctl(args ...string) string {
	m.t.Helper()
	out, err := m.command(args...)
	if err != nil {
		m.t.Fatalf("systemctl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// Run runs a program in the manager's namespaces, which must succeed.
func (m *Manager) Run(args ...string) string {
	m.t.Helper()
	out, err := m.Command(nil, args...)
	if err != nil {
		m.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (m *Manager) command(args ...string) (string, error) {
	return m.Command(nil, append([]string{"systemctl"}, args...)...)
}

// Command runs a program in the manager's PID namespace, without which the manager does not
// know who asks, and returns what it prints.
func (m *Manager) Command(stdin io.Reader, args ...string) (string, error) {
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", m.parent, m.parent))
	first, _, _ := strings.Cut(string(children), " ")
	if err == nil && first == "" {
		err = errors.New("its parent has no children")
	}
	if err != nil {
		return "", fmt.Errorf("systemd does not run: %w", err)
	}
	ctx, cancel := context.WithTimeout(m.t.Context(), testbed.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"-t", first, "-p", "-m", "-C"}, args...)...)
	cmd.Stdin, cmd.WaitDelay = stdin, testbed.Patience
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// newGroup makes a control group of version 2.
func newGroup(t testing.TB) string {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(root, "fairlead-systemd-")
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
			t.Skipf("no right to make a control group: %v", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command("sh", "-c", `echo $$ >"$1/cgroup.procs"`, "sh", dir).CombinedOutput(); err != nil {
			_ = os.Remove(dir)
			t.Skipf("no right to enter a control group: %v: %s", err, out)
		}
		return dir
	}
	t.Skip("no control groups of version 2")
	return ""
}

// removeGroup removes a control group, and those below it, when its processes have ended.
func removeGroup(t testing.TB, group string) {
	t.Helper()
	testbed.Until(t, "the end of systemd's processes", func() error {
		var dirs []string
		err := filepath.WalkDir(group, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for i := len(dirs) - 1; i >= 0; i-- {
			if e := os.Remove(dirs[i]); e != nil && !errors.Is(e, fs.ErrNotExist) {
				err = e
			}
		}
		return err
	})
}
