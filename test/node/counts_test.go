package node

import (
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// refusalsAreCounted goes through the modes that the machine's kernel supports:
// the metrics of the real process have how many packets to a Service were
// rejected, and after a change of mode they start from zero.
func (c *cluster) refusalsAreCounted() {
	c.t.Helper()
	c.kubectl("create", "service", "clusterip", "empty", "--tcp=80:8080")
	ip := netip.MustParseAddr(c.kubectl("get", "service", "empty", "-o", "jsonpath={.spec.clusterIP}"))
	const name = `fairlead_service_refused_packets_total{namespace="default",port="80-8080",protocol="TCP",service="empty"}`
	ask := func() error {
		_, err := c.node.Ask(c.t.Context(), svc.TCP, netip.AddrPortFrom(ip, 80))
		if testbed.Refused(err) {
			return nil
		}
		return fmt.Errorf("asked a Service without endpoints: %v, want a refusal", err)
	}
	for i, mode := range []string{"nft", "userspace", "nft", "iptables"} {
		if i > 0 {
			c.agent.Stop()
			c.agentFlags = []string{"--mode", mode}
			c.startAgent()
			c.agentUp()
		}
		// What the mode before left may answer first; when this one has counted,
		// it counts all.
		asked, before := 0, 0.0
		testbed.Until(c.t, "a count in mode "+mode, func() error {
			asked++
			err := ask()
			if before = c.metrics()[name]; err == nil && before == 0 {
				err = fmt.Errorf("nothing is counted")
			}
			return err
		})
		if before > float64(asked) {
			c.t.Errorf("mode %s has counted %g of %d packets", mode, before, asked)
		}
		for range 3 {
			if err := ask(); err != nil {
				c.t.Error(err)
			}
		}
		if after := c.metrics()[name]; after != before+3 {
			c.t.Errorf("mode %s: %s went from %g to %g, want 3 more", mode, name, before, after)
		}
	}
}
