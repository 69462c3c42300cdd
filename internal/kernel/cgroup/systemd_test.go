package cgroup_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/cgroup"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/systemd"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

const (
	unitEnv      = "FAIRLEAD_CGROUP_UNIT"
	unitFile     = "unit"
	packagedUnit = "fairlead-agent.service"
)

// linkProgram gives the guest this program, for units of systemd, and the unit of the packages.
func linkProgram(dir string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join("../../../deploy/systemd", packagedUnit))
	if err != nil {
		return err
	}
	return errors.Join(os.Link(exe, filepath.Join(dir, unitFile)), os.WriteFile(filepath.Join(dir, packagedUnit), text, 0o600))
}

// packaged is the service of the packages' unit, but for its program, which does not report
// that it is ready, and its directory: the guest's disk is read-only.
func packaged(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(uml.Shared, packagedUnit))
	if err != nil {
		t.Fatal(err)
	}
	_, service, _ := strings.Cut(string(text), "[Service]\n")
	service, _, found := strings.Cut(service, "[Install]")
	if !found {
		t.Fatalf("the unit is %s", text)
	}
	return service + "Type=exec\nWatchdogSec=0\nStateDirectory=\nExecStart=\n"
}

// runAsUnit is this program as an agent of which a Pod takes more memory than it may have. It
// writes how often the kernel killed for that into the file out, and stays.
func runAsUnit(out string) {
	tr, err := cgroup.Open("fairlead")
	if err != nil {
		panic(err)
	}
	g := tr.Group(filepath.Base(out))
	if err := g.Make(cgroup.Limits{Memory: 16 << 20}, false); err != nil {
		panic(err)
	}
	dir, err := g.Open()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command("sh", "-c", "head -c 40000000 /dev/zero | tail")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	_ = cmd.Run()
	if err := os.WriteFile(out+".new", fmt.Appendf(nil, "%d in %s", g.OOMKills(), g.Dir()), 0o600); err != nil {
		panic(err)
	}
	if err := os.Rename(out+".new", out); err != nil { // a reader finds all of it
		panic(err)
	}
	stayUntilStopped(tr, out)
}

// stayUntilStopped has a Pod that outlives this process, from the first process of the unit on,
// and writes what it is limited to into the file out+".limit".
func stayUntilStopped(tr *cgroup.Tree, out string) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	g := tr.Group(filepath.Base(out) + "-stays")
	fresh := !g.Exists()
	err := g.Make(cgroup.Limits{Memory: 32 << 20}, false)
	if fresh && err == nil {
		var dir *os.File
		if dir, err = g.Open(); err == nil {
			cmd := exec.Command("sleep", "600")
			cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
			err = cmd.Start()
		}
	}
	limit, e := os.ReadFile(filepath.Join(g.Dir(), "memory.max"))
	text := fmt.Sprintf("%d %s %d", os.Getpid(), strings.TrimSpace(string(limit)), g.Usage().PIDs)
	if err = errors.Join(err, e, os.WriteFile(out+".limit", []byte(text), 0o600)); err != nil {
		panic(err)
	}
	<-stop
	if err := tr.Release(); err != nil {
		panic(err)
	}
}

// delegated is a unit that may not write beside the groups of units.
const delegated = "Delegate=yes\nKillMode=process\nReadOnlyPaths=/sys/fs/cgroup\n" +
	"ReadWritePaths=/sys/fs/cgroup/system.slice/delegated.service\n"

// A Pod without memory ends alone: systemd, which stops a unit of which the kernel has
// killed a process for that (OOMPolicy=, systemd.service(5)), leaves the agent's alone, for
// Pods have groups beside those of units, also where its unit is that of the packages; or,
// where they cannot, for its unit is delegated.
func TestOOMUnderSystemd(t *testing.T) {
	if err := unix.Mount("none", mounted, "cgroup2", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err)
	}
	for _, c := range []string{"cpu", "memory", "pids"} {
		if err := os.WriteFile(mounted+"/cgroup.subtree_control", []byte("+"+c), 0); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	unit := func(name string) string {
		return "Environment=" + unitEnv + "=" + filepath.Join(dir, name) + "\nExecStart=" + filepath.Join(uml.Shared, unitFile) +
			"\nStandardError=append:" + filepath.Join(dir, name+".err")
	}
	m := systemd.Boot(t, map[string]string{
		"agent.service":     unit("agent"),
		"delegated.service": delegated + unit("delegated"),
		"packaged.service":  packaged(t) + unit("packaged"),
		"plain.service":     "MemoryMax=16M\nExecStart=sh -c 'head -c 40000000 /dev/zero | tail; sleep 600'",
	})
	show := func(unit string) string { return m.Systemctl("show", "--property=ActiveState,Result,NRestarts", unit) }
	for name, group := range map[string]string{
		"agent": "fairlead/agent", "packaged": "fairlead/packaged", "delegated": "system.slice/delegated.service/fairlead/delegated",
	} {
		m.Systemctl("start", "--no-block", name+".service")
		testbed.Until(t, name+" to lose a Pod", func() error {
			text, err := os.ReadFile(filepath.Join(dir, name))
			if s := show(name + ".service"); strings.Contains(s, "ActiveState=failed") {
				said, _ := os.ReadFile(filepath.Join(dir, name+".err"))
				t.Fatalf("%s: %s\n%s", name, s, said)
			}
			if err != nil {
				return err
			}
			if kills, at, _ := strings.Cut(string(text), " in "); kills == "0" || at != mounted+"/"+group {
				t.Errorf("%s: processes killed: %s; want some in %s", name, text, group)
			}
			return nil
		})
	}
	// systemd is watching: what it does about this unit it would have done about the earlier ones.
	m.Systemctl("start", "--no-block", "plain.service")
	testbed.Until(t, "the end of the unit without groups", func() error {
		if s := show("plain.service"); !strings.Contains(s, "Result=oom-kill") || !strings.Contains(s, "ActiveState=failed") {
			return errors.New(s)
		}
		return nil
	})
	for _, name := range []string{"agent", "packaged", "delegated"} {
		if s := show(name + ".service"); !strings.Contains(s, "ActiveState=active") || !strings.Contains(s, "NRestarts=0") {
			t.Errorf("the unit %s: %s", name, s)
		}
	}
	restarts(t, m, filepath.Join(dir, "delegated.limit"))
}

// restarts checks that systemd starts the delegated unit again while a Pod lives in its groups,
// and that the Pod, which goes on, is limited again.
func restarts(t *testing.T, m *systemd.Manager, file string) {
	t.Helper()
	limited := func(but string) (pid string) {
		testbed.Until(t, "a limited Pod of the delegated unit", func() error {
			text, err := os.ReadFile(file)
			words := strings.Fields(string(text))
			if err != nil || len(words) != 3 || words[0] == but || words[1] != "33554432" || words[2] != "1" {
				return fmt.Errorf("%q, %w", text, err)
			}
			pid = words[0]
			return nil
		})
		return pid
	}
	first := limited("")
	m.Systemctl("restart", "delegated.service")
	limited(first)
}
