package reliability

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The long run breaks at random what the short one breaks in order, two things at a time now
// and then:
//
//	go test ./test/reliability -v -timeout 30m -args -soak 10m -seed $RANDOM
var (
	soak = flag.Duration("soak", 0, "how long faults are made at random, after each of them once")
	only = flag.String("only", "", "the part of a name that faults must have to be made")
	seed = flag.Uint64("seed", 1, "decides which machines have the faults, their order in a soak, and what clients write")
)

// Bounds of a fault's effect.
const (
	// quiet is how long no request may fail for a fault to count as over.
	quiet = 1500 * time.Millisecond
	// backstop is less than the 40 s after which a dead node's Lease takes its endpoints out:
	// what ends before it was found out by the other nodes.
	backstop = 30 * time.Second
)

// fault is what goes wrong, and how it is mended.
type fault struct {
	name string
	// begin returns what mends it. Clients in by are the only ones whose requests may fail, all
	// if it is nil.
	begin func() (mend func(), by []*node)
	// harmless is set if no request may fail at all.
	harmless bool
	// shows, which may be nil, returns nil once the tools show the fault. It is mended after that.
	shows func() error
	// alone is set if it is made without another one.
	alone bool
}

// faults are all of them, with machines chosen at random.
func (r *rig) faults(l *load, rnd *rand.Rand) []fault {
	return append(r.faultsOfNodes(l, rnd), r.faultsOfServers(rnd)...)
}

func (r *rig) faultsOfNodes(l *load, rnd *rand.Rand) []fault {
	next := rnd.IntN(len(r.nodes))
	anyNode := func() *node { // never the same for two faults at a time
		next = (next + 1) % len(r.nodes)
		return r.nodes[next]
	}
	return []fault{
		{name: "a Pod's process is killed", begin: func() (func(), []*node) {
			n := anyNode()
			pid, err := n.backend()
			if err != nil {
				r.t.Fatal(err)
			}
			l.held.loses(n, true)
			_ = syscall.Kill(pid, syscall.SIGKILL)
			l.held.loses(n, true)
			return func() {}, nil
		}},
		{name: "an agent is killed", harmless: true, begin: func() (func(), []*node) {
			n := anyNode()
			n.agent.Kill()
			return func() { r.startAgent(n) }, nil
		}},
		{name: "an agent is restarted", harmless: true, begin: func() (func(), []*node) {
			n := anyNode()
			n.agent.Stop()
			return func() { r.startAgent(n) }, nil
		}},
		{name: "an agent gets no processor", harmless: true, begin: func() (func(), []*node) { return starved(anyNode().agent), nil }},
		{name: "all agents are restarted, one after the other", harmless: true, alone: true, begin: func() (func(), []*node) {
			for _, n := range r.nodes {
				n.agent.Stop()
				r.startAgent(n)
				n.agent.Says("is up")
			}
			return func() {}, nil
		}},
		{name: "a node's link flaps", begin: func() (func(), []*node) {
			n := anyNode()
			for range 3 {
				n.host.Carrier(false)
				testbed.Until(r.t, "0.3 s without a link", elapsed(time.Now(), 300*time.Millisecond))
				n.host.Carrier(true)
				testbed.Until(r.t, "0.7 s with it", elapsed(time.Now(), 700*time.Millisecond))
			}
			return func() {}, nil
		}},
		{name: "a node loses power", begin: func() (func(), []*node) {
			n := anyNode()
			again := l.without(n)
			l.held.loses(n, false)
			powerOn := r.powerOff(n)
			l.held.loses(n, false)
			return func() {
				powerOn()
				n.agent.Says("is up")
				testbed.Until(r.t, "the Pod of "+n.host.Name(), func() error { return n.enters(r.t) })
				again()
			}, nil
		}},
		{name: "a node does not hear the servers, which hear it", harmless: true, alone: true, begin: func() (func(), []*node) {
			var all []*testbed.Host
			for _, s := range r.servers {
				all = append(all, s.host)
			}
			return r.deafen(anyNode().host, all...), nil
		}},
		r.brokenPath(anyNode),
	}
}

// starved stops a process without its knowledge until mend is called.
func starved(p *process.Process) (mend func()) {
	pid := p.Pid()
	_ = syscall.Kill(pid, syscall.SIGSTOP)
	return func() { _ = syscall.Kill(pid, syscall.SIGCONT) } // it may have been killed by another fault
}

// brokenPath is the loss of all packets from one node to another one. Each puts the other's endpoints last, and reports it.
func (r *rig) brokenPath(anyNode func() *node) fault {
	var a, b *node
	return fault{
		name: "a node does not hear another one, which hears it",
		begin: func() (func(), []*node) {
			a, b = anyNode(), anyNode()
			return r.deafen(a.host, b.host), []*node{a, b}
		},
		shows: func() error { return errors.Join(r.saysBroken(a, b), r.saysBroken(b, a)) },
	}
}

// saysBroken returns nil if the Node, an Event and 'fairlead status' show that a machine does not reach another one.
func (r *rig) saysBroken(at, to *node) error {
	client := r.servers[0].Client.CoreV1()
	pair := fmt.Sprintf("node %s gets no answer from ", at.host.Name())
	n, err := client.Nodes().Get(r.t.Context(), at.host.Name(), metav1.GetOptions{})
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == svc.PeersReached && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, pair+to.host.Name())
	}) {
		return fmt.Errorf("%s: conditions %v", n.Name, n.Status.Conditions)
	}
	events, err := client.Events("default").List(r.t.Context(), metav1.ListOptions{FieldSelector: "reason=PeerUnreached"})
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(events.Items, func(e corev1.Event) bool { return strings.Contains(e.Message, pair+"node "+to.host.Name()) }) {
		return fmt.Errorf("%s: no Event of it among %d", n.Name, len(events.Items))
	}
	out, err := process.Try(r.fairlead(r.servers[0].host, "status"))
	if !strings.Contains(out, pair+to.host.Name()) {
		return fmt.Errorf("fairlead status: %w: %s", err, out)
	}
	return nil
}

func (r *rig) faultsOfServers(rnd *rand.Rand) []fault {
	anyServer := func() *server { return r.servers[rnd.IntN(len(r.servers))] }
	killed := func(s *server) (func(), []*node) {
		s.Process.Kill()
		return func() { s.Start(r.t) }, nil
	}
	others := func(s *server) (out []*testbed.Host) {
		for _, o := range r.servers {
			if o != s {
				out = append(out, o.host)
			}
		}
		return out
	}
	return []fault{
		{name: "a server is killed", harmless: true, begin: func() (func(), []*node) { return killed(anyServer()) }},
		{name: "the server that leads etcd is killed", harmless: true, begin: func() (func(), []*node) { return killed(r.leader()) }},
		{name: "a server is restarted", harmless: true, begin: func() (func(), []*node) {
			s := anyServer()
			s.Process.Stop()
			return func() { s.Start(r.t) }, nil
		}},
		{name: "the server that leads etcd gets no processor", harmless: true, begin: func() (func(), []*node) {
			return starved(r.leader().Process), nil
		}},
		{name: "all servers are restarted, one after the other", harmless: true, alone: true, begin: func() (func(), []*node) {
			for _, s := range r.servers {
				s.Process.Stop()
				s.Start(r.t)
				s.AwaitReady(r.t)
			}
			return func() {}, nil
		}},
		{name: "the server that leads etcd is cut off from the others", harmless: true, begin: func() (func(), []*node) {
			s := r.leader()
			mend := []func(){r.deafen(s.host, others(s)...)}
			for _, o := range others(s) {
				mend = append(mend, r.deafen(o, s.host))
			}
			return func() {
				for _, m := range mend {
					m()
				}
			}, nil
		}},
		{name: "a server does not hear the other servers, which hear it", harmless: true, begin: func() (func(), []*node) {
			s := anyServer()
			return r.deafen(s.host, others(s)...), nil
		}},
		{name: "a server does not get 30 % of the packets to it", harmless: true, begin: func() (func(), []*node) {
			return r.loses(r.leader().host, "numgen random mod 100 < 30"), nil
		}},
	}
}

// TestFaults: requests to a Service with endpoints that live fail only for as long as it takes
// to find out what is dead, connections to such endpoints are never cut, acknowledged writes are kept, and the history of the API is
// linearizable.
func TestFaults(t *testing.T) {
	t.Logf("seed %d", *seed)
	rnd := rand.New(rand.NewPCG(*seed, 0))
	began := time.Now()
	r := newRig(t)
	defer r.stop()
	t.Logf("three servers and five nodes after %s", time.Since(began).Round(100*time.Millisecond))
	h := startHistory(r)
	l := startLoad(r)
	all := r.faults(l, rnd)
	all = slices.DeleteFunc(all, func(f fault) bool { return !strings.Contains(f.name, *only) })
	for _, f := range all {
		r.suffer(l, f, quiet)
	}
	for end := time.Now().Add(*soak); time.Now().Before(end); {
		f := all[rnd.IntN(len(all))]
		if rnd.IntN(3) == 0 {
			f = r.both(f, all[rnd.IntN(len(all))])
		}
		r.suffer(l, f, quiet+time.Duration(rnd.Int64N(int64(12*time.Second))))
	}
	l.end()
	t.Log(l.held.summary())
	h.check(t)
	t.Logf("checked after %s", time.Since(began).Round(100*time.Millisecond))
	asked, failed := l.count()
	t.Logf("%d requests, %d failed", asked, len(failed))
}

// both makes two faults at a time. Two servers that are not there are a loss of the quorum, which
// is its own fault.
func (r *rig) both(a, b fault) fault {
	ofServer := func(f fault) bool { return strings.Contains(f.name, "server") }
	if ofServer(a) && ofServer(b) || a.name == b.name || a.alone || b.alone {
		return a
	}
	return fault{
		name: a.name + ", and " + b.name, harmless: a.harmless && b.harmless,
		begin: func() (func(), []*node) {
			first, by1 := a.begin()
			second, by2 := b.begin()
			by := slices.Concat(by1, by2)
			if !a.harmless && by1 == nil || !b.harmless && by2 == nil {
				by = nil
			}
			return func() { second(); first() }, by
		},
	}
}

// suffer makes a fault and mends it after some time, and checks what clients see of it.
func (r *rig) suffer(l *load, f fault, lasts time.Duration) {
	t := r.t
	t.Helper()
	testbed.Until(t, "all clients to hold a connection", l.held.whole)
	asked, before := l.count()
	cut := len(l.held.cuts())
	begin := time.Now()
	mend, by := f.begin()
	testbed.Until(t, "some time of the fault", elapsed(begin, lasts))
	testbed.Until(t, "requests that are answered in spite of: "+f.name, l.quietSince(begin))
	if f.shows != nil {
		testbed.Until(t, "the tools to show: "+f.name, f.shows)
	}
	mended := time.Now()
	mend()
	testbed.Until(t, "the end of: "+f.name, l.quietSince(mended))
	testbed.Until(t, "all servers and nodes after: "+f.name, r.whole)
	now, after := l.count()
	through := l.held.through(begin, mended)
	failed := after[len(before):]
	var last time.Duration
	for _, q := range failed {
		last = max(last, q.end.Sub(begin))
	}
	t.Logf("%-62s %3d of %4d requests failed, the last after %s; %d connections held through; mended after %s, all was well %s later", f.name,
		len(failed), now-asked, last.Round(10*time.Millisecond), through, mended.Sub(begin).Round(10*time.Millisecond),
		time.Since(mended).Round(10*time.Millisecond))
	for i, q := range failed {
		allowed := !f.harmless && (by == nil || slices.ContainsFunc(by, func(n *node) bool { return strings.Contains(q.client, n.host.Name()) }))
		if !allowed && i < 10 {
			t.Errorf("%s: a request from %s failed after %s: %v", f.name, q.client, q.end.Sub(begin).Round(time.Millisecond), q.err)
		}
	}
	for _, q := range l.held.cuts()[cut:] {
		t.Errorf("%s: the connection from %s was cut after %s: %v", f.name, q.client, q.end.Sub(begin).Round(time.Millisecond), q.err)
	}
	if through == 0 {
		t.Errorf("%s: no connection was held through it", f.name)
	}
	if last > backstop {
		t.Errorf("%s: requests failed for %s", f.name, last)
	}
}

func elapsed(since time.Time, d time.Duration) func() error {
	return func() error {
		if left := d - time.Since(since); left > 0 {
			return fmt.Errorf("%s left", left)
		}
		return nil
	}
}
