package kubeproxy_test

import (
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// left is what kube-proxy leaves in mode iptables, beside a kubelet and an
// administrator.
const left = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-SVC-TCOU7JCQXEZGVUNU - [0:0]
:KUBE-SEP-YIL6JZP7A3QYXJU2 - [0:0]
:MINE - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A POSTROUTING -s 10.0.0.0/8 -j MINE
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m udp --dport 53 -j KUBE-SVC-TCOU7JCQXEZGVUNU
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-TCOU7JCQXEZGVUNU -j KUBE-SEP-YIL6JZP7A3QYXJU2
-A KUBE-SEP-YIL6JZP7A3QYXJU2 -p udp -m udp -j DNAT --to-destination 10.244.0.2:53
-A MINE -j MASQUERADE
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-FIREWALL - [0:0]
-A FORWARD -j KUBE-FORWARD
-A INPUT -j KUBE-FIREWALL
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
COMMIT
`

// tables are its nf_tables ones, and another program's.
const tables = `table ip kube-proxy { map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; };
	chain nat-prerouting { type nat hook prerouting priority -100; }; }
table ip6 kube-proxy { }
table ip mine { chain c { type filter hook input priority 0; }; }
`

// The rules of each mode are compared with what must be there. The names of chains are kube-proxy's own, of its v1.37.2.
func TestMissing(t *testing.T) {
	port := func(name, port, addr string, family svc.Family, protocol svc.Protocol, endpoints ...string) *table.ServicePort {
		id := svc.PortName{Name: svc.Name{Namespace: "kube-system", Name: name}, Port: port}
		p := &table.ServicePort{ID: id, Family: family, Protocol: protocol}
		f := table.Frontend{Addr: netip.MustParseAddrPort(addr)}
		for _, at := range endpoints {
			f.Endpoints = append(f.Endpoints, table.Endpoint{Addr: netip.MustParseAddrPort(at)})
		}
		p.Frontends = []table.Frontend{f, {Kind: table.NodePort, Addr: netip.MustParseAddrPort("0.0.0.0:30000")}}
		return p
	}
	dns4 := port("kube-dns", "dns", "10.96.0.10:53", svc.IPv4, svc.UDP, "10.244.0.2:53")
	web6 := port("web", "", "[fd00::10]:80", svc.IPv6, svc.TCP, "[fd00:1::2]:8080")
	want := table.New(dns4, web6, port("none", "", "10.96.0.11:80", svc.IPv4, svc.TCP))
	const v4, v6 = "UDP 10.96.0.10:53 has no rule for the endpoint 10.244.0.2:53",
		"TCP [fd00::10]:80 has no rule for the endpoint [fd00:1::2]:8080"
	chain := func(name string) string { return "*nat\n:" + name + " - [0:0]\nCOMMIT\n" }
	const nft4 = `table ip kube-proxy {
	chain service-A { udp dport 53 accept; }
	chain service-empty { }
	map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; elements = { 10.96.0.10 . udp . 53 : goto service-A, }; }; }
`
	const nft6 = `table ip6 kube-proxy { chain service-B { tcp dport 80 accept; }
	map service-ips { type ipv6_addr . inet_proto . inet_service : verdict; elements = { fd00::10 . tcp . 80 : goto service-B, }; }; }
`
	empty := strings.Replace(nft4, "goto service-A", "goto service-empty", 1)
	const dnsChain, webChain = "KUBE-SEP-YIL6JZP7A3QYXJU2", "KUBE-SEP-66C6BDEYBMBRPQ2R"
	for _, c := range []struct {
		mode, want string
		commands   map[string]string // with their input
	}{
		{"iptables", v6 + "\n" + v4, nil},
		{"iptables", v6, map[string]string{"iptables-nft-restore": chain(dnsChain)}},
		{"iptables", v6 + "\n" + v4, map[string]string{"iptables-nft-restore": chain("KUBE-SEP-AAAAAAAAAAAAAAAA")}},
		{"iptables", "", map[string]string{"iptables-nft-restore": chain(dnsChain), "ip6tables-nft-restore": chain(webChain)}},
		{"iptables", "", map[string]string{"iptables-legacy-restore": chain(dnsChain), "ip6tables-legacy-restore": chain(webChain)}},
		{"iptables", v6, map[string]string{"iptables-legacy-restore": left, "ip6tables-legacy-restore": chain("OTHER")}},
		{"nftables", v6 + "\n" + v4, nil},
		{"nftables", v6, map[string]string{"nft -f -": nft4}},
		{"nftables", v6 + "\n" + v4, map[string]string{"nft -f -": empty}},
		{"nftables", "", map[string]string{"nft -f -": nft4 + nft6}},
	} {
		testbed.NewNetwork(t).Outside("host").Do(func() {
			for command, input := range c.commands {
				run(t, input, strings.Fields(command)...)
			}
			n, missing, err := kubeproxy.Missing(c.mode, want)
			if got := strings.Join(missing, "\n"); err != nil || n != 2 || got != c.want {
				t.Errorf("%s with %q: compared %d, %v, missing\n%s\nwant\n%s", c.mode, c.commands, n, err, got, c.want)
			}
		})
	}
	if _, _, err := kubeproxy.Missing("x", want); err == nil {
		t.Error("a mode that does not exist is looked for")
	}
}

// The clients of endpoints are in kube-proxy's sets and lists, whose names are from the tests of its v1.37.2; and kube-proxy
// finds the clients that are added. Endpoints without a set or a list do not change.
func TestMemory(t *testing.T) {
	const set = " { flags dynamic,timeout; timeout 3h; "
	const nft = `table ip kube-proxy { set affinity-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80` + set +
		`type ipv4_addr; elements = { 10.0.0.1, 10.0.0.2 }; }; }
table ip6 kube-proxy { set affinity-5HFFSBBM-ns5/svc5/tcp/p80__fd00.10.180..3/80` + set + `type ipv6_addr; elements = { fd00::1 }; }; }
`
	const lists = `*nat
:KUBE-SEP-SXIVWICOYRO3J4NJ - [0:0]
-A KUBE-SEP-SXIVWICOYRO3J4NJ -m recent --name KUBE-SEP-SXIVWICOYRO3J4NJ --set -j RETURN
COMMIT
`
	port := func(namespace, name string) svc.PortName {
		return svc.PortName{Name: svc.Name{Namespace: namespace, Name: name}, Port: "p80"}
	}
	four, six := netip.MustParseAddrPort("10.180.0.3:80"), netip.MustParseAddrPort("[fd00:10:180::3]:80")
	recent, other := netip.MustParseAddrPort("10.180.0.1:80"), netip.MustParseAddrPort("10.180.0.9:80")
	testbed.NewNetwork(t).Outside("host").Do(func() {
		empty, err := kubeproxy.OpenMemory()
		if err != nil {
			t.Fatal(err)
		}
		defer empty.Close()
		if got, err := empty.Clients(port("ns5", "svc5"), svc.TCP, four); len(got) > 0 || err != nil {
			t.Errorf("without kube-proxy: %v, %v", got, err)
		}
		run(t, nft, "nft", "-f", "-")
		run(t, lists, "iptables-restore")
		m, err := kubeproxy.OpenMemory()
		if err != nil || m.Empty() {
			t.Fatal(m, err)
		}
		defer m.Close()
		for _, c := range []struct {
			id   svc.PortName
			at   netip.AddrPort
			add  string
			want []string
		}{
			{port("ns5", "svc5"), four, "10.0.0.3", []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}},
			{port("ns5", "svc5"), four, "10.0.0.3", []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}},
			{port("ns5", "svc5"), six, "fd00::2", []string{"fd00::1", "fd00::2"}},
			{port("ns1", "svc1"), recent, "10.0.0.4", []string{"10.0.0.4"}},
			{port("ns1", "svc1"), recent, "10.0.0.5", []string{"10.0.0.4", "10.0.0.5"}},
			{port("ns1", "svc1"), other, "10.0.0.4", nil},
			{port("ns5", "svc1"), four, "10.0.0.4", nil},
		} {
			err := m.Keep(c.id, svc.TCP, c.at, netip.MustParseAddr(c.add))
			found, err2 := m.Clients(c.id, svc.TCP, c.at)
			var got []string
			for a := range found {
				got = append(got, a.String())
			}
			if slices.Sort(got); err != nil || err2 != nil || !slices.Equal(got, c.want) {
				t.Errorf("%s at %s: %v, %v, %v; want %v", c.id, c.at, got, err, err2, c.want)
			}
		}
	})
}

func run(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

// Its rules are found and go, those of the kubelet and of others stay.
func TestRemove(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		find := func() string {
			found, err := kubeproxy.Find(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return strings.Join(found, "\n")
		}
		if got := find(); got != "" {
			t.Errorf("found in an empty kernel:\n%s", got)
		}
		run(t, tables, "nft", "-f", "-")
		run(t, left, "iptables-nft-restore", "--noflush")
		run(t, left, "iptables-legacy-restore", "--noflush")
		want := "table ip kube-proxy of nf_tables\ntable ip6 kube-proxy of nf_tables\n7 chains of iptables (nf_tables, IPv4)\n7 chains of " +
			"iptables (legacy, IPv4)"
		if got := find(); got != want {
			t.Errorf("found\n%s\nwant\n%s", got, want)
		}
		if err := kubeproxy.Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := find(); got != "" {
			t.Errorf("left:\n%s", got)
		}
		for _, save := range []string{"iptables-nft-save", "iptables-legacy-save"} {
			text := run(t, "", save)
			for _, line := range []string{":KUBE-KUBELET-CANARY ", ":KUBE-FIREWALL ", "-A INPUT -j KUBE-FIREWALL",
				"-A POSTROUTING -s 10.0.0.0/8 -j MINE", "-A MINE -j MASQUERADE"} {
				if !strings.Contains(text, line) {
					t.Errorf("%s: %q is gone:\n%s", save, line, text)
				}
			}
			if n := strings.Count(text, "\n-A "); n != 3 {
				t.Errorf("%s: %d rules are left, want 3:\n%s", save, n, text)
			}
		}
		if text := run(t, "", "nft", "list", "tables"); !strings.Contains(text, "table ip mine") {
			t.Errorf("another program's table is gone:\n%s", text)
		}
		if err := kubeproxy.Remove(t.Context()); err != nil {
			t.Errorf("a second time: %v", err)
		}
	})
}
