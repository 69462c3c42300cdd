package lb

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/arp"
)

// Of two interfaces on one network one answers for an address, which --lb-interface chooses.
func TestTwoInterfacesOnOneNetwork(t *testing.T) {
	inParallel(t)
	b := newBed(t, 0)
	n := b.addNode("n1")
	n.run("ip", "link", "add", "link", "eth0", "name", "side", "type", "macvlan", "mode", "bridge")
	n.run("ip", "address", "add", "192.168.77.240/24", "dev", "side")
	n.run("ip", "link", "set", "side", "up")
	n.start()
	b.voters(1)
	a := b.service("web")[0]
	for _, name := range []string{"eth0", "side"} {
		if name == "side" {
			n.kill9()
			n.args.Interfaces = []string{name}
			n.start()
		}
		want := arp.MACOf(b, n.host, name)
		testbed.Until(t, "an answer of "+name, func() error {
			if mac, ok := b.wire.Who(a); !ok || mac != want {
				return fmt.Errorf("%x answers, want %x", mac, want)
			}
			return nil
		})
		begin := time.Now()
		for range 10 {
			b.wire.Who(a)
		}
		for _, x := range b.wire.Since(a, begin) {
			if x.MAC != want {
				t.Errorf("%x answers beside %x", x.MAC, want)
			}
		}
	}
}

// IPv6: the kernel of a machine outside asks by neighbour solicitations who has an address, and heeds the
// unsolicited advertisement of who takes over.
func TestNeighbourDiscovery(t *testing.T) {
	inParallel(t)
	b := newBed(t, 3)
	b.voters(3)
	var a netip.Addr
	for _, x := range b.service("web", func(s *corev1.Service) {
		s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
	}) {
		if x.Is6() {
			a = x
		}
	}
	client := b.wire.Host()
	neighbour := func() (*node, error) {
		out, err := client.Command(t.Context(), "ip", "-6", "neighbour", "show", a.String()).Output()
		if err != nil {
			return nil, err
		}
		for _, n := range b.nodes {
			if m := n.mac; strings.Contains(string(out), net.HardwareAddr(m[:]).String()) {
				return n, nil
			}
		}
		return nil, fmt.Errorf("no node in %q", out)
	}
	var owner *node
	testbed.Until(t, "an owner of "+a.String(), func() (err error) {
		client.Do(func() {
			if c, err := net.Dial("udp", netip.AddrPortFrom(a, 9).String()); err == nil {
				_, _ = c.Write([]byte("who has it?"))
				_ = c.Close()
			}
		})
		owner, err = neighbour()
		return err
	})
	owner.kill9()
	testbed.Until(t, "the neighbour to be another one", func() error { // without a packet to it
		n, err := neighbour()
		if err == nil && n == owner {
			err = errors.New("it is the dead node")
		}
		return err
	})
}
