package conntrack

import (
	"bytes"
	"context"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// tracked makes a host that translates 10.96.0.1:53 to the address of ep and
// the node port 30053 of the host's own addresses too.
const rules = `
table inet test {
	chain out {
		type nat hook output priority -100
		ip daddr 10.96.0.1 udp dport 53 dnat ip to EP4:5353
		ip6 daddr fd00:10:96::1 udp dport 53 dnat ip6 to [EP6]:5353
		udp dport 30053 dnat ip to EP4:5353
		ip daddr 10.96.0.1 tcp dport 53 dnat ip to EP4:5353
	}
}`

func setUp(t *testing.T) (host, ep *testbed.Host) {
	n := testbed.NewNetwork(t)
	host = n.Host("node")
	ep = host.Pod("ep")
	ep.Serve(svc.UDP, 5353)
	ep.Serve(svc.TCP, 5353)
	nft := host.Command(t.Context(), "nft", "-f", "-")
	nft.Stdin = strings.NewReader(strings.NewReplacer("EP4", ep.Addr4().String(), "EP6", ep.Addr6().String()).Replace(rules))
	if out, err := nft.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	return host, ep
}

// open makes flows to the given addresses, from different ports.
func open(t *testing.T, h *testbed.Host, p svc.Protocol, to ...string) {
	t.Helper()
	for _, a := range to {
		c, err := h.Dial(t.Context(), p, ap(a))
		if err != nil {
			t.Fatal(err)
		}
		if p == svc.UDP {
			_, _ = c.Write([]byte("?"))
		}
		t.Cleanup(func() { _ = c.Close() })
	}
}

// left returns the destinations of the tracked UDP flows, as conntrack(8)
// prints them.
func left(t *testing.T, h *testbed.Host, proto string) []string {
	t.Helper()
	var all []string
	for _, f := range []string{"ipv4", "ipv6"} {
		cmd := h.Command(t.Context(), "conntrack", "-L", "-p", proto, "-f", f)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("conntrack -L: %v\n%s", err, stderr.Bytes())
		}
		for line := range strings.Lines(string(out)) {
			var dst, port string
			for _, w := range strings.Fields(line) {
				if v, ok := strings.CutPrefix(w, "dst="); ok && dst == "" {
					dst = v
				}
				if v, ok := strings.CutPrefix(w, "dport="); ok && port == "" {
					port = v
				}
			}
			all = append(all, dst+" "+port)
		}
	}
	slices.Sort(all)
	return all
}

func TestDeleteTakesOnlyWhatItIsAskedFor(t *testing.T) {
	if _, err := exec.LookPath("conntrack"); err != nil {
		t.Skip("needs conntrack(8) as a second opinion")
	}
	host, ep := setUp(t)
	node := host.Addr4().String()
	everything := []string{"10.96.0.1:53", "10.96.0.1:53", "10.96.0.2:53", "[fd00:10:96::1]:53", node + ":30053"}
	ep4, ep6 := netip.AddrPortFrom(ep.Addr4(), 5353), netip.AddrPortFrom(ep.Addr6(), 5353)
	all := []string{"10.96.0.1 53", "10.96.0.1 53", "10.96.0.2 53", node + " 30053", "fd00:10:96::1 53"}
	without := func(gone ...string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(s string) bool { return slices.Contains(gone, s) })
	}
	for _, c := range []struct {
		name string
		ask  []Flow
		gone int
		left []string
	}{
		{"nothing asked", nil, 0, all},
		{"a frontend", []Flow{{Protocol: svc.UDP, OrigDst: ap("10.96.0.1:53")}}, 2, without("10.96.0.1 53")},
		{"an endpoint of a frontend", []Flow{{svc.UDP, ap("10.96.0.1:53"), ep4}}, 2, without("10.96.0.1 53")},
		{"another endpoint", []Flow{{svc.UDP, ap("10.96.0.1:53"), ap("10.244.9.9:5353")}}, 0, all},
		{"another port of the endpoint", []Flow{{svc.UDP, ap("10.96.0.1:53"), netip.AddrPortFrom(ep.Addr4(), 1)}}, 0, all},
		{"another protocol", []Flow{{Protocol: svc.SCTP, OrigDst: ap("10.96.0.1:53")}}, 0, all},
		{"IPv6", []Flow{{svc.UDP, ap("[fd00:10:96::1]:53"), ep6}}, 1, without("fd00:10:96::1 53")},
		{"a node port", []Flow{{svc.UDP, ap("0.0.0.0:30053"), ep4}}, 1, without(node + " 30053")},
		{"a node port of the other family", []Flow{{Protocol: svc.UDP, OrigDst: ap("[::]:30053")}}, 0, all},
		{"not translated, any endpoint", []Flow{{Protocol: svc.UDP, OrigDst: ap("10.96.0.2:53")}}, 0, all},
		{"not translated, as such", []Flow{{svc.UDP, ap("10.96.0.2:53"), ap("10.96.0.2:53")}}, 1, without("10.96.0.2 53")},
		{"translated, asked as not", []Flow{{svc.UDP, ap("10.96.0.1:53"), ap("10.96.0.1:53")}}, 0, all},
		{"both families at once", []Flow{
			{svc.UDP, ap("10.96.0.1:53"), ep4}, {svc.UDP, ap("[fd00:10:96::1]:53"), ep6}, {Protocol: svc.UDP, OrigDst: ap("0.0.0.0:30053")},
		}, 4, []string{"10.96.0.2 53"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			open(t, host, svc.UDP, everything...)
			open(t, host, svc.TCP, "10.96.0.1:53")
			if got := left(t, host, "udp"); !slices.Equal(got, all) {
				t.Fatalf("before: %q, want %q", got, all)
			}
			var n int
			var err error
			host.Do(func() { n, err = Delete(t.Context(), c.ask) })
			if err != nil || n != c.gone {
				t.Errorf("Delete = %d, %v, want %d", n, err, c.gone)
			}
			if got := left(t, host, "udp"); !slices.Equal(got, c.left) {
				t.Errorf("left %q, want %q", got, c.left)
			}
			if got := left(t, host, "tcp"); len(got) != 1 {
				t.Errorf("TCP flows %q, want the one there was", got)
			}
			if out, err := host.Command(t.Context(), "conntrack", "-F").CombinedOutput(); err != nil {
				t.Fatalf("conntrack -F: %v\n%s", err, out)
			}
		})
	}
}

func TestDeleteStopsWithItsContext(t *testing.T) {
	host, _ := setUp(t)
	open(t, host, svc.UDP, "10.96.0.1:53")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var n int
	var err error
	host.Do(func() { n, err = Delete(ctx, []Flow{{Protocol: svc.UDP, OrigDst: ap("10.96.0.1:53")}}) })
	if n != 0 || err == nil {
		t.Errorf("Delete = %d, %v, want 0 and an error", n, err)
	}
}

// FuzzParse: what the kernel may send one day does not panic.
func FuzzParse(f *testing.F) {
	f.Add([]byte{52, 0, 1, 128, 20, 0, 1, 128, 8, 0, 1, 0, 10, 0, 0, 1, 8, 0, 2, 0, 10, 0, 0, 2, 28, 0, 2, 128, 5, 0, 1, 0, 17, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if en, ok := parse(b); ok && !en.OrigDst.IsValid() {
			t.Errorf("an entry without a destination: %+v", en)
		}
	})
}
