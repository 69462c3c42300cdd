package systemd_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/systemd"
	"github.com/fairlead/fairlead/internal/testbed"
	booted "github.com/fairlead/fairlead/internal/testbed/systemd"
)

// With the hook those who follow a unit know that it is stopped before its process does,
// and its own commands run after that; a process that dies is not waited for.
func TestHook(t *testing.T) {
	order := filepath.Join(t.TempDir(), "order")
	const program = `ExecStart=sh -c 'trap "echo term >>ORDER; exit 0" TERM; touch ORDER.ready; while :; do sleep 0.02; done'
ExecStop=sh -c \
# a comment in between
  'echo own >>ORDER'`
	m := booted.Boot(t, map[string]string{"db.service": strings.ReplaceAll(program, "ORDER", order)})
	testInstalledTwice(t)

	bus := newBus(t)
	var db states
	defer bus.Watch("db.service", db.report)()
	// What 'systemctl edit' writes does not take the wait away.
	override := filepath.Join(filepath.Dir(systemd.HookPath("db.service")), "override.conf")
	if err := os.WriteFile(override, []byte("[Service]\nExecStop=\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	m.Systemctl("daemon-reload")
	m.Systemctl("start", "db.service")
	db.until(t, "active")
	testbed.Until(t, "its trap", func() error { _, err := os.Stat(order + ".ready"); return err })
	m.Systemctl("stop", "--no-block", "db.service")
	db.until(t, "deactivating")
	if text, err := os.ReadFile(order); !os.IsNotExist(err) {
		t.Errorf("when the stop is seen, it was %q already, %v", text, err)
	}
	m.Systemctl("kill", "--kill-who=control", "db.service") // the wait is over
	db.until(t, "inactive")
	if text, err := os.ReadFile(order); err != nil || string(text) != "own\nterm\n" {
		t.Errorf("the order was %q, %v; want the unit's own command, then SIGTERM", text, err)
	}
	testReleased(t, m, &db)

	if err := os.Remove(override); err != nil {
		t.Fatal(err)
	}
	testHookRemoved(t)
	testHooksGo(t)
	for unit, want := range map[string]string{"no.service": "systemd knows no unit no.service", "a.socket": "is not a service"} {
		if err := systemd.InstallHook(t.Context(), unit, time.Second); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("InstallHook of %s: %v, want %q", unit, err, want)
		}
	}
}

// testInstalledTwice installs the hook twice, with one of an earlier build in between, and wants one file.
func testInstalledTwice(t *testing.T) {
	t.Helper()
	path := systemd.HookPath("db.service")
	testbed.Until(t, "the hook", func() error { return systemd.InstallHook(t.Context(), "db.service", time.Minute) })
	first, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	old := filepath.Join(filepath.Dir(path), "50-fairlead.conf")
	if err := os.WriteFile(old, first, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := systemd.InstallHook(t.Context(), "db.service", time.Minute); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(old); !os.IsNotExist(err) {
		t.Errorf("the hook of an earlier build is left: %v", err)
	}
	if again, err := os.ReadFile(path); err != nil || string(again) != string(first) {
		t.Errorf("the second time it is %q, %v; want %q", again, err, first)
	}
}

// testReleased stops the unit again and releases the run: it ends long before the wait of a minute.
func testReleased(t *testing.T, m *booted.Manager, db *states) {
	t.Helper()
	m.Systemctl("start", "db.service")
	db.until(t, "active")
	m.Systemctl("stop", "--no-block", "db.service")
	db.until(t, "deactivating")
	run := db.stopping()
	if run == "" || run != m.Systemctl("show", "--property", "InvocationID", "--value", "db.service") {
		t.Errorf("the run %q is not systemd's", run)
	}
	if err := systemd.Release(run); err != nil {
		t.Fatal(err)
	}
	db.until(t, "inactive")
	for range 2 {
		if err := systemd.Forget(run); err != nil {
			t.Error(err)
		}
	}
	if left, err := filepath.Glob("/run/fairlead/released/*"); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// testHookRemoved removes the hook, and then one that is not there.
func testHookRemoved(t *testing.T) {
	t.Helper()
	removed, err := systemd.RemoveHook(t.Context(), "db.service")
	if err != nil || !removed {
		t.Errorf("RemoveHook = %v, %v", removed, err)
	}
	if _, err := os.Stat(filepath.Dir(systemd.HookPath("db.service"))); !os.IsNotExist(err) {
		t.Errorf("its directory is left: %v", err)
	}
	if removed, err := systemd.RemoveHook(t.Context(), "db.service"); err != nil || removed {
		t.Errorf("RemoveHook of nothing = %v, %v", removed, err)
	}
}

// testHooksGo shows that RemoveHooks removes every hook, and no file of another program.
func testHooksGo(t *testing.T) {
	t.Helper()
	foreign := systemd.HookPath("other.service")
	if err := os.MkdirAll(filepath.Dir(foreign), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(foreign, []byte("[Service]\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := systemd.InstallHook(t.Context(), "db.service", time.Second); err != nil {
		t.Fatal(err)
	}
	if err := systemd.Release("left"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := systemd.RemoveHooks(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]bool{foreign: true, systemd.HookPath("db.service"): false, "/run/fairlead/released": false} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s: %v, want it there: %v", path, err, want)
		}
	}
}
