package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/lb/speaker"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/testbed"
)

// A speaker that still waits for the API server ends at SIGTERM without an error.
func TestEndsWhileItStarts(t *testing.T) {
	inParallel(t)
	b := newBed(t, 1)
	n := b.nodes[0]
	n.Stop()
	n.cut(b.api)
	n.start()
	n.Stop()
}

// What a node may not answer for moves to another one, by itself and soon; and the
// address does not move when nothing is wrong with its node.
func TestTakeOver(t *testing.T) {
	inParallel(t)
	b := newBed(t, 3)
	b.voters(3)
	a := b.service("web")[0]
	owner := b.owner(a, b.nodes...)
	if m := b.event("web", "AddressAnnounced"); m == "" {
		t.Error("the Event has no message")
	}

	took := func(what string, begin time.Time, within time.Duration) {
		t.Helper()
		b.tookOver(what, a, owner, begin, within)
	}
	// The next owner keeps it when the one before is back, which votes from a second later on.
	keeps := func(back func()) {
		t.Helper()
		was, next := owner, b.owner(a, b.others(owner)...)
		back()
		b.voters(3)
		b.eligible(was)
		begin := time.Now()
		for time.Since(begin) < 2*quorum.Promise {
			if mac, ok := b.wire.Who(a); ok && mac != next.mac {
				t.Errorf("%x answers, %s has the address", mac, next.name)
			}
		}
		owner = next
	}

	owner = b.restartMovesNothing(a, owner)

	begin := time.Now()
	owner.kill9()
	took("kill -9", begin, expireWithin)
	keeps(owner.start)

	begin = time.Now()
	owner.run("ip", "link", "set", "eth0", "down")
	took("link down", begin, expireWithin)
	keeps(func() {
		owner.run("ip", "link", "set", "eth0", "up")
		owner.run("ip", "route", "replace", "default", "via", "192.168.77.1")
	})

	// One that does not return loses it, and at once if its node is drained.
	begin = time.Now()
	owner.Signal(syscall.SIGTERM)
	took("SIGTERM", begin, awayWithin)
	b.kept(a, owner, begin, speaker.AwayTime)
	if err := owner.Wait(); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	keeps(owner.start)
	owner.cordon(true)
	begin = time.Now()
	owner.Signal(syscall.SIGTERM)
	took("SIGTERM of a cordoned node", begin, releaseWithin)
	if err := owner.Wait(); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	owner.cordon(false)
	keeps(owner.start)

	begin = time.Now()
	owner.Signal(syscall.SIGSTOP)
	took("SIGSTOP", begin, expireWithin)
	keeps(func() { owner.Signal(syscall.SIGCONT) })

	begin = time.Now()
	owner.label(corev1.LabelNodeExcludeBalancers, true)
	took("exclude label", begin, releaseWithin)
	keeps(func() { owner.label(corev1.LabelNodeExcludeBalancers, false) })

	begin = time.Now()
	if err := os.WriteFile(owner.args.Unhealthy, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const confirmed = 3 * time.Second // of unhealthy answers
	took("an unhealthy proxy", begin, confirmed+releaseWithin)
	keeps(func() { b.must(os.Remove(owner.args.Unhealthy)) })

	// The API server is not needed to keep an address, nor to survive a death: without it the address is where it was after
	// the longest term that a speaker has, and another one takes it over. (On a busy machine it may have been elsewhere in between.)
	for _, n := range b.nodes {
		n.cut(b.api)
	}
	begin = time.Now()
	for time.Since(begin) < quorum.LongestTerm {
		b.wire.Who(a)
	}
	b.owner(a, owner)
	begin = time.Now()
	owner.kill9()
	took("kill -9 while the API server is away", begin, expireWithin)
	keeps(func() {
		for _, n := range b.nodes {
			n.join(b.api)
		}
		owner.start()
	})

	// Cut off from the other speakers it falls silent, and another one takes over.
	begin = time.Now()
	for _, o := range b.others(owner) {
		owner.cut(o.host)
	}
	took("a partition", begin, expireWithin)
	keeps(func() {
		for _, o := range b.others(owner) {
			owner.join(o.host)
		}
	})
}

// With two speakers the API server decides when one dies, and one alone needs none.
func TestTwoSpeakersAndOne(t *testing.T) {
	inParallel(t)
	b := newBed(t, 2)
	b.voters(3)
	var addrs []netip.Addr
	for i := range 4 {
		addrs = append(addrs, b.service(fmt.Sprint("web", i))...)
	}
	for _, a := range addrs {
		b.owner(a, b.nodes...)
	}
	// The second one to die holds the witness, since it has just been alone.
	for _, dead := range b.nodes {
		begin := time.Now()
		dead.kill9()
		for _, a := range addrs {
			b.tookOver("kill -9 of one of two", a, dead, begin, expireWithin)
		}
		dead.start()
		b.rebalanced("it to have an address again", func() error {
			for _, a := range addrs {
				if mac, ok := b.wire.Who(a); ok && mac == dead.mac {
					return nil
				}
			}
			return errors.New("it has none")
		})
	}
	owners := map[*node]int{}
	testbed.Until(t, "both to have addresses again", func() error {
		clear(owners)
		for _, a := range addrs {
			owners[b.owner(a, b.nodes...)]++
		}
		if len(owners) != 2 {
			return fmt.Errorf("%d node has all", len(owners))
		}
		return nil
	})
}

// Policy Local: nodes with a ready endpoint alone announce.
func TestPolicyLocal(t *testing.T) {
	inParallel(t)
	b := newBed(t, 3)
	b.voters(3)
	a := b.service("local", func(s *corev1.Service) {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	})[0]
	api := b.client.DiscoveryV1().EndpointSlices("default")
	slice, err := api.Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "local-1", Labels: map[string]string{discoveryv1.LabelServiceName: "local"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}, metav1.CreateOptions{})
	b.must(err)
	for _, i := range []int{2, 0, 1, 2} {
		slice.Endpoints = []discoveryv1.Endpoint{
			{Addresses: []string{"10.244.9.9"}, NodeName: &b.nodes[i].name},
			{Addresses: []string{"10.244.9.8"}, NodeName: &b.nodes[(i+1)%3].name, Conditions: discoveryv1.EndpointConditions{Ready: new(false)}},
		}
		slice, err = api.Update(t.Context(), slice, metav1.UpdateOptions{})
		b.must(err)
		b.owner(a, b.nodes[i])
	}
	slice.Endpoints = nil
	_, err = api.Update(t.Context(), slice, metav1.UpdateOptions{})
	b.must(err)
	testbed.Until(t, "no speaker to announce it", func() error {
		list, err := b.lb.Speakers.List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, s := range list.Items {
			if slices.ContainsFunc(s.Status.Addresses, func(x v1.AnnouncedAddress) bool { return x.Address == a.String() }) {
				return fmt.Errorf("%s does", s.Name)
			}
		}
		return nil
	})
	b.silence(a)
}

// A machine outside of the cluster that has an address of the pool is reported.
func TestForeignOwner(t *testing.T) {
	inParallel(t)
	b := newBed(t, 1)
	printer := b.net.Outside("printer")
	taken := netip.MustParseAddr("192.168.77.150")
	for _, args := range [][]string{{"ip", "address", "add", taken.String() + "/24", "dev", "eth0"}} {
		if out, err := printer.Command(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	got := b.service("web", func(s *corev1.Service) { s.Spec.LoadBalancerIP = taken.String() })
	if !slices.Equal(got, []netip.Addr{taken}) {
		t.Fatalf("the Service has %s", got)
	}
	t.Log(b.event("web", "AddressConflict"))
	testbed.Until(t, "the condition of the Speaker", func() error {
		s, err := b.lb.Speakers.Get(t.Context(), b.nodes[0].name, metav1.GetOptions{})
		if err == nil && (len(s.Status.Conditions) != 1 || !strings.Contains(s.Status.Conditions[0].Message, "answers for "+taken.String())) {
			err = fmt.Errorf("%+v", s.Status.Conditions)
		}
		return err
	})
	for range 20 {
		if mac, ok := b.wire.Who(taken); ok && mac == b.nodes[0].mac {
			t.Fatal("the node answers for it")
		}
	}
	// Nor does it report that it does.
	other := b.service("other")[0]
	testbed.Until(t, "the other address in the Speaker object", func() error {
		s, err := b.lb.Speakers.Get(t.Context(), b.nodes[0].name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		reported := func(a netip.Addr) bool {
			return slices.ContainsFunc(s.Status.Addresses, func(x v1.AnnouncedAddress) bool { return x.Address == a.String() })
		}
		if reported(taken) {
			t.Fatalf("it is reported as announced: %+v", s.Status.Addresses)
		}
		if !reported(other) {
			return fmt.Errorf("%+v", s.Status.Addresses)
		}
		return nil
	})
}
