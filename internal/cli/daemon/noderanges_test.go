package daemon

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/controller"
)

func TestNodeMasks(t *testing.T) {
	for _, c := range []struct {
		args   []string
		v4, v6 int
		err    string
	}{
		{nil, 24, 64, ""},
		{[]string{"--node-cidr-mask-size-ipv4=22", "--node-cidr-mask-size-ipv6=72"}, 22, 72, ""},
		{[]string{"--node-cidr-mask-size-ipv4=8"}, 0, 0, "want /16 to /32"},
		{[]string{"--node-cidr-mask-size-ipv6=128"}, 0, 0, "want /56 to /72"},
	} {
		var m nodeMasks
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		m.add(flags)
		if err := flags.Parse(c.args); err != nil {
			t.Fatal(err)
		}
		var o controller.Options
		err := m.ranges(&o, []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")})
		switch {
		case c.err != "":
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v: %v, want %q", c.args, err, c.err)
			}
		case err != nil || o.NodeMask4 != c.v4 || o.NodeMask6 != c.v6:
			t.Errorf("%v: %v, /%d and /%d", c.args, err, o.NodeMask4, o.NodeMask6)
		}
	}
}
