package systemd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// HookPath is the file of the hook of a service, an addition to its unit. It is read after
// override.conf, which 'systemctl edit' makes and which may reset ExecStop=.
func HookPath(unit string) string {
	return filepath.Join("/etc/systemd/system", unit+".d", "zzz-fairlead.conf")
}

// hookHeader begins a hook.
const hookHeader = "# Written by 'fairlead register --install-hook'"

// oldHookPath is what HookPath was in earlier builds.
func oldHookPath(unit string) string {
	return filepath.Join(filepath.Dir(HookPath(unit)), "50-fairlead.conf")
}

// HookWait is how long a hook waits at most.
const HookWait = time.Second

// released has a file for each unit that need not wait any more. Services of any user see
// it, and only root writes there.
const released = "/run/fairlead/released"

// releasedPath is the file of a unit's run. The hook's shell expands it with
// $INVOCATION_ID; without one there is no such file.
func releasedPath(invocation string) string { return filepath.Join(released, "unit-"+invocation) }

// Release ends the wait of the hook in a run of a unit, State.Stopping.
func Release(invocation string) error {
	if err := os.MkdirAll(released, 0o755); err != nil {
		return err
	}
	return fileio.Replace(releasedPath(invocation), nil, 0o444)
}

// Forget removes what Release has written.
func Forget(invocation string) error {
	if err := os.Remove(releasedPath(invocation)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// InstallHook makes systemd wait before it stops the process of a service, until Release and
// for wait at most. While it waits the unit is deactivating, and nodes send no new connections
// there. It does not wait for a process that has ended by itself. The unit's own commands
// follow.
func InstallHook(ctx context.Context, unit string, wait time.Duration) error {
	if !strings.HasSuffix(unit, ".service") {
		return fmt.Errorf("%s is not a service, so systemd stops no process of it", unit)
	}
	conn, err := connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	own, err := stopCommands(ctx, conn, unit)
	if err != nil {
		return err
	}
	var b strings.Builder
	b.WriteString(hookHeader + ", removed by 'fairlead deregister'.\n[Service]\nExecStop=\n")
	fmt.Fprintf(&b, "ExecStop=-/bin/sh -c 'test -z \"$$MAINPID\" || exec timeout %s sh -c \"until test -e %s; do sleep 0.02; done\"'\n",
		strconv.FormatFloat(wait.Seconds(), 'f', -1, 64), releasedPath("$$INVOCATION_ID"))
	for _, c := range own {
		b.WriteString(c + "\n")
	}
	path := HookPath(unit)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := fileio.Replace(path, []byte(b.String()), 0o644); err != nil {
		return err
	}
	if err := os.Remove(oldHookPath(unit)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return reload(ctx, conn)
}

// RemoveHook removes what InstallHook has written, and reports whether there was anything.
// Where systemd cannot be reached the file stays, for another attempt.
func RemoveHook(ctx context.Context, unit string) (removed bool, err error) {
	there := false
	for _, path := range []string{HookPath(unit), oldHookPath(unit)} {
		_, err := os.Lstat(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
		there = there || err == nil
	}
	if !there {
		return false, nil
	}
	conn, err := connect(ctx)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	for _, path := range []string{HookPath(unit), oldHookPath(unit)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
	}
	_ = os.Remove(filepath.Dir(HookPath(unit))) // if nothing else is there
	return true, reload(ctx, conn)
}

func reload(ctx context.Context, conn *dbus.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := conn.Object(destination, managerPath).CallWithContext(ctx, manager+".Reload", 0).Err; err != nil {
		return fmt.Errorf("reload the units of systemd: %w", err)
	}
	return nil
}

// stopCommands returns the lines ExecStop= of a unit and its additions, without the hook's,
// as they are written there.
func stopCommands(ctx context.Context, conn *dbus.Conn, unit string) (out []string, err error) {
	w := watch{unit: unit}
	s, err := w.read(ctx, conn)
	if err == nil {
		err = s.Err
	}
	if err == nil && s.Missing {
		err = fmt.Errorf("systemd knows no unit %s", unit)
	}
	if err != nil {
		return nil, err
	}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var all map[string]dbus.Variant
	if err := conn.Object(destination, w.path).CallWithContext(call, properties+".GetAll", 0, unitInterface).Store(&all); err != nil {
		return nil, fmt.Errorf("ask systemd for the files of %s: %w", unit, err)
	}
	main, _ := all["FragmentPath"].Value().(string)
	more, _ := all["DropInPaths"].Value().([]string)
	for _, path := range append([]string{main}, more...) {
		if path == "" || path == HookPath(unit) || path == oldHookPath(unit) {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		out = addStopCommands(out, string(text))
	}
	return out, nil
}

// addStopCommands adds the settings ExecStop= of a unit's file, with the lines that
// continue them (systemd.syntax(7)); an empty one resets those before.
func addStopCommands(list []string, text string) []string {
	inside, section := false, ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		trimmed := strings.TrimSpace(line)
		comment := strings.HasPrefix(trimmed, "#") || strings.HasPrefix(trimmed, ";")
		switch key, value, ok := strings.Cut(trimmed, "="); {
		case inside:
			list[len(list)-1] += "\n" + line
			inside = comment || strings.HasSuffix(line, `\`)
		case comment:
		case strings.HasPrefix(trimmed, "["):
			section = trimmed
		case section != "[Service]" || !ok || strings.TrimSpace(key) != "ExecStop":
		case strings.TrimSpace(value) == "":
			list = nil
		default:
			list = append(list, trimmed)
			inside = strings.HasSuffix(line, `\`)
		}
	}
	return list
}

// RemoveHooks removes the hooks of all services of this machine, and what Release has left.
func RemoveHooks(ctx context.Context) error {
	const anyUnit = "*.service"
	for _, pattern := range []string{HookPath(anyUnit), oldHookPath(anyUnit)} {
		hooks, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, path := range hooks {
			text, err := os.ReadFile(path)
			if err != nil || !strings.HasPrefix(string(text), hookHeader) {
				continue // another program's
			}
			if _, err := RemoveHook(ctx, strings.TrimSuffix(filepath.Base(filepath.Dir(path)), ".d")); err != nil {
				return fmt.Errorf("remove %s: %w", path, err)
			}
		}
	}
	return os.RemoveAll(released)
}
