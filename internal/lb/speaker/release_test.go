package speaker

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/lb/wire"
	"github.com/fairlead/fairlead/internal/lb/witness"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// aloneWith returns a speaker that is the only voter and has an address of a Service, and sets what its clock shows.
func aloneWith(t *testing.T, a netip.Addr) (s *Speaker, clock *time.Duration) {
	t.Helper()
	web := svc.Name{Namespace: "default", Name: "web"}
	now := 2 * quorum.Promise
	clock = &now
	node, known := quorum.NewNode("a", 0, randomNumber), NewKnown("a", noFront{})
	s = &Speaker{node: node, known: known, announcer: announce.New(announce.Options{}), links: newLinks(slog.New(slog.DiscardHandler))}
	s.o.Now, s.o.NodeName, s.o.Front = func() time.Duration { return *clock }, "a", noFront{}
	s.holdings = &holdings{
		now: s.o.Now, node: node, known: known, forwards: &forwarding{front: noFront{}}, announcer: s.announcer,
		since: map[netip.Addr]*ownership{}, waiting: map[netip.Addr]struct{}{}, guests: map[netip.Addr]struct{}{}, began: now,
	}
	node.SetList(now, quorum.List{Version: 1, Voters: []quorum.Voter{{Name: "a"}}})
	known.claims[a] = claimed{Claim: claim.Claim{Services: []svc.Name{web}}}
	known.services[web] = &announced{addrs: []netip.Addr{a}}
	one := known.one(a)
	s.holdings.want(&one)
	node.Want(now, []netip.Addr{a}, nil)
	if s.holdings.gain(); !s.holdings.since[a].taken {
		t.Fatal("it is not taken")
	}
	return s, clock
}

// An address that the first speaker of a cluster got is given to a node that joins a moment later, and not to one that joins next
// month.
func TestOnlyYoungSpeakersEvenOut(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.1")
	s, now := aloneWith(t, a)
	if s.holdings.keeps(a) {
		t.Error("a speaker that has just begun keeps it")
	}
	for end := *now + evenPeriod; *now < end; *now += quorum.Heartbeat {
		s.node.Tick(*now)
	}
	if !s.holdings.keeps(a) {
		t.Error("a minute later it does not keep it")
	}
}

// A new address has that reason although a node ended in the meantime. The others that wait may be what it had.
func TestReasonsWhenANodeEnds(t *testing.T) {
	had, made := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")
	s, _ := aloneWith(t, netip.MustParseAddr("192.0.2.1"))
	for addr, at := range map[netip.Addr]time.Time{had: {}, made: time.Now().Add(time.Hour)} {
		s.known.claims[addr] = claimed{made: at}
		one := s.known.one(addr)
		s.holdings.want(&one)
	}
	s.holdings.lastOf("b")
	if o := s.holdings.since[made]; o.reason != newAddress || !o.early {
		t.Errorf("the new one: %+v", o)
	}
	if o := s.holdings.since[had]; o.reason != "node b no longer announces" || o.early {
		t.Errorf("what the node may have had: %+v", o)
	}
}

// While routers take their time with withdrawals a speaker goes on to vote, so that it keeps what it has for its next process.
func TestVotesWhileRoutersWithdraw(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.1")
	s, now := aloneWith(t, a)
	keys := [][]byte{make([]byte, claim.KeyBytes)}
	conn, err := wire.Listen("a", netip.MustParseAddrPort("127.0.0.1:0"), keys, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	withdrawn, slow := make(chan struct{}), *now+2*quorum.Promise
	tick := func() time.Duration { // the time that passes between two looks at it
		if *now += 50 * time.Millisecond; *now >= slow {
			close(withdrawn)
			slow = 1 << 62
		}
		return *now
	}
	s.o.Now = tick
	s.votes = &votes{name: "a", now: tick, node: s.node, wire: conn, sent: prometheus.NewCounter(prometheus.CounterOpts{Name: "sent"}),
		witness: witness.New(witness.Options{Now: tick})}
	deadline := make(chan struct{})
	close(deadline)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.voteOn(withdrawn, deadline, func() bool { return true })
	}()
	testbed.Receive(t, "the end of the votes", ended)
	if !s.node.Holds(*now, a) {
		t.Error("it has lost the address while routers withdrew it")
	}
}

// A speaker is expected back only if the API server is there, for which its next process would wait.
func TestReturnsOnlyToAnAPIServer(t *testing.T) {
	s, _ := aloneWith(t, netip.MustParseAddr("192.0.2.1"))
	node := &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(node)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	s.o.Client = client
	s.known.self = node
	s.health.ok, s.health.asked = true, true
	testbed.Until(t, "the speaker to be expected back", func() error { // the time for one answer is short
		if !s.returns(t.Context()) {
			return errors.New("it is not")
		}
		return nil
	})
	server.Close()
	if s.returns(t.Context()) {
		t.Error("it is expected back although the API server is away")
	}
}

// A restarted speaker whose API server is busy keeps its addresses. One that is cordoned, or whose server does not answer at all, does
// not.
func TestReturnsToABusyServer(t *testing.T) {
	answer := make(chan corev1.Node, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case n := <-answer:
			<-time.After(releaseTimeout + 200*time.Millisecond)
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(&n)
		case <-r.Context().Done():
		}
	}))
	defer server.Close()
	s, _ := aloneWith(t, netip.MustParseAddr("192.0.2.1"))
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	s.o.Client = client
	s.health.set(true, "")
	n := corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	answer <- n
	if !s.returns(t.Context()) {
		t.Error("a slow answer counts as none")
	}
	n.Spec.Unschedulable = true
	answer <- n
	if s.returns(t.Context()) {
		t.Error("a cordoned node is restarted")
	}
	if s.returns(t.Context()) {
		t.Error("a server that does not answer does not count as away")
	}
}
