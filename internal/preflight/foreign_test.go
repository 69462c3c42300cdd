package preflight

import (
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

// Rules of other programs that lose packets of Pods and Services are named, whichever program wrote them; others are not. The rules
// are written by nft and iptables, and read back from the kernel.
func TestForeignRules(t *testing.T) {
	prefix := netip.MustParsePrefix
	p := Packets{Pods: []netip.Prefix{prefix("10.244.0.0/16"), prefix("fd00:10:244::/56")}, DNSPort: 10053}
	p.Ranges = append(p.Ranges, prefix("10.96.0.0/16"))
	p.Ranges = append(p.Ranges, p.Pods...)
	chain := "nft 'add table inet x; add chain inet x frw { type filter hook forward priority 0; }; add chain inet x pre " +
		"{ type filter hook prerouting priority -300; }; add chain inet x out { type filter hook output priority 0; }; " +
		"add chain inet x in { type filter hook input priority 0; }; add chain inet x sub; "
	closed := strings.NewReplacer("hook forward priority 0;", "hook forward priority 0; policy drop;",
		"hook input priority 0;", "hook input priority 0; policy drop;").Replace(chain)
	const open = "add rule inet x frw ip saddr 10.244.0.0/16 accept; add rule inet x frw ip6 saddr fd00:10:244::/56 accept; "
	for _, c := range []struct{ rules, want string }{
		{chain + "add rule inet x frw ip daddr 10.244.1.0/24 drop'", "chain frw of table inet x drops packets to 10.244.1.0/24"},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/17 tcp dport 9376 counter drop'", "drops packets to 10.244.0.0/17 (tcp, dport 9376)"},
		{chain + "add rule inet x frw ip saddr 10.0.0.0/8 reject'", "rejects packets from 10.0.0.0/8"},
		{chain + "add rule inet x frw ip6 daddr fd00:10:244::/64 drop'", "drops packets to fd00:10:244::/64"},
		{chain + "add rule inet x frw ip6 saddr fd00::/16 ct state new drop'", "drops packets from fd00::/16 (ct state)"},
		{chain + "add rule inet x pre ip daddr 10.96.0.10 udp dport {53, 5353} drop'", "drops packets to 10.96.0.10/32"},
		{chain + "add rule inet x out ip daddr 10.96.0.0/16 drop'", "chain out of table inet x drops packets to 10.96.0.0/16"},
		{chain + "add rule inet x frw counter drop'",
			"chain frw of table inet x drops packets, and so TCP connections between Pods of this node"},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/16 jump sub; add rule inet x sub tcp dport 80 drop'",
			"chain sub of table inet x drops packets to 10.244.0.0/16 (tcp, dport 80)"},
		{"iptables-nft -A FORWARD -d 10.244.0.0/16 -p tcp --dport 80 -j DROP",
			"chain FORWARD of table ip filter drops packets to 10.244.0.0/16 (tcp"},
		{"iptables-nft -A FORWARD -j REJECT", "chain FORWARD of table ip filter rejects packets, and so TCP connections between"},
		{"ip6tables-nft -A FORWARD -s fd00:10:244::1 -j DROP", "chain FORWARD of table ip6 filter drops packets from fd00:10:244::1/128"},
		{"iptables-nft -t raw -A OUTPUT -d 10.96.0.1 -j DROP", "chain OUTPUT of table ip raw drops packets to 10.96.0.1/32"},

		// Addresses of sets.
		{chain + "add set inet x bad { type ipv4_addr; flags interval; elements = { 192.0.2.1, 10.244.3.0/24 }; }; " +
			"add rule inet x frw ip saddr @bad drop'",
			"drops packets from 10.244.3.0/24"},
		{chain + "add rule inet x frw ip daddr { 192.0.2.1, 10.96.0.10 } drop'", "drops packets to 10.96.0.10/32"},
		{chain + "add rule inet x frw ip daddr vmap { 192.0.2.1 : accept, 10.96.0.10 : drop }'", "drops packets to 10.96.0.10/32"},
		{chain + "add rule inet x frw ip6 daddr { fd00:10:244::1-fd00:10:244::5 } drop'", "drops packets to fd00:10:244::1/128"},

		// Policies, with rules that do not let Pods pass.
		{closed + "add rule inet x frw ct state vmap { established : accept, related : accept, invalid : drop }; " +
			"add rule inet x frw iifname { \"docker*\", \"eth0\" } accept; add rule inet x frw oif lo accept; " +
			"add rule inet x frw ct status dnat accept'",
			"chain frw of table inet x has the policy drop, and none of its rules accepts " +
				"TCP connections between Pods of this node (10.244.0.0/16)"},
		{closed + open + "add rule inet x in iif lo accept; add rule inet x in ct state established,related accept; " +
			"add rule inet x in tcp dport { 22, 80-90 } accept'",
			"chain in of table inet x has the policy drop, and none of its rules accepts what Pods (10.244.0.0/16) ask this node's DNS server"},
		{chain + "add rule inet x in meta nfproto ipv6 udp dport 10000-10100 drop'", "what Pods (fd00:10:244::/56) ask"},
		{chain + "add rule inet x in ip saddr 10.0.0.0/8 goto sub; add rule inet x sub tcp dport 22 accept; add rule inet x sub drop'",
			"chain sub of table inet x drops packets, and so what Pods (10.244.0.0/16) ask"},
		{"iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -i docker0 -j ACCEPT; " +
			"iptables-nft -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "chain FORWARD of table ip filter has the policy drop"},

		{"iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -p icmp --icmp-type echo-request -j ACCEPT; " + // ufw's
			"iptables-nft -A FORWARD -p icmp -j ACCEPT; iptables-nft -A FORWARD -p udp -j ACCEPT",
			"chain FORWARD of table ip filter has the policy drop"},

		// iptables-legacy.
		{"iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD -p icmp --icmp-type echo-request -j ACCEPT; " +
			"iptables-legacy -A FORWARD -p icmp -j ACCEPT", "chain FORWARD of table ip filter of iptables-legacy has the policy drop"},
		{"iptables-legacy -P FORWARD DROP", "chain FORWARD of table ip filter of iptables-legacy has the policy drop"},
		{"iptables-legacy -P INPUT DROP; iptables-legacy -A INPUT -i lo -j ACCEPT; iptables-legacy -A INPUT -p tcp --dport 22 -j ACCEPT",
			"chain INPUT of table ip filter of iptables-legacy has the policy drop"},
		{"iptables-legacy -A FORWARD -j LOG; iptables-legacy -A FORWARD -d 10.244.1.0/24 -p tcp -m multiport --dports 80,90:95 -j DROP",
			"rule 2 of chain FORWARD of table ip filter of iptables-legacy drops packets to 10.244.1.0/24 (tcp, dports 80,90:95)"},
		{"iptables-legacy -N sub; iptables-legacy -A FORWARD -m comment --comment 'a \"b\" -j ACCEPT' -j sub; " +
			"iptables-legacy -A sub -s 10.244.0.0/16 -j REJECT",
			"chain sub of table ip filter of iptables-legacy rejects packets from 10.244.0.0/16"},
		{"ip6tables-legacy -t raw -A PREROUTING -d fd00:10:244::/64 -j DROP", "chain PREROUTING of table ip6 raw of iptables-legacy drops"},

		// Others.
		{"iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -p tcp -j ACCEPT", ""},
		{"iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD -p tcp -j ACCEPT", ""},
		{closed + open + "add rule inet x in udp dport 10000-10100 accept'", ""},
		{closed + "add rule inet x frw iifname \"fl*\" accept; add rule inet x in iifname \"fl*\" accept'", ""},
		{closed + "add rule inet x frw ct state new accept; add rule inet x in meta mark 5 accept'", ""},
		{chain + "add rule inet x in ip saddr 10.244.0.0/16 tcp dport 22 drop'", ""},
		{chain + "add rule inet x frw ip saddr 10.244.0.0/16 ip daddr 169.254.169.254 drop'", ""},
		{chain + "add set inet x c { type ipv4_addr . inet_service; elements = { 10.244.0.1 . 80 }; }; " +
			"add rule inet x frw ip daddr . tcp dport @c drop'", ""},
		{chain + "add rule inet x frw ip daddr != { 10.96.0.10 } drop'", ""},
		{"iptables-legacy -A FORWARD ! -s 10.244.0.0/16 -j DROP", ""},
		{"iptables-legacy -A FORWARD -d 10.244.0.0/16 -m mark --mark 5 -j DROP", ""},
		{"iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD -m conntrack ! --ctstate INVALID -j ACCEPT", ""},
		{"iptables-legacy -A FORWARD -d 192.0.2.0/24 -j DROP", ""},
		{chain + "add rule inet x frw ip daddr 192.0.2.0/24 drop'", ""},
		{chain + "add rule inet x frw ip daddr != 10.244.0.0/16 drop'", ""},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/16 ct state invalid drop'", ""},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/16 meta mark 5 drop'", ""},
		{chain + "add rule inet x frw tcp dport 25 drop'", ""},
		{chain + "add rule inet x frw iifname docker0 drop'", ""},
		{chain + "add rule inet x frw ip daddr 10.0.0.0/8 accept; add rule inet x frw ip daddr 10.244.0.0/16 drop'", ""},
		{chain + "add rule inet x frw ip daddr 10.244.0.0/16 accept; add rule inet x frw meta nfproto ipv4 drop'", ""},
		{chain + "add rule inet x frw ip daddr 192.0.2.0/24 jump sub; add rule inet x sub ip daddr 10.244.0.0/16 drop'", ""},
		{chain + "add rule inet x sub ip daddr 10.244.0.0/16 drop'", ""}, // nothing jumps there
		{"nft 'add table ip fairlead; add chain ip fairlead f { type filter hook forward priority 0; }; add rule ip fairlead f drop'", ""},
		{"iptables-nft -N KUBE-SERVICES; iptables-nft -A FORWARD -j KUBE-SERVICES; iptables-nft -A KUBE-SERVICES -d 10.96.0.9 -j REJECT", ""},
	} {
		testbed.NewNetwork(t).Outside("host").Do(func() {
			sh(t, c.rules)
			reason, got, err := DropsForwarded(t.Context(), p)
			if err != nil || !strings.Contains(got, c.want) || (c.want == "") != (reason == "") {
				t.Errorf("%s\n%s %q, %v, want %q", c.rules, reason, got, err, c.want)
			}
			found := Machine{Ranges: p.Ranges, Pods: p.Pods, DNSPort: p.DNSPort}.rules(t.Context())
			if (len(found) > 0) != (c.want != "") || len(found) > 0 && found[0].Level != Warning {
				t.Errorf("%s: %+v", c.rules, found)
			}
		})
	}
}

// podPackets are those of Pods of both families.
var podPackets = Packets{Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")}}

// A node without root has a machine's tables of iptables-legacy that it may not read. It looks at all others.
func TestForeignRulesWithoutRoot(t *testing.T) {
	host := testbed.NewNetwork(t).Outside("host")
	look := func() (reason, message string, err error) {
		done := make(chan bool)
		go func() {
			defer close(done)
			runtime.LockOSThread() // and never unlocked: the thread ends, with the rights that are left
			host.Do(func() {
				if err := asOther(); err != nil {
					t.Error(err)
				}
				if _, err := os.ReadFile("/proc/thread-self/net/ip_tables_names"); !errors.Is(err, os.ErrPermission) {
					t.Errorf("the names of tables: %v, want no permission to read them", err)
				}
				reason, message, err = DropsForwarded(t.Context(), podPackets)
			})
		}()
		<-done
		return reason, message, err
	}
	run := func(script string) { host.Do(func() { sh(t, script) }) }
	run("iptables-legacy -L -n >/dev/null") // the kernel has the table
	if reason, message, err := look(); reason != "" || err != nil {
		t.Errorf("no rules drop anything: %s %q, %v", reason, message, err)
	}
	run("nft 'add table inet x; add chain inet x frw { type filter hook forward priority 0; }; add rule inet x frw drop'")
	if reason, message, err := look(); reason != "RuleDrop" || err != nil {
		t.Errorf("a rule drops everything: %s %q, %v", reason, message, err)
	}
}

// asOther makes the calling thread another user's for files, without the rights of root to them.
func asOther() error {
	if err := unix.Setfsgid(65534); err != nil {
		return err
	}
	// The package syscall would change all threads. A user without root may not, and may not read the file either.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 && errno != unix.EPERM {
		return errno
	}
	return unix.Setfsuid(65534)
}

// A rule or policy is one reason, for however many kinds of packets.
func TestOneRuleIsOneReason(t *testing.T) {
	p := podPackets
	p.DNSPort = 53
	for rules, want := range map[string]string{
		"add chain inet x frw { type filter hook forward priority 0; policy drop; }; add rule inet x frw udp dport 9 accept": policyDrop,
		"add chain inet x frw { type filter hook forward priority 0; }; add rule inet x frw ip saddr 10.244.0.0/16 drop":     "drops packets",
		"add chain inet x frw { type filter hook forward priority 0; }; add chain inet x in { type filter hook input priority 0; }; " +
			"add chain inet x sub; add rule inet x frw jump sub; add rule inet x in jump sub; add rule inet x sub drop": "drops packets",
	} {
		testbed.NewNetwork(t).Outside("host").Do(func() {
			sh(t, "nft 'add table inet x; "+rules+"'")
			p.Ranges = p.Pods
			got, err := foreign(t.Context(), p)
			if err != nil || len(got) != 1 || !strings.Contains(got[0], want) {
				t.Errorf("%s\n%d reasons %q, %v; want one with %q", rules, len(got), got, err, want)
			}
		})
	}
	if text := lostText([]string{"a", "b", "c"}); !strings.Contains(text, "a, and 2 more reasons: ") {
		t.Errorf("three reasons: %q", text)
	}
}

// Rules that nobody looked at may accept: a policy is no reason then. kube-proxy's rules do not count.
func TestVeryManyRules(t *testing.T) {
	many := func(chain string) string {
		return "add table ip nat\nadd chain ip nat " + chain + "\n" + strings.Repeat("add rule ip nat "+chain+" accept\n", maxRules+1)
	}
	testbed.NewNetwork(t).Outside("host").Do(func() {
		load := func(rules string) {
			cmd := exec.Command("nft", "-f", "-")
			cmd.Stdin = strings.NewReader(rules)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%.1000s", err, out)
			}
		}
		load(many("KUBE-SEP"))
		sh(t, "iptables-nft -P FORWARD DROP; iptables-nft -A FORWARD -s 10.0.0.0/8 -j ACCEPT")
		if got, err := foreign(t.Context(), podPackets); len(got) > 0 || err != nil {
			t.Errorf("with rules of kube-proxy: %q, %v", got, err)
		}
		load(many("other"))
		if got, err := foreign(t.Context(), podPackets); len(got) > 0 || !errors.Is(err, errMany) {
			t.Errorf("with many rules of another program: %q, %v", got, err)
		}
		if reason, message, err := DropsForwarded(t.Context(), podPackets); reason != "" || err != nil {
			t.Errorf("with many rules of another program: %s %q, %v", reason, message, err)
		}
		has(t, Machine{Pods: podPackets.Pods}.rules(t.Context()), "forwarding", Warning, "more than 20000 rules")
	})
}

// What to do names the program that lists the rules.
func TestRemedies(t *testing.T) {
	for lost, want := range map[string][]string{
		"rule 2 of chain FORWARD of table ip filter of iptables-legacy drops packets":      {"remove it", "(iptables-legacy-save)"},
		"chain FORWARD of table ip6 filter of iptables-legacy has the policy drop, and":    {"set it to ACCEPT", "(ip6tables-legacy-save)"},
		"chain FORWARD of table ip filter has the policy drop, and none of its rules does": {"accept the ranges of Pods there", "nft -a list"},
	} {
		for _, part := range want {
			if got := remedyOf(lost); !strings.Contains(got, part) {
				t.Errorf("%s: %q, want %q", lost, got, part)
			}
		}
	}
}
