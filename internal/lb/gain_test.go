package lb

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// An address is new if its claim was made while the speaker was watching.
func TestNewAddresses(t *testing.T) {
	k := newKnown("a", newProxying(SpeakerOptions{}, nil))
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

// An address that the voters have promised before the proxy has programmed it is announced as soon as it has.
func TestUnprogrammedAddressIsLookedAtSoon(t *testing.T) {
	a, web := netip.MustParseAddr("192.0.2.1"), svc.Name{Namespace: "default", Name: "web"}
	now, ready := 2*quorum.Promise, false
	s := &Speaker{
		announce: announce.New(announce.Options{}), node: quorum.NewNode("a", 0, randomNumber),
		since: map[netip.Addr]*ownership{a: {}}, waiting: map[netip.Addr]struct{}{a: {}},
	}
	s.known = newKnown("a", newProxying(SpeakerOptions{}, nil))
	s.proxying = s.known.proxying
	s.o.Now = func() time.Duration { return now }
	s.o.Programmed = func(svc.PortName, svc.Family, netip.Addr) bool { return ready }
	s.node.SetList(now, quorum.List{Version: 1, Voters: []quorum.Voter{{Name: "a"}}})
	s.node.Want(now, []netip.Addr{a}, nil)
	s.known.claims[a] = claim{services: []svc.Name{web}}
	s.known.services[web] = &announced{addrs: []netip.Addr{a}, ports: []svc.PortName{{Name: web}}}
	if s.gain(); s.since[a].taken || s.pause() > programmedPoll {
		t.Errorf("it is taken: %t; looked at again after %s", s.since[a].taken, s.pause())
	}
	ready = true
	if s.gain(); !s.since[a].taken || s.pause() <= programmedPoll {
		t.Errorf("it is taken: %t; looked at again after %s", s.since[a].taken, s.pause())
	}
}

func TestQuota(t *testing.T) {
	var q quota
	begin, taken := time.Now(), 0
	for i := range 10 * quotaSize {
		if q.take(begin.Add(time.Duration(i) * time.Millisecond)) {
			taken++
		}
	}
	if taken != quotaSize {
		t.Errorf("%d are taken, want %d", taken, quotaSize)
	}
	if !q.take(begin.Add(quotaPeriod)) {
		t.Error("nothing is taken in the next period")
	}
}

// What does not fit the Speaker object is counted, and the rest can be written.
func TestStatusIsBounded(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, stop := r.run(nil) // it defines the kind, and would delete the object of a node that is not there
	stop()
	var status v1.SpeakerStatus
	for i := range 3 * v1.MaxAnnounced {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String()
		status.Addresses = append(status.Addresses, v1.AnnouncedAddress{Address: a, Via: "arp", Since: metav1.NowMicro()})
		status.Networks = append(status.Networks, a+"/32")
	}
	status.VoterVersion = 7
	bound(&status)
	s := speakerStatus{want: status, dirty: true}
	r.must(s.flush(t.Context(), r.lb, "n1"))
	got, err := r.lb.Speakers.Get(t.Context(), "n1", metav1.GetOptions{})
	r.must(err)
	if got.Status.VoterVersion != 7 || got.Status.AddressCount != 3*v1.MaxAnnounced || len(got.Status.Addresses) != v1.MaxAnnounced {
		t.Errorf("list %d, %d of %d addresses", got.Status.VoterVersion, len(got.Status.Addresses), got.Status.AddressCount)
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
