package parts

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
)

func TestConnectTimeFlags(t *testing.T) {
	for _, c := range []struct {
		flags   connectFlags
		mode    string
		balance dataplane.Balance
		want    string // part of the error
	}{
		{connectFlags{value: "off"}, "ipvs", dataplane.RoundRobin, ""},
		{connectFlags{value: "on"}, "auto", dataplane.Random, ""},
		{connectFlags{value: "on", cgroup: "/sys/fs/cgroup"}, "nft", dataplane.Random, ""},
		{connectFlags{value: "auto"}, "nft", dataplane.Random, "auto is not available"},
		{connectFlags{value: "yes"}, "nft", dataplane.Random, `--connect-time is "yes"`},
		{connectFlags{value: "on"}, "ipvs", dataplane.Random, "in front of mode nft"},
		{connectFlags{value: "on"}, "nft", dataplane.RoundRobin, "--balance roundrobin"},
		{connectFlags{value: "on", cgroup: "here"}, "nft", dataplane.Random, "absolute path"},
		{connectFlags{value: "off", cgroup: "/sys/fs/cgroup"}, "nft", dataplane.Random, "no effect"},
	} {
		err := c.flags.check(c.mode, c.balance)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v, mode %s: %v, want %q", c.flags, c.mode, err, c.want)
		}
	}
}

// With connect-time the proxy starts in no other mode, and 'fairlead check' asks for both.
func TestConnectTimeHasNoFallback(t *testing.T) {
	f := &ProxyFlags{mode: modeAuto, connect: connectFlags{value: "on"}}
	if got := f.candidates(); len(got) != 1 || got[0].name != "nft" {
		t.Errorf("%d modes are tried, want only nft", len(got))
	}
	f.connect.cgroup = t.TempDir()
	err := f.candidates()[0].probe(t.Context(), &modeSetup{flags: f})
	if err == nil {
		t.Error("a folder that is no control group is accepted")
	}
}
