package ipvs

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// What --ipvs-strict-arp is for: a load balancer of layer 2 announces virtual IPs
// by itself, so no node may answer for them (kubernetes/kubernetes#59976).
func TestStrictARP(t *testing.T) {
	vips := []netip.Addr{netip.MustParseAddr("192.168.77.200"), netip.MustParseAddr("10.96.0.10")}
	for _, strict := range []bool{false, true} {
		network := testbed.NewNetwork(t)
		node, client := network.Host("node"), network.Outside("client")
		node.Do(func() {
			p, err := New(Config{Variant: legacy, StrictARP: strict})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.Close() })
			ep := flows.Endpoints("*10.244.1.2:9376")
			flows.Apply(t, p, table.New(flows.Port("web", "", svc.IPv4, svc.TCP,
				table.Frontend{Kind: table.ClusterIP, Addr: netip.AddrPortFrom(vips[1], 80), Endpoints: ep},
				table.Frontend{Kind: table.LoadBalancerIP, Addr: netip.AddrPortFrom(vips[0], 80), Endpoints: ep})), nil)
		})
		answered := whoHas(t, client, append(vips, node.Addr4())...)
		for _, vip := range vips {
			if answered[vip] == strict {
				t.Errorf("strict %t: the node answers for %s: %t", strict, vip, answered[vip])
			}
		}
	}
}

// The parts of an ARP packet for IPv4 on Ethernet, RFC 826.
const (
	arpLen      = 28
	arpQuestion = 1
	arpAnswer   = 2
)

// whoHas asks from a host by ARP for one address after the other, and returns for
// which an answer came until the last one's did, which must come.
func whoHas(t *testing.T, from *testbed.Host, addrs ...netip.Addr) map[netip.Addr]bool {
	t.Helper()
	var fd int
	var dev *net.Interface
	var err error
	proto := htons(unix.ETH_P_ARP)
	from.Do(func() {
		if dev, err = net.InterfaceByName("eth0"); err == nil {
			fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(proto))
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 30}); err != nil {
		t.Fatal(err)
	}
	everybody := &unix.SockaddrLinklayer{
		Protocol: proto, Ifindex: dev.Index, Halen: 6, Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
	}
	for _, a := range addrs {
		q := append([]byte{0, 1, 8, 0, 6, 4, 0, arpQuestion}, dev.HardwareAddr...)
		q = append(q, from.Addr4().AsSlice()...)
		q = append(append(q, make([]byte, 6)...), a.AsSlice()...)
		if err := unix.Sendto(fd, q, 0, everybody); err != nil {
			t.Fatal(err)
		}
	}
	answered := map[netip.Addr]bool{}
	for last := addrs[len(addrs)-1]; !answered[last]; {
		b := make([]byte, 64)
		n, _, err := unix.Recvfrom(fd, b, 0)
		if err != nil {
			t.Fatalf("no answer for %s: %v", last, err)
		}
		if n >= arpLen && b[7] == arpAnswer {
			answered[netip.AddrFrom4([4]byte(b[14:18]))] = true
		}
	}
	return answered
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// The kernel has the timeouts that were asked for, and its own where none was.
func TestTimeouts(t *testing.T) {
	read := func() ipvs.Timeouts {
		t.Helper()
		c, err := ipvs.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		now, err := c.Timeouts()
		if err != nil {
			t.Fatal(err)
		}
		return now
	}
	testbed.NewNetwork(t).Outside("host").Do(func() {
		kernels := read()
		for _, ask := range []ipvs.Timeouts{
			{}, {TCP: 20 * time.Minute, UDP: 77 * time.Second}, {TCP: 20 * time.Minute, TCPFin: 33 * time.Second, UDP: 5 * time.Second},
		} {
			p, err := New(Config{Variant: legacy, Timeouts: ask})
			if err != nil {
				t.Fatal(err)
			}
			flows.Apply(t, p, table.New(), nil)
			want := ask
			for _, v := range []struct{ want, kernels *time.Duration }{{&want.TCP, &kernels.TCP}, {&want.TCPFin, &kernels.TCPFin},
				{&want.UDP, &kernels.UDP}} {
				if *v.want == 0 {
					*v.want = *v.kernels
				}
			}
			if got := read(); got != want {
				t.Errorf("asked for %+v, there is %+v, want %+v", ask, got, want)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}
