package nodelocal_test

import (
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dns/nodelocal"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// Install may be repeated, is found whole until another program removes a part,
// and leaves nothing behind; what others made stays. test/node sends packets.
func TestInstallAndRemove(t *testing.T) {
	run(t, "nft", "add", "table", "inet", "other")
	run(t, "ip", "route", "replace", "local", "10.1.2.3", "dev", "lo")
	c := nodelocal.Config{
		Addrs:  []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd00:10:96::a")},
		Port:   53,
		Others: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:10053"), netip.MustParseAddrPort("192.0.2.2:10053")},
	}
	whole := func() bool {
		t.Helper()
		ok, err := nodelocal.Intact(c)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	if whole() {
		t.Fatal("it is there before it was installed")
	}
	for _, damage := range [][]string{nil, {"nft", "flush", "ruleset"}, {"ip", "route", "del", "local", "10.96.0.10"}, nil} {
		if damage != nil {
			run(t, damage[0], damage[1:]...)
			if whole() {
				t.Errorf("after %v it is still whole", damage)
			}
		}
		if err := nodelocal.Install(c); err != nil {
			t.Fatal(err)
		}
		if !whole() {
			t.Error("installed, but not there")
		}
	}
	// Installed again, its server is alive at once, and not only when it speaks. A
	// busy machine may look too late, but not each time.
	alive := ""
	for range 10 {
		if err := nodelocal.Install(c); err != nil {
			t.Fatal(err)
		}
		alive = run(t, "nft", "list", "set", "inet", "fairlead-dns", "alive")
		if strings.Contains(alive, "ipv4 timeout 2s") && strings.Contains(alive, "ipv6 timeout 2s") {
			break
		}
	}
	if !strings.Contains(alive, "ipv4 timeout 2s") || !strings.Contains(alive, "ipv6 timeout 2s") {
		t.Errorf("no family is alive:\n%s", alive)
	}
	rules := run(t, "nft", "list", "table", "inet", "fairlead-dns")
	for _, want := range []string{"socket transparent 0 notrack", "@alive", "dnat ip to 192.0.2.1:10053", "dnat ip to 192.0.2.2:10053"} {
		if !strings.Contains(rules, want) {
			t.Errorf("no %q in\n%s", want, rules)
		}
	}
	conn, err := net.Dial("udp", "10.96.0.10:53")
	if err != nil {
		t.Errorf("the address is not this machine's: %v", err)
	} else {
		conn.Close()
	}
	// It yields: the server's answers can still be sent, and nothing else concerns it.
	if err := nodelocal.Yield(c); err != nil {
		t.Fatal(err)
	}
	rules = run(t, "nft", "list", "table", "inet", "fairlead-dns")
	if !strings.Contains(rules, "saddr 10.96.0.10") || strings.Contains(rules, "daddr") || strings.Contains(rules, "dnat") {
		t.Errorf("when it has yielded:\n%s", rules)
	}
	if routes := run(t, "ip", "route", "show", "table", "local"); !strings.Contains(routes, "10.96.0.10") {
		t.Errorf("when it has yielded, the routes are\n%s", routes)
	}
	run(t, "nft", "add", "table", "inet", "other")
	for range 2 {
		if err := nodelocal.Remove(); err != nil {
			t.Fatal(err)
		}
	}
	if err := nodelocal.Probe(); err != nil {
		t.Error(err)
	}
	if left := run(t, "nft", "list", "ruleset"); strings.TrimSpace(left) != "table inet other {\n}" {
		t.Errorf("left in nft:\n%s", left)
	}
	left := run(t, "ip", "route", "show", "table", "local") + run(t, "ip", "-6", "route", "show", "table", "local")
	if strings.Contains(left, "10.96.0.10") || strings.Contains(left, "fd00:10:96::a") || !strings.Contains(left, "10.1.2.3") {
		t.Errorf("local routes:\n%s", left)
	}
}
