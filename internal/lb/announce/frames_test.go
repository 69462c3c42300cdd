package announce

import (
	"bytes"
	"net/netip"
	"testing"
)

var (
	macA = MAC{2, 0, 0, 0, 0, 1}
	macB = MAC{2, 0, 0, 0, 0, 2}
	vip4 = netip.MustParseAddr("192.0.2.7")
	vip6 = netip.MustParseAddr("2001:db8::1:2:3")
	cli4 = netip.MustParseAddr("192.0.2.200")
	cli6 = netip.MustParseAddr("2001:db8::c")
)

// What is built is what is understood.
func TestFrames(t *testing.T) {
	group := solicitedNode(vip6)
	if group != netip.MustParseAddr("ff02::1:ff02:3") || multicastMAC(group) != (MAC{0x33, 0x33, 0xff, 2, 0, 3}) {
		t.Errorf("solicitations for %s go to %s, %s", vip6, group, multicastMAC(group))
	}
	for name, c := range map[string]struct {
		frame []byte
		want  question
	}{
		"ARP request": {arp(broadcast, macA, arpAsk, macA, cli4, MAC{}, vip4), question{target: vip4, sender: cli4, mac: macA}},
		"ARP probe":   {probe(vip4, macA), question{target: vip4, mac: macA}},
		"ARP reply": {reply(question{target: vip4, sender: cli4, mac: macB}, macA),
			question{answer: true, target: vip4, mac: macA}},
		"ARP request that announces": {announcement(vip4, macA, nil)[0], question{answer: true, target: vip4, mac: macA}},
		"ARP reply that announces":   {announcement(vip4, macA, nil)[1], question{answer: true, target: vip4, mac: macA}},
		"request to the gateway": {
			announcement(vip4, macA, []netip.Addr{cli6, cli4})[2], question{target: cli4, sender: vip4, mac: macA}},
		"solicitation": {
			ndp(multicastMAC(group), macA, group, cli6, solicit, 0, vip6, sourceMAC), question{target: vip6, sender: cli6, mac: macA}},
		"NDP probe": {probe(vip6, macA), question{target: vip6, mac: macA}},
		"advertisement": {reply(question{target: vip6, sender: cli6, mac: macB}, macA),
			question{answer: true, target: vip6, mac: macA}},
		"advertisement to all": {announcement(vip6, macA, nil)[0], question{answer: true, target: vip6, mac: macA}},
	} {
		if got, ok := parse(c.frame); !ok || got != c.want {
			t.Errorf("%s: read as %+v, %t; want %+v", name, got, ok, c.want)
		}
	}
	if b := reply(question{target: vip4, sender: cli4, mac: macB}, macA); MAC(b) != macB || len(b) != 60 {
		t.Errorf("the reply goes to %s in %d bytes, want %s in 60", MAC(b), len(b), macB)
	}
	forged := reply(question{target: vip6, sender: cli6, mac: macB}, macA)
	forged[len(forged)-1]++
	if _, ok := parse(forged); ok {
		t.Error("a message with a wrong checksum is accepted")
	}
	routed := reply(question{target: vip6, sender: cli6, mac: macB}, macA)
	routed[ethernet+7] = 254
	if _, ok := parse(routed); ok {
		t.Error("a message that a router has forwarded is accepted")
	}
}

func FuzzParse(f *testing.F) {
	for _, a := range []netip.Addr{vip4, vip6} {
		f.Add(probe(a, macA))
		f.Add(announcement(a, macA, nil)[0])
	}
	f.Add(reply(question{target: vip6, sender: cli6, mac: macB}, macA))
	f.Fuzz(func(t *testing.T, b []byte) {
		q, ok := parse(bytes.Clone(b))
		if !ok {
			return
		}
		if !q.target.IsValid() || q.target.Is4In6() || q.answer && q.sender.IsValid() {
			t.Fatalf("%x was read as %+v", b, q)
		}
		if again, ok := parse(reply(q, macA)); !q.target.IsMulticast() && q.sender != q.target &&
			(!ok || !again.answer || again.target != q.target || again.mac != macA) {
			t.Fatalf("the reply to %+v was read as %+v, %t", q, again, ok)
		}
	})
}
