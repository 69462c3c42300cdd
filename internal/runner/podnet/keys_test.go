package podnet

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// A node without a key, and one with the key of an older Node, get neither encrypted packets
// nor a route in plain text.
func TestKeysOfNodes(t *testing.T) {
	node := func(name string, at byte, key byte) nodeFacts {
		return nodeFacts{
			name: name, since: time.Unix(int64(at), 0), key: link.Key{key},
			cidrs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, at, 0}), 24)},
			ips:   []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 10 + at})},
		}
	}
	l := ranges{cluster: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
	ways := &paths{mode: Auto, encrypt: true, neighbours: map[netip.Addr]bool{}}
	own, good := node("own", 1, 1), node("good", 2, 2)
	others := []nodeFacts{node("copies", 4, 2), good, node("mine", 3, 1), node("none", 5, 0), node("bare", 6, 0)}
	routes, peers, problems := l.routes(own, others, ways)
	if len(routes) != 1 || routes[0].Dst != own.cidrs[0] {
		t.Errorf("routes in plain text: %v", routes)
	}
	if len(peers) != 1 || peers[0].Key != good.key || peers[0].Addr != good.ips[0] {
		t.Errorf("peers %v", peers)
	}
	for name, want := range map[string]string{
		"copies": "is that of node good", "mine": "is that of node own",
		"none": "has no public key of WireGuard", "bare": "has no public key of WireGuard",
	} {
		if !strings.Contains(problems[name], want) {
			t.Errorf("%s: %q, want %q", name, problems[name], want)
		}
	}

	// While nodes begin to encrypt one after the other, those without a key are reached, and only the ones with a key by WireGuard.
	ways.plain, ways.mode = true, VXLAN
	_, peers, problems = l.routes(own, others, ways)
	if problems["none"] != "" || problems["bare"] != "" || problems["copies"] == "" {
		t.Errorf("problems %v", problems)
	}
	e := &encryption{plain: true, paths: ways, carried: carried{cluster: l.cluster}}
	withKey, without := e.split(peers)
	if len(withKey) != 1 || withKey[0].Key != good.key || len(withKey[0].Pods) != 1 {
		t.Errorf("by WireGuard %v", withKey)
	}
	var addrs []netip.Addr
	ranges := 0
	for _, p := range without {
		addrs, ranges = append(addrs, p.Addr), ranges+len(p.Pods)
	}
	if want := []netip.Addr{good.ips[0], others[3].ips[0], others[4].ips[0]}; !slices.Equal(addrs, want) || ranges != 2 {
		t.Errorf("by VXLAN %v with %d ranges, want %v with 2", addrs, ranges, want)
	}

	// What has no route of its own is not sent in plain text, unless the network leads to Pods.
	for mode, closed := range map[Mode]int{VXLAN: 1, Auto: 1, HostGateway: 1, None: 0} {
		if ways.mode = mode; len(e.unreachable()) != closed {
			t.Errorf("%s: unreachable are %v", mode, e.unreachable())
		}
	}
	ways.mode = HostGateway
	if _, without = e.split(peers[:1]); len(without) != 0 {
		t.Errorf("without VXLAN it has peers %v", without)
	}
}
