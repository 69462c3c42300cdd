package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// bareProxy starts a proxy whose API server never answers, in mode nft.
func bareProxy(t *testing.T, on *testbed.Host, kubeconfig string) *process.Process {
	t.Helper()
	return process.Start(t, on.Command(context.Background(), process.Program("fairlead"), "proxy", "--mode", "nft",
		"--kubeconfig", kubeconfig, "--node-name", on.Name()))
}

// bareDNS starts a node-local DNS server whose API server never answers.
func bareDNS(t *testing.T, on *testbed.Host, kubeconfig string) *process.Process {
	t.Helper()
	return process.Start(t, on.Command(context.Background(), process.Program("fairlead"), "dns", "--kubeconfig", kubeconfig,
		"--node-local", clusterDNS, "--upstream", "127.0.0.1:9", "--metrics-bind-address", "", "--dns-lameduck", "0s"))
}

// nowhere writes a kubeconfig of a server that does not exist.
func nowhere(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c"}}],
		"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}]}`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// One process at a time writes the rules of the proxy in a network namespace, and one
// those of node-local DNS: a second one waits a while and ends with the reason, or goes
// on once the first has ended, and cleanup changes nothing beside one, whatever its
// data directory.
func TestOneWriterPerNamespace(t *testing.T) {
	t.Parallel()
	t.Run("proxy", func(t *testing.T) {
		t.Parallel()
		oneWriter(t, "proxy", "ip fairlead", bareProxy, bareDNS)
	})
	t.Run("dns", func(t *testing.T) {
		t.Parallel()
		oneWriter(t, "node-local DNS server", "inet fairlead-dns", bareDNS, bareProxy)
	})
}

// oneWriter starts several of what writes rules in a table, and one of what may run beside.
func oneWriter(t *testing.T, what, rules string, start, beside func(*testing.T, *testbed.Host, string) *process.Process) {
	node := testbed.NewNetwork(t).Outside("node")
	kubeconfig := nowhere(t)
	cleanup := func() (stderr string, code int) {
		_, stderr, code = process.Result(t, node.Command(t.Context(), process.Program("fairlead"), "cleanup", "--data-dir", t.TempDir()))
		return stderr, code
	}
	runs := func(except string) (holder string) {
		testbed.Until(t, "another process than "+except+" to have the lock", func() error {
			stderr, code := cleanup()
			if _, found, ok := strings.Cut(stderr, "(process "); ok {
				holder, _, _ = strings.Cut(found, ")")
			}
			if code == 0 || !strings.Contains(stderr, "nothing was removed") || holder == "" || holder == except {
				return fmt.Errorf("cleanup: exit code %d, %s", code, stderr)
			}
			return nil
		})
		return holder
	}
	table := func() bool {
		return strings.Contains(process.Output(t, node.Command(t.Context(), "nft", "list", "tables")), "table "+rules)
	}

	first := start(t, node, kubeconfig)
	holder := runs("")
	process.Output(t, node.Command(t.Context(), "sh", "-c", "nft add table "+rules+"; nft add table inet fairlead-lb; "+
		"ip route add local 192.0.2.99 dev lo proto 251; ip route add local 192.0.2.98 dev lo proto 252"))
	second := start(t, node, kubeconfig)
	second.Says("waiting for another " + what + " to end")
	if runs(""); !table() {
		t.Errorf("cleanup has removed rules beside a %s", what)
	}
	if err := second.Wait(); err == nil || !strings.Contains(second.Log(), "(process "+holder+"): stop it first") {
		t.Errorf("the second %s ended with %v:\n%s", what, err, second.Log())
	}
	third := start(t, node, kubeconfig)
	third.Says("waiting for another " + what + " to end")
	first.Stop()
	runs(holder)
	other := beside(t, node, kubeconfig)
	testbed.Until(t, "two locks", func() error {
		out, err := process.Try(node.Command(t.Context(), "cat", "/proc/net/unix"))
		if err == nil && (!strings.Contains(out, "@fairlead/proxy") || !strings.Contains(out, "@fairlead/dns")) {
			err = errors.New(out)
		}
		return err
	})
	third.Stop()
	runs("") // the other one has a lock, too
	other.Stop()
	if strings.Contains(other.Log(), "waiting") {
		t.Errorf("beside a %s:\n%s", what, other.Log())
	}
	if stderr, code := cleanup(); code != 0 || table() {
		t.Errorf("cleanup after all have ended: exit code %d, %s, the table is there: %v", code, stderr, table())
	}
	// What a speaker has left that was killed.
	left := process.Output(t, node.Command(t.Context(), "sh", "-c", "nft list tables; ip route show table local"))
	if strings.Contains(left, "fairlead-lb") || strings.Contains(left, "192.0.2.9") {
		t.Errorf("cleanup has left:\n%s", left)
	}
}

// A user who may not write rules cannot keep the proxy from them by its lock.
func TestLockOfAnotherUser(t *testing.T) {
	t.Parallel()
	node := testbed.NewNetwork(t).Outside("node")
	node.Do(func() { // on its own thread
		const nobody, same = 65534, ^uintptr(0)
		if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, same, nobody, same); e != 0 {
			t.Skipf("cannot be another user here: %v", e)
		}
		l, err := net.Listen("unix", "@fairlead/proxy")
		_, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, same, 0, same)
		if err != nil || e != 0 {
			t.Errorf("%v, %v", err, e)
			return
		}
		t.Cleanup(func() { _ = l.Close() })
	})
	p := bareProxy(t, node, nowhere(t))
	p.Says("a process of another user holds the name")
	testbed.Until(t, "the proxy to work", func() error {
		_, err := process.Try(node.Command(t.Context(), "curl", "-sS", "--max-time", "5", "http://127.0.0.1:10249/proxyMode"))
		return err
	})
	p.Stop()
}
