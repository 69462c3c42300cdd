package quorum

import (
	"net/netip"
	"reflect"
	"testing"
	"time"
)

func FuzzMessage(f *testing.F) {
	for _, m := range []*Message{
		{Kind: Request, ListVersion: 3, Session: 1 << 60, Nonce: 7, Heard: 6, Base: 1, UpTo: 4, Attrs: "x",
			Adds:    []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")},
			Removes: []netip.Addr{netip.MustParseAddr("::")}},
		{Kind: Reply, Promised: true, Confirmed: 9, Refused: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, HasMembers: true,
			Members: []Member{{"a", "b"}}, List: List{Version: 2, Voters: []Voter{{"a", "192.0.2.1:1"}}, Witness: true}},
		{Kind: Notice},
		{Kind: Request, Session: 5, Nonce: 8, End: true},
	} {
		b := m.Append(nil)
		back, err := ParseMessage(b)
		if err != nil || !reflect.DeepEqual(m, back) {
			f.Fatalf("%+v became %+v, %v", m, back, err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseMessage(b)
		if err != nil {
			return
		}
		again, err := ParseMessage(m.Append(nil))
		if err != nil || !reflect.DeepEqual(m, again) {
			t.Fatalf("%+v became %+v, %v", m, again, err)
		}
		// Whatever a peer sends, a Node survives it.
		n := NewNode("a", 0, func() uint64 { return 4 })
		n.SetList(0, List{Version: 1, Voters: []Voter{{Name: "a"}, {Name: "b"}}})
		n.Receive(2*time.Second, "b", m)
		n.Receive(3*time.Second, "a", m)
		n.Take()
	})
}
