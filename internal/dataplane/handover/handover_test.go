package handover_test

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/handover"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// Clients of both families that kube-proxy keeps go where it has led them, in each of our modes that remembers them, and back to a
// kube-proxy without any. A client that is kept here stays.
func TestHandOver(t *testing.T) {
	for name, create := range map[string]func() (dataplane.Applier, error){
		"nft":             func() (dataplane.Applier, error) { return nft.New(nft.Config{}) },
		"iptables-nft":    func() (dataplane.Applier, error) { return iptables.New(iptables.Config{Variant: iptables.NFT}) },
		"iptables-legacy": func() (dataplane.Applier, error) { return iptables.New(iptables.Config{Variant: iptables.Legacy}) },
	} {
		for _, mode := range []string{"iptables", "nftables"} {
			t.Run(name+" and kube-proxy in mode "+mode, func(t *testing.T) { handOver(t, create, mode) })
		}
	}
}

func handOver(t *testing.T, create func() (dataplane.Applier, error), mode string) {
	e := flows.NewEnv(t, func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		p, err := create()
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
	c, d := e.Host("c"), e.Host("d")
	web4, web6 := e.Affine(t)
	front4, front6 := web4.Frontends[0], web6.Frontends[0]
	ask := func(from *testbed.Host, to netip.AddrPort) string {
		t.Helper()
		answer, err := from.Ask(t.Context(), svc.TCP, to)
		if err != nil {
			t.Errorf("from %s to %s: %v", from.Name(), to, err)
		}
		return answer.Name
	}
	first := map[netip.AddrPort]string{front4.Addr: ask(d, front4.Addr), front6.Addr: ask(d, front6.Addr)}
	if first[front4.Addr] == "" || first[front6.Addr] == "" {
		return
	}
	var memory *kubeproxy.Memory
	inNode := func(what string, f func() error) {
		t.Helper()
		var err error
		if e.Node.Do(func() { err = f() }); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	restart := func() {
		kubeProxy(t, e.Node, mode, []table.Endpoint{front4.Endpoints[0], front4.Endpoints[1], front6.Endpoints[0], front6.Endpoints[1]})
		inNode("its memory", func() (err error) {
			memory, err = kubeproxy.OpenMemory()
			return err
		})
		t.Cleanup(func() { _ = memory.Close() })
	}
	restart()
	for _, k := range []dataplane.Kept{
		{Client: c.Addr4(), Endpoint: front4.Endpoints[1].Addr}, {Client: c.Addr6(), Endpoint: front6.Endpoints[1].Addr},
		{Client: d.Addr4(), Endpoint: other(front4, first[front4.Addr])}, {Client: d.Addr6(), Endpoint: other(front6, first[front6.Addr])},
	} {
		inNode("a client", func() error { return memory.Keep(web4.ID, svc.TCP, k.Endpoint, k.Client) })
	}
	inNode("from kube-proxy", func() error { return handover.FromKubeProxy(t.Context()) })
	for range 6 {
		for _, to := range []netip.AddrPort{front4.Addr, netip.AddrPortFrom(e.Node.Addr4(), 30080), front6.Addr} {
			if got := ask(c, to); got != "b" {
				t.Errorf("%s leads the client to %q; want b", to, got)
			}
		}
		for to, want := range first {
			if got := ask(d, to); got != want {
				t.Errorf("%s leads a client that was at %s to %q", to, want, got)
			}
		}
	}
	restart()
	inNode("to kube-proxy", func() error { return handover.ToKubeProxy(t.Context()) })
	for _, f := range []table.Frontend{front4, front6} {
		for i, endpoint := range f.Endpoints {
			var found map[netip.Addr]uint64
			inNode("its clients", func() (err error) {
				found, err = memory.Clients(web4.ID, svc.TCP, endpoint.Addr)
				return err
			})
			family := svc.FamilyOf(f.Addr.Addr())
			for client, want := range map[*testbed.Host]string{c: "b", d: first[f.Addr]} {
				if _, got := found[client.Addr(family)]; got != (want == []string{"a", "b"}[i]) {
					t.Errorf("kube-proxy keeps %s at %s: %t; it was at %s", client.Addr(family), endpoint.Addr, got, want)
				}
			}
		}
	}
}

// other is the endpoint of a frontend that does not have a name.
func other(f table.Frontend, name string) netip.AddrPort {
	if name == "a" {
		return f.Endpoints[1].Addr
	}
	return f.Endpoints[0].Addr
}

// kubeProxy writes what a kube-proxy has just started with: for each endpoint a set of clients, or a list that its chain names; all of
// them empty. The names are kube-proxy's, which the tests of package kubeproxy have from its own tests.
func kubeProxy(t *testing.T, node *testbed.Host, mode string, endpoints []table.Endpoint) {
	t.Helper()
	hash := func(text string) string {
		sum := sha256.Sum256([]byte(text))
		return base32.StdEncoding.EncodeToString(sum[:])
	}
	for family, words := range map[svc.Family][3]string{
		svc.IPv4: {"iptables-restore", "ip", "ipv4_addr"}, svc.IPv6: {"ip6tables-restore", "ip6", "ipv6_addr"},
	} {
		var chains, sets strings.Builder
		for _, e := range endpoints {
			if svc.FamilyOf(e.Addr.Addr()) != family {
				continue
			}
			chain := "KUBE-SEP-" + hash("default/web:httptcp" + e.Addr.String())[:16]
			fmt.Fprintf(&chains, "-A %s -m recent --name %s --set -j RETURN\n", chain, chain)
			id := fmt.Sprintf("default/web/tcp/http__%s/%d", strings.ReplaceAll(e.Addr.Addr().String(), ":", "."), e.Addr.Port())
			fmt.Fprintf(&sets, " set affinity-%s-%s { type %s; flags dynamic,timeout; timeout 3h; };", hash(id)[:8], id, words[2])
		}
		input, program := "", []string{"nft", "-f", "-"}
		switch mode {
		case "nftables":
			name := "table " + words[1] + " kube-proxy "
			input = name + "{ }\ndelete " + name + "\n" + name + "{" + sets.String() + " }\n"
		case "iptables":
			program = []string{words[0], "--noflush"}
			declared := ""
			for line := range strings.Lines(chains.String()) {
				declared += ":" + strings.Fields(line)[1] + " - [0:0]\n"
			}
			node.Do(func() { flows.Command(t, "*nat\n"+declared+"COMMIT\n", program...) }) // the lists go with their rules
			input = "*nat\n" + declared + chains.String() + "COMMIT\n"
		}
		node.Do(func() { flows.Command(t, input, program...) })
	}
}
