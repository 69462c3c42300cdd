// Package ipvs runs the whole proxy in mode ipvs as its users do: fairlead server
// and fairlead proxy are processes, inside a kernel that has IPVS.
package ipvs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

func TestMain(m *testing.M) {
	uml.Main(m, func(dir string) error { return process.Put("fairlead", dir) }, putKubeProxy)
}

// putKubeProxy puts kube-proxy into dir if 'make kube-proxy' has built it.
func putKubeProxy(dir string) error {
	text, err := os.ReadFile("../../bench/bin/kube-proxy")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "kube-proxy"), text, 0o755) //nolint:gosec // a program
}

// program is the binary, inside the guest.
const program = uml.Shared + "/fairlead"

// newServer prepares a server on a host. The guest has one processor, slowed by ptrace: the definitions of the
// Gateway API, which no test here uses, would keep it busy for a minute.
func newServer(on *testbed.Host, dir string, flags ...string) *process.Server {
	return process.NewServer(on, program, dir, append(flags, "--gateway-api", "off")...)
}

// slowStart is how long a start of fairlead takes in a guest in which the parts of a cluster miss their deadlines: all of them
// share one processor, and a Lease is lost after three seconds.
const slowStart = 1500 * time.Millisecond

// needsSpeed skips a test of a whole cluster in a guest that is too slow for one. Each page fault of a guest is some switches
// between processes, which cost ten times as much on a virtual machine without nested paging as on others. 'make guest-test' skips none.
func needsSpeed(t *testing.T) {
	t.Helper()
	if os.Getenv("FAIRLEAD_SLOW_GUESTS") != "" {
		return
	}
	fastest := time.Hour
	for range 3 {
		began := time.Now()
		process.Output(t, exec.Command(program, "version"))
		fastest = min(fastest, time.Since(began))
	}
	if fastest > slowStart {
		t.Skipf("needs a machine with nested paging or none to virtualise: 'fairlead version' takes %s in User Mode Linux here, "+
			"and %s is the most for a cluster in it; 'make guest-test' runs it in any case", fastest.Round(10*time.Millisecond), slowStart)
	}
}

// cluster is a node with its own API server.
type cluster struct {
	t       *testing.T
	dir     string
	network *testbed.Network
	node    *testbed.Host
	server  *process.Server
}

// newCluster makes the node, and starts nothing.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	network := testbed.NewNetwork(t)
	c := &cluster{t: t, dir: t.TempDir(), network: network, node: network.Host("node")}
	c.server = newServer(c.node, c.path("server"), "--controllers", "none")
	return c
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

// command is fairlead on the node.
func (c *cluster) command(args ...string) *exec.Cmd {
	cmd := c.node.Command(context.Background(), program, args...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir)
	return cmd
}

// proxy is a proxy on the node in mode ipvs.
func (c *cluster) proxy(more ...string) *exec.Cmd { return c.command(c.proxyArgs(more...)...) }

func (c *cluster) proxyArgs(more ...string) []string {
	return append([]string{"proxy", "--mode", "ipvs", "--kubeconfig", c.server.Kubeconfig, "--node-name", "node",
		"--iptables-variant", "legacy", "--service-cluster-ip-range", "10.96.0.0/16"}, more...)
}

// fails runs fairlead, which must end with an exit code and, in the line in
// which it tells why, these words.
func fails(t *testing.T, cmd *exec.Cmd, code int, words ...string) {
	t.Helper()
	stdout, stderr, got := process.Result(t, cmd)
	_, line, _ := strings.Cut("\n"+stderr, "\nfairlead: ")
	line, _, _ = strings.Cut(line, "\n")
	for _, w := range words {
		if got != code || !strings.Contains(line, w) {
			t.Errorf("%q ended with exit code %d, want %d and %q; it printed\n%s%s", cmd.Args, got, code, w, stdout, stderr)
		}
	}
}

// on runs a command on the node that must succeed.
func (c *cluster) on(args ...string) string {
	c.t.Helper()
	return process.Output(c.t, c.node.Command(c.t.Context(), args[0], args[1:]...))
}

// inKernel is all that mode ipvs could write, as text: virtual servers, sets,
// addresses, rules.
func (c *cluster) inKernel() string {
	c.t.Helper()
	var b strings.Builder
	c.node.Do(func() { readKernel(c.t, &b) })
	for _, program := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		for line := range strings.Lines(c.on(program)) {
			if strings.HasPrefix(line, "-A") || strings.Contains(line, "FAIRLEAD") {
				b.WriteString(strings.TrimSpace(line) + "\n")
			}
		}
	}
	fmt.Fprint(&b, c.on("ip", "-oneline", "address"))
	return b.String()
}
