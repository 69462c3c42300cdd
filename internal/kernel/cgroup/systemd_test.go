package cgroup_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
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
	unitEnv  = "FAIRLEAD_CGROUP_UNIT"
	unitFile = "unit"
)

// linkProgram gives the guest this program, for units of systemd.
func linkProgram(dir string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	return os.Link(exe, filepath.Join(dir, unitFile))
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
	for { // not select {}: the runtime ends a program whose goroutines all wait ("deadlock")
		_ = unix.Pause()
	}
}

// A Pod without memory ends alone: systemd, which stops a unit of which the kernel has
// killed a process for that (OOMPolicy=, systemd.service(5)), leaves the agent's alone, for
// Pods have groups beside those of units.
func TestOOMUnderSystemd(t *testing.T) {
	if err := unix.Mount("none", mounted, "cgroup2", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err)
	}
	for _, c := range []string{"cpu", "memory", "pids"} {
		if err := os.WriteFile(mounted+"/cgroup.subtree_control", []byte("+"+c), 0); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(t.TempDir(), "agent")
	m := systemd.Boot(t, map[string]string{
		"agent.service": "Environment=" + unitEnv + "=" + out + "\nExecStart=" + filepath.Join(uml.Shared, unitFile),
		"plain.service": "MemoryMax=16M\nExecStart=sh -c 'head -c 40000000 /dev/zero | tail; sleep 600'",
	})
	m.Systemctl("start", "--no-block", "agent.service")
	show := func(unit string) string { return m.Systemctl("show", "--property=ActiveState,Result,NRestarts", unit) }
	testbed.Until(t, "the agent to lose a Pod", func() error {
		text, err := os.ReadFile(out)
		if err != nil {
			return errors.Join(err, errors.New(show("agent.service")))
		}
		if kills, _, _ := strings.Cut(string(text), " "); kills == "0" {
			t.Errorf("processes killed: %s", text)
		}
		return nil
	})
	// systemd is watching: what it does about this unit it would have done about the earlier one.
	m.Systemctl("start", "--no-block", "plain.service")
	testbed.Until(t, "the end of the unit without groups", func() error {
		if s := show("plain.service"); !strings.Contains(s, "Result=oom-kill") || !strings.Contains(s, "ActiveState=failed") {
			return errors.New(s)
		}
		return nil
	})
	if s := show("agent.service"); !strings.Contains(s, "ActiveState=active") || !strings.Contains(s, "NRestarts=0") {
		t.Errorf("the agent's unit: %s", s)
	}
}
