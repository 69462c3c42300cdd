package testbed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
)

// namespace is one network namespace, held open by a file.
type namespace struct {
	name string
	file *os.File
	link *netlink.Handle
}

// newNamespace makes an empty namespace with its loopback device up, in which
// IPv6 addresses are usable at once.
func newNamespace(t testing.TB, name string) *namespace {
	t.Helper()
	ns, err := makeNamespace(name)
	if err != nil {
		t.Fatalf("testbed: namespace %s: %v", name, err)
	}
	t.Cleanup(func() {
		ns.link.Close()
		_ = ns.file.Close()
	})
	ns.sysctl(t, "net/ipv6/conf/all/disable_ipv6", "0")
	ns.sysctl(t, "net/ipv6/conf/default/accept_dad", "0")
	ns.sysctl(t, "net/ipv6/conf/default/dad_transmits", "0")
	ns.sysctl(t, "net/ipv6/conf/default/accept_ra", "0")
	// A refusal by ICMP is an answer that tests wait for, however many they ask.
	ns.sysctl(t, "net/ipv4/icmp_ratelimit", "0")
	ns.sysctl(t, "net/ipv6/icmp/ratelimit", "0")
	// Routes are what the test says. A packet that no rule of the node matched
	// goes to the gateway, and without this the node's redirect would send its
	// author there too, for the next five minutes.
	for _, f := range []string{"ipv4", "ipv6"} {
		for _, which := range []string{"all", "default"} {
			ns.sysctl(t, "net/"+f+"/conf/"+which+"/accept_redirects", "0")
		}
	}
	must(t, ns.link.LinkSetUp(ns.mustLink(t, "lo")), "set lo of %s up", name)
	return ns
}

func makeNamespace(name string) (*namespace, error) {
	ns := &namespace{name: name}
	err := netns.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		ns.file = f
		ns.link, err = netlink.NewHandleAt(vnetns.NsHandle(f.Fd()))
		return err
	})
	if err != nil && ns.file != nil {
		_ = ns.file.Close()
	}
	return ns, err
}

// do runs f on the calling goroutine inside the namespace. Goroutines that f
// starts are outside of it again, sockets that f opens are not.
func (ns *namespace) do(f func()) {
	if err := ns.enter(f); err != nil {
		panic("testbed: " + err.Error())
	}
}

// enter is do for what may outlive the test, and with it the namespace.
func (ns *namespace) enter(f func()) error {
	runtime.LockOSThread()
	back, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open the own namespace: %w", err)
	}
	defer func() { _ = back.Close() }()
	if err := unix.Setns(int(ns.file.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter namespace %s: %w", ns.name, err)
	}
	defer func() {
		if err := unix.Setns(int(back.Fd()), unix.CLONE_NEWNET); err != nil {
			return // the thread stays locked and dies with its goroutine
		}
		runtime.UnlockOSThread()
	}()
	f()
	return nil
}

// path is the namespace as a file name that other processes can open.
func (ns *namespace) path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.file.Fd())
}

// command prepares a program that will run inside the namespace.
func (ns *namespace) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + ns.path(), "--", name}, args...)...)
}

func (ns *namespace) sysctl(t testing.TB, key, value string) {
	t.Helper()
	var err error
	ns.do(func() { err = os.WriteFile("/proc/sys/"+key, []byte(value), 0) })
	must(t, err, "%s: set %s", ns.name, strings.ReplaceAll(key, "/", "."))
}

func (ns *namespace) mustLink(t testing.TB, name string) netlink.Link {
	t.Helper()
	l, err := ns.link.LinkByName(name)
	must(t, err, "%s: device %s", ns.name, name)
	return l
}

func must(t testing.TB, err error, format string, args ...any) {
	t.Helper()
	if err != nil {
		t.Fatalf("testbed: "+format+": %v", append(args, err)...)
	}
}
