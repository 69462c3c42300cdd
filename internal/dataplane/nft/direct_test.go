package nft

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/direct"
	"github.com/fairlead/fairlead/internal/dataplane/tables"
	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

const (
	directPort   = 80
	endpointPort = 9376
)

var vips = map[svc.Family]netip.Addr{svc.IPv4: netip.MustParseAddr("203.0.113.10"), svc.IPv6: netip.MustParseAddr("2001:db8:113::10")}

// directCluster is three nodes with the decisions and the mode of a node each, and a client on their network that sends packets for
// the virtual IPs to one of them.
type directCluster struct {
	t       *testing.T
	network *testbed.Network
	client  *testbed.Host
	nodes   []*directNode
	service *corev1.Service
	pods    []*testbed.Host
	port    uint16 // the client's last one
}

type directNode struct {
	*testbed.Host
	builder *table.Builder
	mode    *Mode
}

// newDirectCluster has a pod on each of the named nodes, "a" to "c"; a name twice is two pods.
func newDirectCluster(t *testing.T, protocol svc.Protocol, pods ...string) *directCluster {
	t.Helper()
	c := &directCluster{t: t, network: testbed.NewNetwork(t), port: 20000}
	hosts := map[string]*testbed.Host{}
	for _, name := range []string{"a", "b", "c"} {
		hosts[name] = c.network.Host(name)
	}
	c.client = c.network.Outside("client")
	for i, node := range pods {
		p := hosts[node].Pod(fmt.Sprintf("%s%d", node, i))
		p.Serve(protocol, endpointPort)
		c.pods = append(c.pods, p)
	}
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		n := &directNode{Host: hosts[name]}
		n.builder = table.NewBuilder(table.Config{NodeName: name, Forwarding: func(a map[string]string) (bool, error) {
			return dialect.Forwarding(a, false, direct.Probe)
		}})
		hops := map[string]table.NextHop{}
		n.Do(func() {
			for other, h := range hosts {
				if other != name {
					hops[other] = table.NextHop{
						IPv4: link.NextHop(h.Addr4(), h.PodCIDR(svc.IPv4)), IPv6: link.NextHop(h.Addr6(), h.PodCIDR(svc.IPv6)),
					}
				}
			}
			var err error
			if n.mode, err = New(Config{DropInvalid: true}); err != nil {
				t.Fatal(err)
			}
		})
		t.Cleanup(func() { _ = n.mode.Close() })
		n.builder.SetNextHops(hops)
		n.builder.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{
			PodCIDRs: []string{n.PodCIDR(svc.IPv4).String(), n.PodCIDR(svc.IPv6).String()}}})
		c.nodes = append(c.nodes, n)
	}
	ingress := []corev1.LoadBalancerIngress{{IP: vips[svc.IPv4].String()}, {IP: vips[svc.IPv6].String()}}
	c.service = &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web",
			Annotations: map[string]string{svc.ForwardingAnnotation: svc.ForwardingDirect}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10", "fd00:10:96::10"},
			IPFamilies:            []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyCluster,
			Ports:                 []corev1.ServicePort{{Port: directPort, Protocol: corev1.Protocol(protocol.String())}},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: ingress}},
	}
	c.announce(c.nodes[0])
	c.apply(c.pods...)
	return c
}

// announce has the client send packets for the virtual IPs to a node.
func (c *directCluster) announce(n *directNode) {
	for f, vip := range vips {
		c.client.Route(netip.PrefixFrom(vip, vip.BitLen()), n.Addr(f))
	}
}

// apply makes pods the endpoints, on all nodes except the given ones, which stay unchanged.
func (c *directCluster) apply(pods ...*testbed.Host) {
	c.t.Helper()
	for _, n := range c.nodes {
		c.applyOn(n, pods...)
	}
}

func (c *directCluster) applyOn(n *directNode, pods ...*testbed.Host) {
	c.t.Helper()
	n.builder.SetService(c.service.DeepCopy())
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-" + strings.ToLower(f.String()),
				Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
			AddressType: discoveryv1.AddressType(f.String()),
			Ports: []discoveryv1.EndpointPort{{Name: new(string), Port: new(int32(endpointPort)),
				Protocol: new(c.service.Spec.Ports[0].Protocol)}},
		}
		for _, p := range pods {
			slice.Endpoints = append(slice.Endpoints,
				discoveryv1.Endpoint{Addresses: []string{p.Addr(f).String()}, NodeName: new(p.Node().Name())})
		}
		n.builder.SetSlice(slice)
	}
	tab, keys := n.builder.Build()
	for _, p := range n.builderProblems() {
		c.t.Errorf("%s: %s", n.Name(), p)
	}
	n.Do(func() { flows.Apply(c.t, n.mode, tab, keys) })
}

func (n *directNode) builderProblems() (out []table.Problem) {
	for _, all := range n.builder.NewProblems() {
		out = append(out, all...)
	}
	return out
}

// ask asks n times and returns how often each pod answered, all of which must have seen the client itself.
func (c *directCluster) ask(p svc.Protocol, f svc.Family, n int) map[string]int {
	c.t.Helper()
	seen := map[string]int{}
	for range n {
		c.port++ // a flow of before would stay where it was
		from := netip.AddrPortFrom(c.client.Addr(f), c.port)
		got, err := c.client.AskFrom(c.t.Context(), p, from, netip.AddrPortFrom(vips[f], directPort))
		if err != nil {
			c.t.Fatalf("%s over %s: %v, after %v", p, f, err, seen)
		}
		if got.Client != from {
			c.t.Fatalf("%s over %s: %s saw %s, want the client %s", p, f, got.Name, got.Client, from)
		}
		seen[got.Name]++
	}
	return seen
}

func (c *directCluster) names(pods ...*testbed.Host) []string {
	var out []string
	for _, p := range pods {
		out = append(out, p.Name())
	}
	slices.Sort(out)
	return out
}

// Upstream's e2e test "should be able to switch session affinity for LoadBalancer service with Local traffic policy", by its
// logic: of three endpoints on three nodes, one of which gets all packets, more than one answers; with affinity one and the same
// does; without, more than one does again. All see the client. It is the same with policy Cluster.
func TestDirectAffinitySwitches(t *testing.T) {
	none, clientIP := corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP
	for _, p := range []svc.Protocol{svc.TCP, svc.UDP} {
		c := newDirectCluster(t, p, "a", "b", "c")
		for _, policy := range []corev1.ServiceExternalTrafficPolicy{corev1.ServiceExternalTrafficPolicyLocal,
			corev1.ServiceExternalTrafficPolicyCluster} {
			c.service.Spec.ExternalTrafficPolicy = policy
			for _, affinity := range []corev1.ServiceAffinity{none, clientIP, none} {
				c.service.Spec.SessionAffinity = affinity
				c.apply(c.pods...)
				for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
					seen := c.ask(p, f, 40)
					if affinity == clientIP && len(seen) != 1 || affinity == none && len(seen) != 3 {
						t.Errorf("%s over %s, policy %s, affinity %s: answers of %v", p, f, policy, affinity, seen)
					}
				}
			}
		}
	}
}

// A node without an endpoint loses nothing of what it announces, and tracks nothing of it.
func TestDirectAnnouncerWithoutEndpoint(t *testing.T) {
	c := newDirectCluster(t, svc.TCP, "b", "b", "c")
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		seen := c.ask(svc.TCP, f, 60)
		if got := slices.Sorted(maps.Keys(seen)); !slices.Equal(got, c.names(c.pods...)) {
			t.Errorf("%s: answers of %v, want all of %v", f, seen, c.names(c.pods...))
		}
		if err := c.nodes[0].Tracks(svc.TCP, netip.AddrPortFrom(vips[f], directPort)); err == nil {
			t.Errorf("%s: the announcing node tracks a connection that it passed on", f)
		}
	}
}

// open opens n connections, and echo uses them.
func (c *directCluster) open(f svc.Family, n int) (out []net.Conn) {
	c.t.Helper()
	for range n {
		conn, err := c.client.Dial(c.t.Context(), svc.TCP, netip.AddrPortFrom(vips[f], directPort))
		if err != nil {
			c.t.Fatal(err)
		}
		c.t.Cleanup(func() { _ = conn.Close() })
		if _, err := testbed.AskOn(conn); err != nil {
			c.t.Fatal(err)
		}
		out = append(out, conn)
	}
	return out
}

func (c *directCluster) echo(when string, conns []net.Conn) {
	c.t.Helper()
	for i, conn := range conns {
		_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
		text := fmt.Sprintf("%s %d", when, i)
		_, err := io.WriteString(conn, text)
		buf := make([]byte, len(text))
		if err == nil {
			_, err = io.ReadFull(conn, buf)
		}
		if err != nil || string(buf) != text {
			c.t.Errorf("%s: connection %d of %d: %q, %v", when, i, len(conns), buf, err)
		}
	}
}

// Open connections stay when the endpoints change, and when another node announces the address, also one with an endpoint.
func TestDirectConnectionsStay(t *testing.T) {
	c := newDirectCluster(t, svc.TCP, "a", "b", "c", "c", "b", "c")
	first := c.pods[:3]
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		c.announce(c.nodes[0])
		c.apply(first...)
		conns := c.open(f, 30)
		c.announce(c.nodes[1])
		c.echo("announced by b", conns)
		c.announce(c.nodes[2])
		c.echo("announced by c", conns)
		c.announce(c.nodes[0])
		c.echo("announced by a again", conns)
		c.apply(c.pods...)
		c.echo("with twice the endpoints", conns)
		c.apply(c.pods[4])
		c.echo("with another endpoint", conns)
		c.service.Spec.Ports[0].Port++
		c.apply(c.pods...)
		c.echo("without the frontend", conns)
		c.service.Spec.Ports[0].Port--
	}
}

// Clients inside are not passed on: a Pod and the node itself reach endpoints elsewhere, and an endpoint reaches itself.
func TestDirectClientsInside(t *testing.T) {
	c := newDirectCluster(t, svc.TCP, "b", "c")
	c.service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	c.apply(c.pods...)
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		for _, from := range []*testbed.Host{c.nodes[0].Pod("inside"), c.nodes[0].Host, c.pods[0], c.nodes[1].Host} {
			seen := map[string]bool{}
			for len(seen) < 2 {
				got, err := from.Ask(t.Context(), svc.TCP, netip.AddrPortFrom(vips[f], directPort))
				if err != nil {
					t.Fatalf("%s over %s: %v, after %v", from.Name(), f, err, seen)
				}
				seen[got.Name] = true
			}
		}
	}
}

// silent asks a few times, and fails if anything answers.
func (c *directCluster) silent(what string, p svc.Protocol, f svc.Family) {
	c.t.Helper()
	for range 4 {
		ctx, cancel := context.WithTimeout(c.t.Context(), 300*time.Millisecond)
		got, err := c.client.Ask(ctx, p, netip.AddrPortFrom(vips[f], directPort))
		cancel()
		if !testbed.Silent(err) {
			c.t.Errorf("%s over %s: %v, %v; want no answer", what, f, got, err)
		}
	}
}

// Source ranges hold wherever a packet goes, and let the client itself in.
func TestDirectSourceRanges(t *testing.T) {
	c := newDirectCluster(t, svc.TCP, "a", "b", "c")
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		own := netip.PrefixFrom(c.client.Addr(f), c.client.Addr(f).BitLen()).String()
		c.service.Spec.LoadBalancerSourceRanges = []string{own}
		c.apply(c.pods...)
		if seen := c.ask(svc.TCP, f, 40); len(seen) != 3 {
			t.Errorf("let in over %s: answers of %v", f, seen)
		}
		c.service.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", "2001:db8:51::/64"}
		c.apply(c.pods...)
		c.silent("not let in", svc.TCP, f)
		// A node that has not heard of the ranges passes on to ones that have.
		c.service.Spec.LoadBalancerSourceRanges = nil
		c.applyOn(c.nodes[0], c.pods[1:]...)
		c.silent("let in by the first node", svc.TCP, f)
	}
}

// A packet that was passed on goes no further, whatever the node that gets it thinks: it serves itself, or drops it. So does a
// packet that a client sends with so few hops left.
func TestDirectPassesOnOnce(t *testing.T) {
	c := newDirectCluster(t, svc.UDP, "a", "b", "c")
	ttl := func(n int) map[string]int {
		seen := map[string]int{}
		for range 30 {
			conn, err := c.client.Dial(t.Context(), svc.UDP, netip.AddrPortFrom(vips[svc.IPv4], directPort))
			if err != nil {
				t.Fatal(err)
			}
			if err := ipv4.NewConn(conn).SetTTL(n); err != nil {
				t.Fatal(err)
			}
			got, err := testbed.AskOn(conn)
			_ = conn.Close()
			if err != nil {
				t.Fatal(err)
			}
			seen[got.Name]++
		}
		return seen
	}
	if seen := ttl(8); len(seen) != 3 {
		t.Errorf("with 8 hops left: answers of %v, want all", seen)
	}
	if seen := ttl(7); len(seen) != 1 || seen["a0"] == 0 {
		t.Errorf("with 7 hops left: answers of %v, want answers of the node that gets the packets", seen)
	}
	// Each node takes another one's endpoint for the only one.
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		c.applyOn(c.nodes[0], c.pods[1])
		c.applyOn(c.nodes[1], c.pods[2])
		c.applyOn(c.nodes[2], c.pods[0])
		c.silent("nodes that do not agree", svc.UDP, f)
	}
}

// A flow of UDP goes to another node when its endpoint's has no more.
func TestDirectFlowsOfUDPMove(t *testing.T) {
	c := newDirectCluster(t, svc.UDP, "b", "c")
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		c.apply(c.pods...)
		conn, err := c.client.Dial(t.Context(), svc.UDP, netip.AddrPortFrom(vips[f], directPort))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		ask := func() string {
			got, err := testbed.AskOn(conn)
			if err != nil {
				t.Fatalf("over %s: %v", f, err)
			}
			return got.Name
		}
		first := ask()
		for range 5 {
			if again := ask(); again != first {
				t.Errorf("over %s: one socket had answers of %s and %s", f, first, again)
			}
		}
		c.apply(slices.DeleteFunc(slices.Clone(c.pods), func(p *testbed.Host) bool { return p.Name() == first })...)
		if then := ask(); then == first {
			t.Errorf("over %s: %s answered, which is no endpoint any more", f, then)
		}
	}
}

// An ICMP error about a flow that was passed on reaches its endpoint, here that a packet was too large for the way.
func TestDirectErrorsReachTheEndpoint(t *testing.T) {
	c := newDirectCluster(t, svc.UDP, "b", "c")
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		for seen := map[string]bool{}; len(seen) < len(c.pods); {
			conn, err := c.client.Dial(t.Context(), svc.UDP, netip.AddrPortFrom(vips[f], directPort))
			if err != nil {
				t.Fatal(err)
			}
			got, err := testbed.AskOn(conn)
			if err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(c.pods, func(p *testbed.Host) bool { return p.Name() == got.Name })
			c.client.Do(func() { sendTooBig(t, f, vips[f], got.Client) })
			testbed.Until(t, got.Name+" knows the size of the way to the client", func() (err error) {
				c.pods[i].Do(func() {
					if out := flows.Command(t, "", "ip", "route", "get", got.Client.Addr().String()); !strings.Contains(out, "mtu 1300") {
						err = errors.New(out)
					}
				})
				return err
			})
			seen[got.Name] = true
			_ = conn.Close()
		}
	}
}

// A flood of forged clients fills the memory of flows: only the hash decides about new ones, which see no difference.
func TestDirectMemoryIsFull(t *testing.T) {
	c := newDirectCluster(t, svc.TCP, "b", "c")
	flowsTable := nftables.Table{Family: nftables.IPv4, Name: direct.TableName}
	front := tables.AppendKey(nil, dataplane.FrontKey{Addr: vips[svc.IPv4], Port: directPort, Proto: svc.TCP})
	c.nodes[0].Do(func() {
		k, err := nftables.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = k.Close() }()
		const all, atOnce = 1 << 18, 1 << 14
		for i := 0; i < all; i += atOnce {
			b := nftables.NewBatch()
			for n := range uint32(atOnce) {
				client := binary.BigEndian.AppendUint32(slices.Clone(front), 10<<24|uint32(i)+n)
				b.AddElem(flowsTable, "flows", &nftables.Elem{Key: append(client, 0, 80, 0, 0), Data: make([]byte, 8), Timeout: 3600_000})
			}
			if err := k.Commit(b); err != nil {
				t.Fatal(err)
			}
		}
		b := nftables.NewBatch()
		b.AddElem(flowsTable, "flows", &nftables.Elem{Key: append(slices.Clone(front), 9, 9, 9, 9, 0, 80, 0, 0), Data: make([]byte, 8),
			Timeout: 3600_000})
		if err := k.Commit(b); !errors.Is(err, syscall.ENFILE) {
			t.Fatalf("one flow more: %v, want that the memory is full", err)
		}
	})
	if seen := c.ask(svc.TCP, svc.IPv4, 40); len(seen) != 2 {
		t.Errorf("answers of %v", seen)
	}
	c.echo("without memory", c.open(svc.IPv4, 10))
}

// sendTooBig sends what a router would that cannot pass a datagram from vip to the client on.
func sendTooBig(t *testing.T, f svc.Family, vip netip.Addr, client netip.AddrPort) {
	t.Helper()
	const mtu = 1300
	ports := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, directPort), client.Port())
	datagram := append(ports, 1460>>8, 1460&0xff, 0, 0)
	network, quoted := "ip4:icmp", []byte(nil)
	message := icmp.Message{Type: ipv4.ICMPTypeDestinationUnreachable, Code: 4}
	if f == svc.IPv4 {
		h := ipv4.Header{Version: 4, Len: ipv4.HeaderLen, TotalLen: 1500, TTL: 60, Protocol: int(svc.UDP),
			Src: vip.AsSlice(), Dst: client.Addr().AsSlice(), Flags: ipv4.DontFragment}
		var err error
		if quoted, err = h.Marshal(); err != nil {
			t.Fatal(err)
		}
		quoted = append(quoted, datagram...)
		// RFC 1191: the MTU is in the second half of what others leave unused.
		message.Body = &icmp.RawBody{Data: append([]byte{0, 0, mtu >> 8, mtu & 0xff}, quoted...)}
	} else {
		network = "ip6:ipv6-icmp"
		quoted = append([]byte{0x60, 0, 0, 0, 1460 >> 8, 1460 & 0xff, byte(svc.UDP), 60}, vip.AsSlice()...)
		quoted = append(append(quoted, client.Addr().AsSlice()...), datagram...)
		message = icmp.Message{Type: ipv6.ICMPTypePacketTooBig, Body: &icmp.PacketTooBig{MTU: mtu, Data: quoted}}
	}
	text, err := message.Marshal(nil)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial(network, vip.String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := conn.Write(text); err != nil {
		t.Fatal(err)
	}
}

// A node behind a router gets packets by VXLAN; too large ones are answered, so that the client sends less.
func TestDirectByVXLAN(t *testing.T) {
	c := newDirectCluster(t, svc.TCP, "b")
	a, b := c.nodes[0], c.nodes[1]
	for i, n := range []*directNode{a, b} {
		other := c.nodes[1-i]
		n.Do(func() {
			for _, args := range [][]string{
				{"link", "add", "vx", "type", "vxlan", "id", "7", "dstport", "4789", "local", n.Addr4().String(), "remote", other.Addr4().String(),
					"dev", "eth0"},
				{"link", "set", "vx", "up"},
				{"addr", "add", fmt.Sprintf("10.99.0.%d/24", i+1), "dev", "vx"},
				{"route", "replace", other.PodCIDR(svc.IPv4).String(), "via", fmt.Sprintf("10.99.0.%d", 2-i), "dev", "vx"},
			} {
				flows.Command(t, "", append([]string{"ip"}, args...)...)
			}
		})
		var via netip.Addr
		n.Do(func() { via = link.NextHop(netip.Addr{}, other.PodCIDR(svc.IPv4)) })
		if via != other.PodCIDR(svc.IPv4).Addr() {
			t.Fatalf("%s: the next hop to %s is %s", n.Name(), other.Name(), via)
		}
		n.builder.SetNextHops(map[string]table.NextHop{other.Name(): {IPv4: via}})
	}
	for _, n := range []*directNode{a, b} {
		tab, keys := n.builder.Build()
		n.Do(func() { flows.Apply(t, n.mode, tab, keys) })
	}
	c.ask(svc.TCP, svc.IPv4, 5)
	conn := c.open(svc.IPv4, 1)[0]
	sent := bytes.Repeat([]byte("x"), 200_000)
	go func() { _, _ = conn.Write(sent) }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, got); err != nil {
		t.Fatal(err)
	}
	c.client.Do(func() {
		if out := flows.Command(t, "", "ip", "route", "get", vips[svc.IPv4].String()); !strings.Contains(out, "mtu 1450") {
			t.Errorf("the client has not learnt the size of the way: %s", out)
		}
	})
}

// hasTable reports whether a node has a table of direct return.
func (n *directNode) hasTable(t *testing.T) (found bool) {
	n.Do(func() { found = strings.Contains(flows.Command(t, "", "nft", "list", "tables"), direct.TableName) })
	return found
}

// Open connections go on when direct return comes; without it, nothing is left of it. Cleanup leaves nothing, either.
func TestDirectComesAndGoes(t *testing.T) {
	c := newDirectCluster(t, svc.TCP, "b", "c")
	delete(c.service.Annotations, svc.ForwardingAnnotation)
	c.apply(c.pods...)
	for _, n := range c.nodes {
		if n.hasTable(t) {
			t.Errorf("node %s has a table that no Service needs", n.Name())
		}
	}
	conns := c.open(svc.IPv4, 10)
	c.service.Annotations = map[string]string{svc.ForwardingAnnotation: svc.ForwardingDirect}
	c.apply(c.pods...)
	c.echo("direct since", conns)
	c.ask(svc.TCP, svc.IPv4, 5)
	c.nodes[0].Do(func() {
		if err := Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if out := flows.Command(t, "", "nft", "list", "ruleset"); out != "" {
			t.Errorf("Cleanup left\n%s", out)
		}
	})
}

// The next process takes the table over, and connections go on; changes by another program are repaired.
func TestDirectRestartsAndRepairs(t *testing.T) {
	c := newDirectCluster(t, svc.TCP, "a", "b", "b", "c")
	a := c.nodes[0]
	conns := c.open(svc.IPv4, 20)
	want := ""
	a.Do(func() {
		want = flows.Dump(t, a.mode)
		_ = a.mode.Close()
		var err error
		if a.mode, err = New(Config{DropInvalid: true}); err != nil {
			t.Fatal(err)
		}
		k := &counting{kernel: a.mode.kernel.kernel}
		a.mode.kernel.kernel = k
		tab, _ := a.builder.Build()
		flows.Apply(t, a.mode, tab, nil)
		if got := flows.Dump(t, a.mode); got != want || k.commits != 0 {
			t.Errorf("%d transactions of the next process, and it has\n%s\nwant\n%s", k.commits, got, want)
		}
		// An administrator can read it.
		for _, family := range []string{"ip", "ip6"} {
			if out := flows.Command(t, "", "nft", "list", "table", family, direct.TableName); !strings.Contains(out, "dup to") {
				t.Errorf("nft shows\n%s", out)
			}
		}
		for _, damage := range [][]string{
			{"delete", "table", "ip", direct.TableName},
			{"flush", "map", "ip6", direct.TableName, "slots"},
			{"flush", "chain", "ip", direct.TableName, "passed-on"},
			{"add", "chain", "ip", direct.TableName, "foreign"},
			{"add", "element", "ip", direct.TableName, "hops", "{ 192.0.2.1 . 203.0.113.77 . tcp . 80 }"},
			{"add", "element", "ip", direct.TableName, "frontends", "{ 203.0.113.77 . tcp . 80 : 61 }"},
		} {
			flows.Command(t, "", append([]string{"nft"}, damage...)...)
			flows.Apply(t, a.mode, tab, nil)
			if got := flows.Dump(t, a.mode); got != want {
				t.Errorf("after %s:\n%s\nwant\n%s", damage, got, want)
			}
			if len(a.mode.Repaired()) == 0 {
				t.Errorf("%s was not reported", damage)
			}
		}
	})
	c.echo("after a restart and repairs", conns)
	c.ask(svc.TCP, svc.IPv6, 5)
}
