package preflight

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
)

// Rules of other programs that lose packets of Pods and Services are named, whichever program wrote them; others are not. The rules
// are written by nft and iptables, and read back from the kernel.
func TestForeignRules(t *testing.T) {
	var ranges []netip.Prefix
	for _, r := range []string{"10.96.0.0/16", "10.244.0.0/16", "fd00:10:244::/56"} {
		ranges = append(ranges, netip.MustParsePrefix(r))
	}
	chain := "nft 'add table inet x; add chain inet x frw { type filter hook forward priority 0; }; add chain inet x pre " +
		"{ type filter hook prerouting priority -300; }; add chain inet x out { type filter hook output priority 0; }; add chain inet x sub; "
	for _, c := range []struct{ rules, want string }{
		{chain + "add rule inet x frw ip daddr 10.244.1.0/24 drop'", "chain frw of table inet x drops packets to 10.244.1.0/24"},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/17 tcp dport 9376 counter drop'", "drops packets to 10.244.0.0/17 (tcp, dport 9376)"},
		{chain + "add rule inet x frw ip saddr 10.0.0.0/8 reject'", "rejects packets from 10.0.0.0/8"},
		{chain + "add rule inet x frw ip6 daddr fd00:10:244::/64 drop'", "drops packets to fd00:10:244::/64"},
		{chain + "add rule inet x frw ip6 saddr fd00::/16 ct state new drop'", "drops packets from fd00::/16 (ct state)"},
		{chain + "add rule inet x pre ip daddr 10.96.0.10 udp dport {53, 5353} drop'", "drops packets to 10.96.0.10/32"},
		{chain + "add rule inet x out ip daddr 10.96.0.0/16 drop'", "chain out of table inet x drops packets to 10.96.0.0/16"},
		{chain + "add rule inet x frw counter drop'", "chain frw of table inet x drops packets: "},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/16 jump sub; add rule inet x sub tcp dport 80 drop'",
			"chain sub of table inet x drops packets to 10.244.0.0/16 (tcp, dport 80)"},
		{"iptables-nft -A FORWARD -d 10.244.0.0/16 -p tcp --dport 80 -j DROP",
			"chain FORWARD of table ip filter drops packets to 10.244.0.0/16 (tcp"},
		{"iptables-nft -A FORWARD -j REJECT", "chain FORWARD of table ip filter rejects packets: "},
		{"ip6tables-nft -A FORWARD -s fd00:10:244::1 -j DROP", "chain FORWARD of table ip6 filter drops packets from fd00:10:244::1/128"},
		{"iptables-nft -t raw -A OUTPUT -d 10.96.0.1 -j DROP", "chain OUTPUT of table ip raw drops packets to 10.96.0.1/32"},

		// Others.
		{chain + "add rule inet x frw ip daddr 192.0.2.0/24 drop'", ""},
		{chain + "add rule inet x frw ip daddr != 10.244.0.0/16 drop'", ""},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/16 ct state invalid drop'", ""},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/16 meta mark 5 drop'", ""},
		{chain + "add rule inet x frw tcp dport 25 drop'", ""},
		{chain + "add rule inet x frw iifname docker0 drop'", ""},
		{chain + "add rule inet x frw ip daddr 10.0.0.0/8 accept; add rule inet x frw ip daddr 10.244.0.0/16 drop'", ""},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/16 accept; add rule inet x frw drop'", ""},
		{chain + "add rule inet x frw ip daddr 192.0.2.0/24 jump sub; add rule inet x sub ip daddr 10.244.0.0/16 drop'", ""},
		{chain + "add rule inet x sub ip daddr 10.244.0.0/16 drop'", ""}, // nothing jumps there
		{"nft 'add table ip fairlead; add chain ip fairlead f { type filter hook forward priority 0; }; add rule ip fairlead f drop'", ""},
		{"iptables-nft -N KUBE-SERVICES; iptables-nft -A FORWARD -j KUBE-SERVICES; iptables-nft -A KUBE-SERVICES -d 10.96.0.9 -j REJECT", ""},
	} {
		testbed.NewNetwork(t).Outside("host").Do(func() {
			sh(t, c.rules)
			reason, got, err := DropsForwarded(ranges)
			if err != nil || !strings.Contains(got, c.want) || (c.want == "") != (reason == "") {
				t.Errorf("%s\n%s %q, %v, want %q", c.rules, reason, got, err, c.want)
			}
			found := Machine{Ranges: ranges}.rules()
			if (len(found) > 0) != (c.want != "") || len(found) > 0 && found[0].Level != Warning {
				t.Errorf("%s: %+v", c.rules, found)
			}
		})
	}
}
