package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/parts"
)

// A user who is not root cannot change the machine's network, but can have a
// user, network and mount namespace of which it is root. 'fairlead up' then
// runs in such a one, with this environment variable set.
const insideEnv = "FAIRLEAD_UP_INSIDE"

// apiFD is the file descriptor of the listener that the process outside passes
// in, so that kubectl reaches the API from outside of the namespace as well.
const apiFD = 3

// ownDevice has the node's addresses in its own namespace.
const ownDevice = "node0"

func ownAddrs() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("10.243.0.1"), netip.MustParseAddr("fd00:10:243::1")}
}

func inside() bool { return os.Getenv(insideEnv) != "" }

// enterNamespace runs this command again in new namespaces and waits for its end.
// It returns an exit code other than 0 as an ExitCodeError.
func enterNamespace(ctx context.Context, std base.Streams, args []string, bind netip.AddrPort) error {
	if err := userNamespaces(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	listener, err := parts.Listen(bind, "--secure-port")
	if err != nil {
		return err
	}
	file, err := listener.File()
	if err != nil {
		return err
	}
	listener.Close()
	defer file.Close()

	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = std.In, std.Out, std.Err
	cmd.ExtraFiles = []*os.File{file}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Pdeathsig:   syscall.SIGTERM,
		Setpgid:     true, // the terminal's interrupt comes through us, once
	}
	// Pdeathsig follows the thread that started the child, not the process.
	done := make(chan error, 1)
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			done <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("cannot create a user and network namespace: %w; run it as root, or allow unprivileged user namespaces", err)
	}
	return supervise(ctx, cmd, done)
}

// supervise sends SIGTERM when ctx ends, and SIGKILL after a second interrupt.
func supervise(ctx context.Context, cmd *exec.Cmd, done <-chan error) error {
	select {
	case err := <-done:
		return childError(err)
	case <-ctx.Done():
	}
	again := make(chan os.Signal, 1)
	signal.Notify(again, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(again)
	_ = cmd.Process.Signal(syscall.SIGTERM) // fails only if it has ended, which done receives
	select {
	case err := <-done:
		return childError(err)
	case <-again:
	case <-time.After(upStopTimeout):
	}
	_ = cmd.Process.Kill()
	return fmt.Errorf("it did not stop cleanly and was killed: %w", <-done)
}

// upStopTimeout bounds a clean stop of everything, Pods included.
const upStopTimeout = 90 * time.Second

func childError(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 {
		return base.ExitCodeError(exit.ExitCode())
	}
	return err
}

// userNamespaces returns why an ordinary user cannot create namespaces.
func userNamespaces() error {
	for file, off := range map[string]string{
		"/proc/sys/kernel/unprivileged_userns_clone":             "0",
		"/proc/sys/user/max_user_namespaces":                     "0",
		"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
	} {
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && strings.TrimSpace(string(text)) == off {
			name := strings.ReplaceAll(strings.TrimPrefix(file, "/proc/sys/"), "/", ".")
			return fmt.Errorf("this machine does not let ordinary users create namespaces (%s is %s): run it as root, or have root change that",
				name, off)
		}
	}
	return nil
}

// writeResolvConf writes a resolver configuration that asks the cluster's DNS.
func writeResolvConf(dir string, servers []netip.Addr, domain string) (string, error) {
	var b strings.Builder
	for _, s := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	fmt.Fprintf(&b, "search default.svc.%[1]s svc.%[1]s %[1]s\noptions ndots:5\n", domain)
	file := filepath.Join(dir, "resolv.conf")
	return file, os.WriteFile(file, []byte(b.String()), 0o644)
}
