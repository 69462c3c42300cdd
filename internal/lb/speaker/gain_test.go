package speaker

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// noFront serves no Service.
type noFront struct{}

func (noFront) SetService(*corev1.Service)      {}
func (noFront) DropService(svc.Name)            {}
func (noFront) SetMesh()                        {}
func (noFront) NoMesh() string                  { return "" }
func (noFront) SetClaim(netip.Addr, []svc.Name) {}
func (noFront) SetNode(*corev1.Node)            {}
func (noFront) Listed()                         {}
func (noFront) Serves(svc.Name) bool            { return false }
func (noFront) Absent() []v1.AbsentEndpoint     { return nil }
func (noFront) Gateways() *v1.ServedGateways    { return nil }
func (noFront) Ready(svc.Name) bool             { return true }
func (noFront) Run(context.Context)             {}

// An address is new if its claim was made while the speaker was watching.
func TestNewAddresses(t *testing.T) {
	k := NewKnown("a", noFront{})
	claims := sink(k, k.setClaim, k.dropClaim)
	made := func(name string) *networkingv1.IPAddress {
		return &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	old, late := made("192.0.2.1"), made("192.0.2.2")
	claims.Replace([]*networkingv1.IPAddress{old})
	claims.Set(late)
	claims.Set(old)
	claims.Replace([]*networkingv1.IPAddress{old, late})
	for _, a := range k.take(true) {
		if want := a.addr.String() == late.Name; a.fresh != want {
			t.Errorf("%s: new is %t, want %t", a.addr, a.fresh, want)
		}
	}
}

// An address is announced for every Service that its claim lists, whatever blanks there are: the controller holds it for
// all of them.
func TestClaimWithBlanks(t *testing.T) {
	a, web, mail := netip.MustParseAddr("192.0.2.1"), svc.Name{Namespace: "a", Name: "web"}, svc.Name{Namespace: "a", Name: "mail"}
	k := NewKnown("a", noFront{})
	k.setClaim(&networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: a.String(), Annotations: map[string]string{
		svc.ClaimServicesAnnotation: "a/web, a/mail"}}})
	for _, n := range []svc.Name{web, mail} {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: n.Namespace, Name: n.Name}}
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: a.String()}}
		k.setService(s)
	}
	if got := k.one(a).services; !slices.Equal(got, []svc.Name{web, mail}) {
		t.Errorf("it is announced for %v", got)
	}
}

// An address that the voters have promised before the proxy has programmed it is announced as soon as it has.
func TestUnprogrammedAddressIsLookedAtSoon(t *testing.T) {
	a, web := netip.MustParseAddr("192.0.2.1"), svc.Name{Namespace: "default", Name: "web"}
	now, ready := 2*quorum.Promise, false
	node, known := quorum.NewNode("a", 0, randomNumber), NewKnown("a", noFront{})
	clock := func() time.Duration { return now }
	forwards := &forwarding{noFront{}, func(svc.PortName, svc.Family, netip.Addr) bool { return ready }}
	h := &holdings{
		now: clock, node: node, known: known, forwards: forwards, announcer: announce.New(announce.Options{}),
		since: map[netip.Addr]*ownership{a: {}}, waiting: map[netip.Addr]struct{}{a: {}},
	}
	s := &Speaker{node: node, known: known, holdings: h}
	s.o.Now = clock
	s.node.SetList(now, quorum.List{Version: 1, Voters: []quorum.Voter{{Name: "a"}}})
	s.node.Want(now, []netip.Addr{a}, nil)
	known.claims[a] = claimed{Claim: claim.Claim{Services: []svc.Name{web}}}
	known.services[web] = &announced{addrs: []netip.Addr{a}, ports: []svc.PortName{{Name: web}}}
	if h.gain(); h.since[a].taken || s.pause() > programmedPoll {
		t.Errorf("it is taken: %t; looked at again after %s", h.since[a].taken, s.pause())
	}
	ready = true
	if h.gain(); !h.since[a].taken || s.pause() <= programmedPoll {
		t.Errorf("it is taken: %t; looked at again after %s", h.since[a].taken, s.pause())
	}
}

// Replies with the interfaces of 1,000 nodes that run many pods each fit a datagram, and arrive whole.
func TestMembersFitDatagram(t *testing.T) {
	m := &quorum.Message{Kind: quorum.Reply, HasMembers: true}
	for i := range 1000 {
		var links []link.Interface
		for pod := range 30 {
			links = append(links, link.Interface{Name: fmt.Sprintf("cali%08x", pod), MAC: [6]byte{2, 3, byte(pod)}})
		}
		mac := func(n byte) (out [6]byte) {
			sum := sha256.Sum256([]byte{n, byte(i), byte(i >> 8)})
			return [6]byte(sum[:6])
		}
		links = append(links,
			link.Interface{Name: "enp3s0", MAC: mac(1), Networks: []netip.Prefix{netip.MustParsePrefix("192.168.100.0/22")}},
			link.Interface{Name: "named", MAC: mac(2)})
		attrs := encodeLinks(links, false, []string{"named"})
		if !strings.Contains(attrs, "named") || !strings.Contains(attrs, "enp3s0") || strings.Contains(attrs, "cali") {
			t.Fatalf("interfaces %s", attrs)
		}
		m.Members = append(m.Members, quorum.Member{Name: fmt.Sprintf("worker-%03d", i), Attrs: attrs})
	}
	b := m.Append(nil)
	if len(b) > 65000 {
		t.Errorf("%d bytes", len(b))
	}
	if back, err := quorum.ParseMessage(b); err != nil || !slices.Equal(back.Members, m.Members) {
		t.Errorf("it is not read back: %v", err)
	}
	if _, err := quorum.ParseMessage(b[:len(b)-9]); err == nil {
		t.Error("a part of it is accepted")
	}
	m.Members = m.Members[:200] // builds that know no compression read these
	if plain := m.Append(nil); !bytes.Contains(plain, []byte("worker-007")) || !bytes.Contains(plain, []byte("worker-199")) {
		t.Error("200 members are compressed")
	}
}
