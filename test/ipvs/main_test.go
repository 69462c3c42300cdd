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
	c.server = process.NewServer(c.node, program, c.path("server"), "--controllers", "none")
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
