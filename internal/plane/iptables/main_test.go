package iptables

import (
	"flag"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

func TestMain(m *testing.M) { testbed.Main(m) }

// inside makes an empty network namespace and runs f there, with a Plane.
func inside(t testing.TB, cfg Config, f func(p *Plane)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		p, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		f(p)
	})
}

// run runs a command in the namespace of the calling thread.
func run(t testing.TB, stdin string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

func dump(t testing.TB, p *Plane) string {
	t.Helper()
	d, err := p.Dump(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func apply(t testing.TB, p *Plane, tab *table.Table, changed []table.Key) {
	t.Helper()
	if err := p.Apply(t.Context(), tab, changed); err != nil {
		t.Fatal(err)
	}
}

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// eps are endpoints; a star marks local ones.
func eps(addrs ...string) []table.Endpoint {
	var out []table.Endpoint
	for _, a := range addrs {
		local := a[0] == '*'
		if local {
			a = a[1:]
		}
		out = append(out, table.Endpoint{Addr: ap(a), Local: local})
	}
	return out
}

func servicePort(name, portName string, f svc.Family, p svc.Protocol, fronts ...table.Frontend) *table.ServicePort {
	return &table.ServicePort{
		ID:     svc.PortName{Name: svc.Name{Namespace: "default", Name: name}, Port: portName},
		Family: f, Protocol: p, Frontends: fronts,
	}
}

// everyField is a Table that uses every field of a Frontend.
func everyField() *table.Table {
	web := eps("*10.244.1.2:9376", "10.244.2.2:9376")
	six := eps("*[fd00:10:244:1::2]:53", "[fd00:10:244:2::2]:53")
	sticky := servicePort("cart", "http", svc.IPv4, svc.TCP,
		table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.11:80"), Endpoints: web},
		table.Frontend{Kind: table.NodePort, Addr: ap("0.0.0.0:30081"), Endpoints: web[:1], LocalClients: web})
	sticky.Affinity = 3 * time.Hour
	t := table.New(
		servicePort("web", "http", svc.IPv4, svc.TCP,
			table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.10:80"), Endpoints: web},
			table.Frontend{Kind: table.ExternalIP, Addr: ap("203.0.113.1:80"), Endpoints: web, Masquerade: true},
			table.Frontend{Kind: table.LoadBalancerIP, Addr: ap("203.0.113.2:80"), Endpoints: web, Masquerade: true,
				SourceRanges: []netip.Prefix{netip.MustParsePrefix("143.231.0.0/16"), netip.MustParsePrefix("0.0.0.0/0")}},
			table.Frontend{Kind: table.NodePort, Addr: ap("0.0.0.0:30080"), Endpoints: web, Masquerade: true}),
		servicePort("local", "", svc.IPv4, svc.TCP,
			table.Frontend{Kind: table.LoadBalancerIP, Addr: ap("203.0.113.3:443"), Drop: true, LocalClients: web}),
		servicePort("db", "", svc.IPv4, svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.12:5432")}),
		servicePort("signal", "", svc.IPv4, svc.SCTP, table.Frontend{Kind: table.ClusterIP, Addr: ap("10.96.0.13:7777"), Endpoints: web}),
		servicePort("kube-dns", "dns", svc.IPv6, svc.UDP,
			table.Frontend{Kind: table.ClusterIP, Addr: ap("[fd00:10:96::a]:53"), Endpoints: six}),
		servicePort("headless", "", svc.IPv4, svc.TCP),
		sticky)
	t.NodePortAddrs = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.168.77.11"), netip.MustParseAddr("fd00:77::b")}
	t.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	return t
}

// golden compares text with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := "testdata/" + name
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s (-want +got), rewrite with -update:\n%s", file, d)
	}
}

// toolFor makes the tool of a variant.
func toolFor(v Variant, f svc.Family) (tool, error) {
	if v == Legacy {
		return iptables.New(iptables.Legacy, f)
	}
	return iptables.New(iptables.NFT, f)
}
