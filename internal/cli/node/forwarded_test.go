package node

import (
	"bytes"
	"log/slog"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// Forwarding that another program has switched off is switched on again, and a chain that drops everything is reported.
func TestForwarded(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		sh := func(script string) {
			if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", script, err, out)
			}
		}
		var log bytes.Buffer
		f := newForwarded(slog.New(slog.NewTextHandler(&log, nil)), []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")})
		again := func() corev1.NodeCondition {
			f.at = f.at.Add(-2 * maxRest)
			return f.condition()
		}
		if c := again(); c.Status != corev1.ConditionTrue || !link.Forwards() {
			t.Errorf("at first: %+v", c)
		}
		sh("sysctl -qw net.ipv4.ip_forward=0")
		if c := again(); c.Status != corev1.ConditionTrue || !link.Forwards() || !strings.Contains(log.String(), "it is on again") {
			t.Errorf("switched off by another program: %+v, log %q", c, log.String())
		}
		sh("iptables-nft -P FORWARD DROP")
		c := again()
		if c.Status != corev1.ConditionFalse || c.Reason != "PolicyDrop" || !strings.Contains(c.Message, "chain FORWARD of table ip filter") ||
			!strings.Contains(log.String(), "packets of Pods are dropped") {
			t.Errorf("a policy that drops: %+v, log %q", c, log.String())
		}
		sh("iptables-nft -P FORWARD ACCEPT")
		if c := again(); c.Status != corev1.ConditionTrue {
			t.Errorf("repaired: %+v", c)
		}
		sh("nft 'add table ip other; " +
			"add chain ip other out { type filter hook output priority 0; }; add rule ip other out ip daddr 10.96.0.10 drop'")
		if c := again(); c.Status != corev1.ConditionFalse || c.Reason != "RuleDrop" ||
			!strings.Contains(c.Message, "chain out of table ip other drops packets to 10.96.0.10/32") {
			t.Errorf("a rule that drops: %+v", c)
		}
	})
}
