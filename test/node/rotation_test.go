package node

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The authority is replaced under two agents with Pods and traffic, with a kill -9 of the server between the steps: no
// request fails, no agent and no Pod starts again, and nothing of the old authority is left. A node that was off for all of it
// says what to do.
func TestAuthorityIsReplaced(t *testing.T) {
	t.Parallel()
	network := testbed.NewNetwork(t)
	c := &cluster{t: t, dir: t.TempDir(), network: network, server: network.Outside("server"), node: network.Outside("node")}
	other, off := network.Outside("other"), network.Outside("off")
	c.api = process.NewServer(c.server, process.Program("fairlead"), c.path("server"),
		"--bind-address", "127.0.0.1,"+c.server.Addr4().String(), "--cluster-signing-duration", "100s")
	c.api.Start(t)
	c.api.AwaitReady(t)
	for _, host := range []*testbed.Host{c.node, other, off} {
		host.Sysctl("net/ipv4/ip_forward", "1")
	}
	c.cleansUp(c.node, "agent")
	c.cleansUp(other, "other")
	c.cleansUp(off, "off")
	c.startAgent()
	second, third := c.agentOn(other, "other"), c.agentOn(off, "off")
	third.Says("is up")
	c.nodesReady(3)
	third.Stop()
	c.kubectl("delete", "node", "off")
	at := c.backends()
	pods, before := c.started(), c.text("server/pki/ca.crt")

	stop := make(chan struct{})
	var failed []string
	var traffic sync.WaitGroup
	traffic.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			if err := c.ask(at); err != nil {
				failed = append(failed, fmt.Sprintf("%s: %v", time.Now().Format(time.TimeOnly), err))
			}
		}
	})
	rotate := func(flags ...string) (string, error) {
		return process.Try(c.fairlead(c.server, append([]string{"certs", "rotate-ca", "--data-dir", c.path("server")}, flags...)...))
	}
	restart := func() {
		c.api.Kill()
		c.api.Start(t)
		c.api.AwaitReady(t)
	}
	if out, err := rotate(); err != nil {
		t.Fatal(out, err)
	}
	restart()
	testbed.Until(t, "the new authority signs", func() error {
		out, err := rotate("--status")
		if err == nil && !strings.Contains(out, "the new authority signs") {
			err = errors.New(out)
		}
		return err
	})
	restart()
	testbed.Until(t, "the old authority to be out of use", func() error {
		out, err := rotate("--finish")
		if err != nil {
			return fmt.Errorf("%s %w", out, err)
		}
		return nil
	})
	testbed.Until(t, "both nodes trust the new authority alone", func() error {
		for _, file := range []string{"server/pki/ca.crt", "agent/node-pki/ca.crt", "other/node-pki/ca.crt"} {
			if text := c.text(file); strings.Count(text, "BEGIN") != 1 || text == before {
				return errors.New(file)
			}
		}
		return nil
	})

	c.nodesReady(2)
	if out := c.kubectl("exec", strings.Fields(pods)[0], "--", "hostname"); out != strings.Fields(pods)[0] {
		t.Errorf("exec printed %q", out)
	}
	process.Output(t, c.on(c.server, "openssl", "s_client", "-connect", "127.0.0.1:6443", "-CAfile", c.path("server/pki/ca.crt"),
		"-verify_return_error", "-brief"))
	close(stop)
	traffic.Wait()
	if len(failed) > 0 {
		t.Errorf("%d requests failed:\n%s", len(failed), strings.Join(failed, "\n"))
	}
	if now := c.started(); now != pods {
		t.Errorf("Pods have started again:\n%s\nbefore:\n%s", now, pods)
	}
	for name, log := range map[string]string{"agent": c.agent.Log(), "other agent": second.Log()} {
		if strings.Contains(log, "Unauthorized") {
			t.Errorf("the %s had requests rejected:\n%s", name, log)
		}
	}
	args := c.agentArgs(off, "off")
	i := slices.Index(args, "--token")
	out, err := process.Try(c.fairlead(off, slices.Delete(slices.Clone(args), i, i+2)...))
	if err == nil || !strings.Contains(out, "join again") {
		t.Errorf("a node that was off: %v, %s", err, out)
	}
	c.agentOn(off, "off").Says("is up") // with a new token
}

// text is the content of a file of the cluster's directory, empty if there is none at the moment.
func (c *cluster) text(name string) string {
	text, _ := os.ReadFile(c.path(name))
	return string(text)
}
