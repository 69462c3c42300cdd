package uml

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// Shared is where the guest has a directory of the machine's that is only
	// its own, see Main.
	Shared = "/tmp/fairlead-uml"
	// modprobe is what the guest's kernel runs when it lacks something.
	modprobe = "/tmp/modprobe"
)

// guest is the first process of the guest: it prepares the machine, runs the
// tests, writes their exit code and switches the machine off. It does not
// return.
func guest() {
	code, err := work()
	if err != nil {
		fmt.Println("uml:", err)
	} else if err := os.WriteFile(filepath.Join(Shared, exitFile), []byte(strconv.Itoa(code)), 0o600); err != nil {
		fmt.Println("uml:", err)
	}
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Println("uml: switch off:", err)
	}
	select {}
}

func work() (int, error) {
	if err := settle(); err != nil {
		return 0, err
	}
	text, err := os.ReadFile(filepath.Join(Shared, jobFile))
	if err != nil {
		return 0, err
	}
	var j job
	if err := json.Unmarshal(text, &j); err != nil {
		return 0, err
	}
	// The root file system cannot be written; golden files can. A checkout in /tmp
	// is hidden by the guest's own.
	if err := os.MkdirAll(j.Dir, 0o700); err != nil {
		return 0, err
	}
	if err := unix.Mount("none", j.Dir, "hostfs", 0, j.Dir); err != nil {
		return 0, fmt.Errorf("mount %s: %w", j.Dir, err)
	}
	out, err := os.OpenFile(filepath.Join(Shared, outputFile), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return 0, err
	}
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe", j.Args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = j.Dir, out, out
	cmd.Env = append(j.Env, testEnv+"=1", "TMPDIR=/tmp", "PATH="+os.Getenv("PATH"))
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() >= 0 {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// settle makes the guest a machine that programs can live in.
func settle() error {
	dir := os.Getenv(dirEnv)
	for _, m := range []struct{ kind, at, data string }{
		{"proc", "/proc", ""}, {"sysfs", "/sys", ""}, {"tmpfs", "/tmp", "mode=1777"}, {"tmpfs", "/run", "mode=755"},
	} {
		if err := unix.Mount(m.kind, m.at, m.kind, 0, m.data); err != nil {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	if err := os.Mkdir(Shared, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("none", Shared, "hostfs", 0, dir); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	if err := os.Setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"); err != nil {
		return err
	}
	path, err := exec.LookPath("modprobe")
	if err != nil {
		return fmt.Errorf("%w: install kmod with test/setup.sh", err)
	}
	script := fmt.Sprintf("#!/bin/sh\nexec %s -d %s \"$@\"\n", path, Shared)
	if err := os.WriteFile(modprobe, []byte(script), 0o700); err != nil { //nolint:gosec // it is to be run
		return err
	}
	if err := os.WriteFile("/proc/sys/kernel/modprobe", []byte(modprobe), 0); err != nil {
		return err
	}
	// Packets between ports of a bridge meet netfilter, as where containers are.
	if out, err := exec.CommandContext(context.Background(), modprobe, "-a", "br_netfilter", "nf_conntrack").CombinedOutput(); err != nil {
		return fmt.Errorf("load modules: %w: %s", err, out)
	}
	// A machine with little memory tracks so few connections that tests of load
	// fill the table.
	if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_max", []byte("262144"), 0); err != nil {
		return err
	}
	// IPv6 is a module, too, and has to be there before the first namespace, unless a
	// parameter turns it off.
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Close(fd)
	} else if line, _ := os.ReadFile("/proc/cmdline"); strings.Contains(string(line), "ipv6.disable=1") {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("load IPv6: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}
