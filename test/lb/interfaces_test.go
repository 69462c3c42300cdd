package lb

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
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

// The kernel of the nodes' router asks for an address when clients of other networks send to it, and hears who has taken it
// over, in both families and without a packet to the address (metallb/metallb#2009): otherwise it
// would send those clients to the dead node until its entry is out of date. The announcement is repeated for some seconds.
func TestRoutersHearOfTakeOver(t *testing.T) {
	inParallel(t)
	b := newBed(t, 0)
	router := b.net.Outside("router")
	behind := []netip.Addr{netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("fd00:99::1")} // of another network
	for _, a := range behind {
		router.AddAddr(a)
	}
	for _, name := range []string{"n1", "n2", "n3"} {
		n := b.addNode(name)
		n.run("ip", "route", "replace", "default", "via", router.Addr4().String())
		n.run("ip", "-6", "route", "replace", "default", "via", router.Addr6().String())
		n.host.Serve(svc.TCP, 80)
		n.start()
	}
	b.voters(3)
	for _, a := range b.service("web", func(s *corev1.Service) { s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack) }) {
		client := behind[0]
		if a.Is6() {
			client = behind[1]
		}
		for _, n := range b.nodes {
			n.host.AddAddr(a)
		}
		// neighbour is the node to which the router sends.
		neighbour := func() (*node, error) {
			out, err := router.Command(t.Context(), "ip", "neighbour", "show", a.String()).Output()
			if err != nil {
				return nil, err
			}
			for _, n := range b.nodes {
				if strings.Contains(string(out), net.HardwareAddr(n.mac[:]).String()) {
					return n, nil
				}
			}
			return nil, fmt.Errorf("no node in %q", out)
		}
		answers := func(from ...*node) {
			testbed.Until(t, "an answer from "+a.String(), func() error {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				got, err := router.AskFrom(ctx, svc.TCP, netip.AddrPortFrom(client, 0), netip.AddrPortFrom(a, 80))
				if err == nil && !slices.ContainsFunc(from, func(n *node) bool { return n.name == got.Name }) {
					err = fmt.Errorf("%s answers", got.Name)
				}
				return err
			})
		}
		answers(b.nodes...)
		owner, err := neighbour()
		b.must(err)
		begin := time.Now()
		owner.kill9()
		var next *node
		testbed.Until(t, "the neighbour to be another one", func() (err error) {
			if next, err = neighbour(); err == nil && next == owner {
				err = errors.New("it is the dead node")
			}
			return err
		})
		answers(next)
		if a.Is4() {
			testbed.Until(t, "repetitions of the announcement", func() error { return b.announced(a, next, begin, 4) })
		}
		owner.start()
		b.rebalanced("the neighbour to be the first one again", func() error {
			if n, err := neighbour(); err != nil || n != owner {
				return fmt.Errorf("it is not: %v", err)
			}
			return nil
		})
	}
}

// announced returns an error unless a node has announced an address unasked at so many times since begin.
func (b *bed) announced(a netip.Addr, by *node, begin time.Time, times int) error {
	n, last := 0, time.Time{}
	for _, c := range b.wire.Since(a, begin) {
		if c.MAC == by.mac && !c.Asked && c.At.Sub(last) > 100*time.Millisecond {
			n, last = n+1, c.At
		}
	}
	if n < times {
		return fmt.Errorf("%d announcements", n)
	}
	return nil
}
