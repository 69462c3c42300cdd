package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/peers"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// watchedNode is a Node that takes part, at these addresses.
func watchedNode(name string, addrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{svc.PeerWatchAnnotation: "true"}}}
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = 10250 // where nothing listens
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

// A machine that answers ICMP, one that only rejects connections, and one that answers by one of its families alone, are
// alive; one that drops everything has never been heard.
func TestPeersHear(t *testing.T) {
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	for _, a := range []string{"192.0.2.1/32", "192.0.2.2/32", "192.0.2.3/32", "192.0.2.4/32", "2001:db8::3/128"} {
		run("ip", "address", "add", a, "dev", "lo")
	}
	run("nft", `table inet peers { chain in { type filter hook input priority 0;
		ip daddr 192.0.2.1 tcp dport 10250 drop
		ip daddr 192.0.2.2 icmp type echo-request drop
		ip daddr { 192.0.2.3, 192.0.2.4 } drop
		}
	}`)
	t.Cleanup(func() { run("nft", "delete", "table", "inet", "peers") })
	p := NewPeers(fake.NewClientset(), "here", slog.New(slog.NewTextHandler(t.Output(), nil)), func() {})
	p.Set(watchedNode("here", "192.0.2.9"))
	heard := func() (out []string) {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.watch.Answered()
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	for _, round := range []struct{ nodes, want []string }{
		{[]string{"a 192.0.2.1", "b 192.0.2.2", "d 192.0.2.4"}, []string{"a", "b"}},
		{[]string{"c 192.0.2.3 2001:db8::3", "e 127.0.0.1", "a 192.0.2.1"}, []string{"a", "c"}},
	} {
		for _, name := range []string{"a", "b", "d"} {
			p.Unset(name)
		}
		for _, text := range round.nodes {
			var name string
			addrs := make([]string, 2)
			_, _ = fmt.Sscan(text, &name, &addrs[0], &addrs[1])
			p.Set(watchedNode(name, addrs...))
		}
		testbed.Until(t, fmt.Sprint(round.want, " to be heard"), func() error {
			if got := heard(); !slices.Equal(got, round.want) {
				return fmt.Errorf("%v are", got)
			}
			return nil
		})
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The Lease is renewed at once, and once, when the Node is suspected and when what it reports changes; never else before
// its time.
func TestLeaseAnswersAndReports(t *testing.T) {
	var unreachable []string
	inBubble(t, Options{Unreachable: func() []string { return unreachable }}, func(w *world) {
		lease := func() (at time.Time, report string) {
			l, err := w.client.CoordinationV1().Leases(leaseNamespace).Get(w.t.Context(), "here", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return l.Spec.RenewTime.Time, l.Annotations[svc.UnreachableAnnotation]
		}
		writes := func() (n int) {
			for _, a := range w.client.Actions() {
				if a.GetResource().Resource == "leases" && (a.GetVerb() == "patch" || a.GetVerb() == "update") {
					n++
				}
			}
			return n
		}
		w.settle(2*renewPeriod + time.Second)
		before, _ := lease()
		count := writes()
		annotate := func(key, value string) {
			patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, key, value)
			if _, err := w.client.CoreV1().Nodes().Patch(context.Background(), "here", types.MergePatchType, []byte(patch),
				metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
			w.settle(time.Second)
		}
		annotate(svc.SuspectedAnnotation, "now")
		after, _ := lease()
		if !after.After(before) || writes() != count+1 {
			t.Errorf("suspected: the lease was renewed at %s, and is at %s, in %d writes", before, after, writes()-count)
		}
		for _, names := range [][]string{{"a", "b"}, {"b"}, nil} {
			count = writes()
			unreachable = names
			annotate("wakes", fmt.Sprint(len(names)))
			if _, report := lease(); report != map[int]string{2: "a,b", 1: "b", 0: ""}[len(names)] || writes() != count+1 {
				t.Errorf("%v: the lease reports %q after %d writes", names, report, writes()-count)
			}
		}
		count = writes()
		annotate("wakes", "for nothing")
		if writes() != count {
			t.Error("the lease is written though nothing changed")
		}
	})
}

// A node that is not reached stays so while its Node is Unknown, until it answers or is no more. It is not reported meanwhile,
// and its silence does not count when another one falls silent.
func TestLostUntilItAnswers(t *testing.T) {
	p := NewPeers(fake.NewClientset(), "here", slog.New(slog.DiscardHandler), func() {})
	now := time.Hour
	p.now = func() time.Duration { return now }
	for _, name := range []string{"here", "a", "b", "c"} {
		p.Set(watchedNode(name)) // without an address, so that only pass answers
	}
	var running sync.WaitGroup
	pass := func(d time.Duration, answering ...string) {
		for end := now + d; now < end; now += peers.Step {
			p.tick(t.Context(), &running)
			for _, name := range answering {
				p.watch.Heard(now, name)
			}
		}
	}
	want := func(when string, unreached, unreachable, told []string) {
		t.Helper()
		if !slices.Equal(p.unreached, unreached) || !slices.Equal(p.unreachable, unreachable) || !slices.Equal(p.broken.told, told) {
			t.Errorf("%s: not reached are %v, unreachable %v, told of %v; want %v, %v, %v",
				when, p.unreached, p.unreachable, p.broken.told, unreached, unreachable, told)
		}
	}
	b := []string{"b"}
	pass(5*time.Second, "a", "b", "c")
	pass(4*time.Second, "a", "c")
	want("silent", b, b, nil)
	dead := watchedNode("b")
	dead.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
	p.Set(dead)
	pass(2*tellAfter, "a", "c")
	want("Unknown", b, nil, nil)
	p.Unset("c")
	pass(4*time.Second, "a")
	pass(4 * time.Second)
	want("the only other one is silent, too", []string{"a", "b"}, []string{"a"}, nil)
	pass(4*time.Second, "a", "b")
	want("both answer", nil, nil, nil)
	pass(4*time.Second, "a")
	p.Unset("b")
	pass(time.Second, "a")
	want("the Node is deleted", nil, nil, nil)
}

// A node that stops answering while another one answers is not reached within 2.5 s; the condition and an Event name
// it, and once it answers again it is reached. When no node answers nothing changes.
func TestUnreached(t *testing.T) {
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	for _, a := range []string{"198.51.100.1/32", "198.51.100.2/32"} {
		run("ip", "address", "add", a, "dev", "lo")
	}
	drop := func(addrs string) {
		t.Helper()
		run("nft", "add table inet cut; delete table inet cut")
		if addrs != "" {
			run("nft", "table inet cut { chain in { type filter hook input priority 0; ip daddr { "+addrs+" } drop; }; }")
		}
	}
	t.Cleanup(func() { drop("") })
	client := fake.NewClientset()
	turns := make(chan struct{}, 100)
	p := NewPeers(client, "here", slog.New(slog.NewTextHandler(t.Output(), nil)), func() { turns <- struct{}{} })
	for name, addr := range map[string]string{"here": "198.51.100.9", "a": "198.51.100.1", "b": "198.51.100.2"} {
		p.Set(watchedNode(name, addr))
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	heard := func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if got := p.watch.Answered(); len(got) != 2 {
			return fmt.Errorf("only %v answer", got)
		}
		return nil
	}
	unreached := func(want ...string) func() error {
		return func() error {
			if got := p.Unreached(); !slices.Equal(got, want) {
				return fmt.Errorf("not reached are %v, want %v", got, want)
			}
			return nil
		}
	}
	told := func(status corev1.ConditionStatus, reason string) func() error {
		return func() error {
			c := p.Condition()
			if c.Status != status || status == corev1.ConditionFalse && !strings.Contains(c.Message, "here gets no answer from b:") {
				return fmt.Errorf("the condition is %v", c)
			}
			list, err := client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
			if err != nil || !slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
				return e.Reason == reason && e.InvolvedObject.Name == "here" && strings.Contains(e.Message, "node b")
			}) {
				return fmt.Errorf("events %v, %w", list.Items, err)
			}
			return nil
		}
	}
	testbed.Until(t, "both to answer", heard)
	begin := time.Now()
	drop("198.51.100.2")
	testbed.Until(t, "b not to be reached", unreached("b"))
	t.Logf("a node that does not answer is not reached after %s", time.Since(begin))
	<-turns
	testbed.Until(t, "the condition and an Event", told(corev1.ConditionFalse, reasonPeerUnreached))
	drop("198.51.100.1, 198.51.100.2")
	begin = time.Now()
	testbed.Until(t, "a to be silent for long", func() error {
		if left := 3*peers.Period - time.Since(begin); left > 0 {
			return fmt.Errorf("%s are left", left)
		}
		return nil
	})
	if err := unreached("b")(); err != nil {
		t.Errorf("no node answers: %v", err)
	}
	begin = time.Now()
	drop("")
	testbed.Until(t, "b to be reached", unreached())
	t.Logf("a node that answers again is reached after %s", time.Since(begin))
	testbed.Until(t, "the end of the condition and an Event", told(corev1.ConditionTrue, reasonPeerReached))
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// In a large cluster a node asks 64 others every second. One of the rest that stops answering is not reached as soon as a connection
// to one of its Pods has no answer; one that answers itself, with a Pod that does not, is reached.
func TestUnreachedBeyond(t *testing.T) {
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	p := NewPeers(fake.NewClientset(), "here", slog.New(slog.NewTextHandler(t.Output(), nil)), func() {})
	p.Set(watchedNode("here", "203.0.113.254"))
	const nodes = peers.MaxAsked + 6
	for i := 1; i <= nodes; i++ {
		n := watchedNode(fmt.Sprint("n", i), fmt.Sprint("203.0.113.", i))
		n.Spec.PodCIDRs = []string{fmt.Sprintf("10.99.%d.0/24", i)}
		p.Set(n)
		run("ip", "address", "add", fmt.Sprintf("203.0.113.%d/32", i), "dev", "lo")
	}
	run("ip", "route", "add", "local", "10.99.0.0/16", "dev", "lo")
	t.Cleanup(func() {
		run("ip", "route", "delete", "local", "10.99.0.0/16", "dev", "lo")
		for i := 1; i <= nodes; i++ {
			run("ip", "address", "delete", fmt.Sprintf("203.0.113.%d/32", i), "dev", "lo")
		}
	})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	var dead, well string
	testbed.Until(t, "all to be known", func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if have := len(p.beyond.answered); have < nodes-peers.MaxAsked {
			return fmt.Errorf("%d of %v are", have, p.beyond.names)
		}
		dead, well = p.beyond.names[0], p.beyond.names[1]
		return nil
	})
	pod := func(node string) string { return "10.99." + node[1:] + ".5" }
	run("nft", "table inet cut { chain in { type filter hook input priority 0; ct state new ip daddr { "+pod(dead)+", "+pod(well)+
		" } drop; ip daddr 203.0.113."+dead[1:]+" drop; }; }")
	t.Cleanup(func() { run("nft", "delete", "table", "inet", "cut") })
	begin := time.Now()
	var asking sync.WaitGroup
	for _, node := range []string{dead, well} {
		asking.Go(func() {
			d := net.Dialer{}
			if c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(pod(node), "80")); err == nil {
				_ = c.Close()
				t.Errorf("the Pod of %s answers", node)
			}
		})
	}
	testbed.Until(t, dead+" not to be reached", func() error {
		if got := p.Unreached(); !slices.Equal(got, []string{dead}) {
			return fmt.Errorf("not reached are %v", got)
		}
		return nil
	})
	t.Logf("a node that is not asked every second is not reached after %s", time.Since(begin))
	begin = time.Now()
	testbed.Until(t, "some time in which the other one could be lost", func() error {
		if left := 3*peers.Period - time.Since(begin); left > 0 {
			return fmt.Errorf("%s are left", left)
		}
		return nil
	})
	if got := p.Unreached(); !slices.Equal(got, []string{dead}) {
		t.Errorf("not reached are %v", got)
	}
	run("nft", "flush", "table", "inet", "cut")
	testbed.Until(t, dead+" to be reached", func() error {
		if got := p.Unreached(); len(got) > 0 {
			return fmt.Errorf("not reached are %v", got)
		}
		return nil
	})
	stop()
	asking.Wait()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// An address belongs to the node whose Pods' range has it, of either family. A Node that claims the address of another one takes neither
// that node's Pods from it nor its address for itself.
func TestOwnersBeyond(t *testing.T) {
	nodes := map[string]peer{}
	for i, name := range []string{"victim", "thief"} {
		n := watchedNode(name, "203.0.113.1", "2001:db8::1")
		n.Spec.PodCIDRs = []string{fmt.Sprintf("10.99.%d.0/24", i), fmt.Sprintf("fd00:99:%d::/64", i)}
		nodes[name] = peerOf(n)
	}
	for _, up := range [][]string{{"victim", "thief"}, {"thief", "victim"}} {
		var b beyond
		b.set("here", nil, up, nodes)
		owner := b.ownersOf()
		for addr, want := range map[string]string{
			"10.99.0.5": "victim", "fd00:99:0::5": "victim", "10.99.1.5": "thief", "fd00:99:1::5": "thief",
			"203.0.113.1": "", "2001:db8::1": "", "10.99.2.5": "", "192.0.2.1": "",
		} {
			if got := owner(netip.MustParseAddr(addr)); got != want {
				t.Errorf("%v: %s is of %q, want %q", up, addr, got, want)
			}
		}
	}
}
