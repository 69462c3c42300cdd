package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// withEtc runs a command on a host with its own directory as /etc.
func (c *cluster) withEtc(on *testbed.Host, etc, program string, args ...string) *exec.Cmd {
	script := []string{"-m", "sh", "-c", `mount --bind "$0" /etc && exec "$@"`, etc, program}
	return c.on(on, "unshare", append(script, args...)...)
}

// Programs of a node resolve names of the cluster and others by --configure-resolver,
// and the original comes back: at the end, by a start after a crash, by cleanup. The
// server's own upstreams are those of the original.
func TestConfigureResolver(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.agent.Stop()
	upstream := world(t, c.network.Outside("world"))
	etc, resolv := c.path("etc"), c.path("etc/resolv.conf")
	process.Output(t, exec.Command("cp", "-a", "/etc", etc))
	original := "# of this machine\nsearch example.com\nnameserver " + upstream.Addr().String() + "\n"
	for file, text := range map[string]string{resolv: original, c.path("etc/nsswitch.conf"): "hosts: files dns\n"} {
		if err := errors.Join(os.RemoveAll(file), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	start := func() *process.Process {
		t.Helper()
		p := process.Start(t, c.withEtc(c.node, etc, process.Program("fairlead"), c.agentArgs(c.node, "agent", "--configure-resolver")...))
		p.Says("is up")
		return p
	}
	restored := func(after string) {
		t.Helper()
		if got := mustRead(t, resolv); got != original {
			t.Errorf("after %s:\n%s", after, got)
		}
		if _, err := os.Stat(resolv + ".before-fairlead"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after %s the copy is left: %v", after, err)
		}
	}
	agent := start()
	service := c.backends().Addr().String()
	const name = "my-service.default.svc.cluster.local"
	says := func(want string, command ...string) {
		t.Helper()
		testbed.Until(t, fmt.Sprint(command), func() error {
			out, err := process.Try(c.withEtc(c.node, etc, command[0], command[1:]...))
			if err == nil && !strings.Contains(out, want) {
				err = fmt.Errorf("printed %q, want %q", out, want)
			}
			return err
		})
	}
	works := func() {
		t.Helper()
		says(service, "dig", "+short", name)
		says(service, "getent", "ahostsv4", name)
		says("myapp-", "curl", "-sS", "--max-time", "10", "http://"+name+"/")
		says("203.0.113.7", "getent", "ahostsv4", "www.example.com")
		says("203.0.113.7", "dig", "+short", "+time=2", "@"+clusterDNS, "www.example.com") // by this server alone
		says("NXDOMAIN", "dig", "+time=2", "@"+clusterDNS, "none.example.com")
	}
	works()
	agent.Stop()
	restored("the end")

	agent = start()
	agent.Kill()
	if got := mustRead(t, resolv); !strings.Contains(got, clusterDNS) {
		t.Errorf("a killed agent restored\n%s", got)
	}
	agent = start()
	works()
	agent.Kill()
	process.Output(t, c.withEtc(c.node, etc, process.Program("fairlead"), "cleanup", "--data-dir", c.path("agent")))
	restored("cleanup")

	// The same without an agent.
	kubeconfig := c.path("remote.kubeconfig")
	remote := strings.ReplaceAll(mustRead(t, c.path("server/admin.kubeconfig")), "127.0.0.1", c.server.Addr4().String())
	if err := os.WriteFile(kubeconfig, []byte(remote), 0o600); err != nil {
		t.Fatal(err)
	}
	alone := process.Start(t, c.withEtc(c.node, etc, process.Program("fairlead"), "dns", "--kubeconfig", kubeconfig,
		"--node-local", clusterDNS, "--configure-resolver"))
	says(service, "getent", "ahostsv4", name)
	alone.Stop()
	restored("the end of dns")

	// Laid over the file, as a container runtime does.
	args := append([]string{"-c", `mount --bind "$0" "$0" && exec "$@"`, "/etc/resolv.conf", process.Program("fairlead")},
		c.agentArgs(c.node, "agent", "--configure-resolver")...)
	out, err := process.Try(c.withEtc(c.node, etc, "sh", args...))
	if err == nil || !strings.Contains(out, "/etc/resolv.conf is a mount point") || strings.Count(out, "\n") > 0 {
		t.Errorf("on a mounted file: %v, %q", err, out)
	}

	const target = "../run/systemd/resolve/stub-resolv.conf"
	if err := errors.Join(os.Remove(resolv), os.Symlink(target, resolv)); err != nil {
		t.Fatal(err)
	}
	out, err = process.Try(c.withEtc(c.node, etc, process.Program("fairlead"), c.agentArgs(c.node, "agent", "--configure-resolver")...))
	if err == nil || !strings.Contains(out, "belongs to systemd-resolved") || strings.Count(out, "\n") > 0 {
		t.Errorf("beside systemd-resolved: %v, %q", err, out)
	}
	if now, err := os.Readlink(resolv); err != nil || now != target {
		t.Errorf("the link leads to %q, %v", now, err)
	}
}
