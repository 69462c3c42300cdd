package node

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The endpoints of a slice made by hand, of machines without fairlead, follow what two nodes find
// when they check them.
func TestCheckedEndpoints(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	second, outside := c.network.Outside("second"), c.network.Outside("database")
	second.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(second, "second")
	c.agentOn(second, "second")
	c.nodesReady(2)
	start := func() *process.Process { return process.Start(t, c.on(outside, process.Program("backend"))) }
	program := start()
	process.Output(t, c.on(outside, "curl", "-sSf", "--retry", "30", "--retry-connrefused", "--retry-delay", "1",
		"http://127.0.0.1:9376/healthz"))
	c.apply(`
apiVersion: v1
kind: Service
metadata: {name: db}
spec: {ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: db-1
  labels: {kubernetes.io/service-name: db}
  annotations: {fairlead.dev/check: "http://:9376/healthz", fairlead.dev/check-interval: 1s}
addressType: IPv4
ports: [{name: "", port: 9376}]
endpoints: [{addresses: [` + outside.Addr4().String() + `]}]
`)
	at := netip.AddrPortFrom(netip.MustParseAddr(c.kubectl("get", "svc", "db", "-o", "jsonpath={.spec.clusterIP}")), 80)
	answers := func(what string) {
		t.Helper()
		testbed.Until(t, what, func() error { return c.ask(at) })
	}
	answers("an answer")
	for range 2 {
		program.Kill()
		testbed.Until(t, "its endpoint to leave", func() error {
			if out := c.kubectl("get", "endpointslice", "db-1", "-o", "jsonpath={.endpoints[*].conditions.ready}"); out != "false" {
				return fmt.Errorf("ready is %q", out)
			}
			if c.ask(at) == nil {
				return errors.New("it answers")
			}
			return nil
		})
		program = start()
		answers("an answer after its restart")
	}
	out := c.kubectl("get", "events", "--field-selector", "reason=EndpointCheckFailed", "-o", "jsonpath={.items[0].message}")
	if !strings.Contains(out, "check http://:9376/healthz fails, so these get no connections: "+outside.Addr4().String()+" (by ") {
		t.Errorf("the Event is %q", out)
	}
}
