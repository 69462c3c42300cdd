package parts

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// Addresses are kube-proxy's: its default, and without a port its ports.
func TestProxyBindAddresses(t *testing.T) {
	for _, c := range []struct {
		args             []string
		healthz, metrics string
	}{
		{nil, "0.0.0.0:10256", "127.0.0.1:10249"},
		{[]string{"--healthz-bind-address=192.0.2.1", "--metrics-bind-address=::"}, "192.0.2.1:10256", "[::]:10249"},
		{[]string{"--healthz-bind-address=[2001:db8::1]:80", "--metrics-bind-address="}, "[2001:db8::1]:80", ""},
	} {
		var f ProxyFlags
		cmd := &cobra.Command{}
		f.Add(cmd)
		if err := cmd.ParseFlags(c.args); err != nil {
			t.Fatal(err)
		}
		if err := f.Check(base.NetworkFlags{}); err != nil || f.Healthz != c.healthz || f.Metrics != c.metrics {
			t.Errorf("%v: %q and %q, %v, want %q and %q", c.args, f.Healthz, f.Metrics, err, c.healthz, c.metrics)
		}
	}
}

// Direct return is for mode nft: --forwarding says so where another one is named.
func TestForwardingFlag(t *testing.T) {
	for _, c := range []struct {
		args   []string
		direct bool
		fails  string
	}{
		{args: nil},
		{args: []string{"--forwarding=nat", "--mode=ipvs"}},
		{args: []string{"--forwarding=direct"}, direct: true},
		{args: []string{"--forwarding=direct", "--mode=nft"}, direct: true},
		{args: []string{"--forwarding=direct", "--mode=iptables"}, fails: "--mode iptables"},
		{args: []string{"--forwarding=dsr"}, fails: "nat or direct"},
	} {
		var f ProxyFlags
		cmd := &cobra.Command{}
		f.Add(cmd)
		if err := cmd.ParseFlags(c.args); err != nil {
			t.Fatal(err)
		}
		err := f.Check(base.NetworkFlags{})
		if (err == nil) != (c.fails == "") || err != nil && !strings.Contains(err.Error(), c.fails) {
			t.Errorf("%v: %v, want an error %q", c.args, err, c.fails)
		}
		if err == nil && f.allDirect() != c.direct {
			t.Errorf("%v: direct %v, want %v", c.args, f.allDirect(), c.direct)
		}
	}
}
