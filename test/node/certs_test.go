package node

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Certificates of seconds: server, controllers and agents are renewed while they
// run, and everything works after the certificates that they started with, and those
// after them, have ended.
func TestCertificatesEnd(t *testing.T) {
	network := testbed.NewNetwork(t)
	c := &cluster{t: t, dir: t.TempDir(), network: network, server: network.Outside("server"), node: network.Outside("node")}
	c.node.Sysctl("net/ipv4/ip_forward", "1")
	c.api = process.NewServer(c.server, process.Program("fairlead"), c.path("server"),
		"--bind-address", "127.0.0.1,"+c.server.Addr4().String(), "--cluster-signing-duration", "12s")
	c.api.Start(t)
	c.api.AwaitReady(t)
	c.cleansUp(c.node, "agent")
	c.startAgent()
	c.nodesReady(1)
	at := c.backends()

	// From here on every certificate is followed past two renewals, until the first
	// two of each have ended.
	files := []string{
		"server/pki/server.crt", "server/pki/controllers.crt", "server/pki/agent-client.crt", "server/pki/admin.crt", "agent/node-pki/node.crt",
	}
	seen := map[string][]time.Time{}
	testbed.Until(t, "two renewals of each certificate", func() (waiting error) {
		for _, file := range files {
			ends := seen[file]
			if end := c.ends(file); !end.IsZero() && (len(ends) == 0 || end.After(ends[len(ends)-1])) {
				ends = append(ends, end)
			}
			if seen[file] = ends; len(ends) < 3 || time.Now().Before(ends[1]) {
				waiting = fmt.Errorf("%s: the ends are %v", file, ends)
			}
		}
		return waiting
	})

	c.nodesReady(1)
	if got := c.kubectl("get", "--raw", "/readyz/controllers"); got != "ok" {
		t.Errorf("/readyz/controllers: %q", got)
	}
	if err := c.ask(at); err != nil {
		t.Error(err)
	}
	// Controllers, scheduler, agent and proxy act on something new.
	process.Output(t, c.fairlead(c.server, "run", "-d", "-l", "app=MyApp", "-p", "http=9376", "--name", "third",
		"--ready", "http://:9376/healthz", "--", process.Program("backend")))
	testbed.Until(t, "the third endpoint", func() error {
		out := c.kubectl("get", "endpointslices", "-l", "kubernetes.io/service-name=my-service",
			"-o", "jsonpath={.items[*].endpoints[*].conditions.ready}")
		if strings.Count(out, "true") != 3 {
			return errors.New(out)
		}
		return nil
	})
	// The server is a client of the agent.
	pod := strings.Fields(c.started())[0]
	if out := c.kubectl("exec", pod, "--", "hostname"); out != pod {
		t.Errorf("exec printed %q, want %q", out, pod)
	}
	for name, log := range map[string]string{"server": c.api.Log(), "agent": c.agent.Log()} {
		if strings.Contains(log, "Unauthorized") {
			t.Errorf("the %s had requests rejected:\n%s", name, log)
		}
	}
}

// ends returns when a certificate ends, the zero time if there is none at the moment.
func (c *cluster) ends(file string) time.Time {
	text, _ := os.ReadFile(c.path(file))
	block, _ := pem.Decode(text)
	if block == nil {
		return time.Time{}
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		c.t.Fatal(err)
	}
	return leaf.NotAfter
}
