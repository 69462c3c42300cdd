package lb

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed/arp"
)

var (
	stormLength = flag.Duration("storm", time.Minute, "how long TestNeverTwoOwnersOnTheWire makes faults")
	stormSeed   = flag.Uint64("storm-seed", 0, "seed of its faults, 0 for a random one")
)

// overlap is how many of the last answers of one address are looked at: one is asked for
// every 20 ms. Two owners at one time answer every request both; a handover in good
// order is one change, or two if an answer was late.
const (
	overlap  = 12
	changes  = 6
	askEvery = 20 * time.Millisecond
)

// twoOwners returns the first moment at which two machines seem to have owned an
// address, by how often the one who answers changes.
func twoOwners(heard []arp.Claim) (string, bool) {
	var asked []arp.Claim
	for _, a := range heard {
		if a.Asked {
			asked = append(asked, a)
		}
	}
	for i := range asked {
		end := min(len(asked), i+overlap)
		n := 0
		for j := i + 1; j < end; j++ {
			if asked[j].MAC != asked[j-1].MAC {
				n++
			}
		}
		if n >= changes && asked[end-1].At.Sub(asked[i].At) < overlap*askEvery*2 {
			return fmt.Sprintf("%d changes between %x and %x from %s on", n, asked[i].MAC, asked[i+1].MAC, asked[i].At), true
		}
	}
	return "", false
}

func TestTwoOwnersAreFound(t *testing.T) {
	at := time.Now()
	var orderly, both []arp.Claim
	for i := range 40 {
		at = at.Add(askEvery)
		orderly = append(orderly, arp.Claim{MAC: arp.MAC{byte(i / 20)}, At: at, Asked: true})
		both = append(both, arp.Claim{MAC: arp.MAC{1}, At: at, Asked: true}, arp.Claim{MAC: arp.MAC{2}, At: at, Asked: true})
	}
	if what, found := twoOwners(orderly); found {
		t.Errorf("an orderly handover: %s", what)
	}
	if _, found := twoOwners(append(orderly, both[:10]...)); !found {
		t.Error("two machines that answer five requests both are not found")
	}
}

// Whatever happens to five speakers, of which each has another idea of how long a
// second is, and in each life another one of what time it is, no machine ever hears two
// of them answer for one address; and when it is over, each address is answered for.
func TestNeverTwoOwnersOnTheWire(t *testing.T) {
	t.Parallel()
	seed := *stormSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-storm-seed=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	b := newBed(t, 0)
	for i := range 5 {
		n := b.addNode(fmt.Sprint("n", i))
		n.args.Rate = 0.96 + 0.02*float64(i)
		n.shift(rng)
		n.start()
	}
	b.voters(5)
	var addrs []netip.Addr
	for i := range 5 {
		addrs = append(addrs, b.service(fmt.Sprint("web", i))...)
	}
	begin := time.Now()
	ended := make(chan struct{})
	var asking sync.WaitGroup
	asking.Go(func() {
		tick := time.NewTicker(askEvery)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
				for _, a := range addrs {
					b.wire.Ask(a)
				}
			}
		}
	})
	faults := map[string]int{}
	for time.Since(begin) < *stormLength {
		n := b.nodes[rng.IntN(len(b.nodes))]
		faults[b.fault(rng, n)]++
		<-time.After(time.Duration(rng.Int64N(int64(700 * time.Millisecond))))
	}
	for _, n := range b.nodes {
		n.heal()
	}
	owners := map[string]int{}
	for _, a := range addrs {
		owners[b.owner(a, b.nodes...).name]++
	}
	close(ended)
	asking.Wait()
	moves := 0
	for _, a := range addrs {
		heard := b.wire.Since(a, begin)
		for i := 1; i < len(heard); i++ {
			if heard[i].MAC != heard[i-1].MAC {
				moves++
			}
		}
		if what, found := twoOwners(heard); found {
			t.Errorf("%s has two owners: %s", a, what)
		}
	}
	t.Logf("faults %v; the addresses moved %d times; owners at the end %v", faults, moves, owners)
}

// fault does something to a node and returns what.
func (b *bed) fault(rng *rand.Rand, n *node) string {
	other := b.others(n)[rng.IntN(len(b.nodes)-1)]
	switch rng.IntN(12) {
	case 0, 1:
		if !n.stopped && !n.dead {
			n.kill9()
			n.dead = true
			n.shift(rng)
			return "killed"
		}
		n.revive()
		return "started"
	case 2, 3:
		if n.dead {
			return "none"
		}
		if n.stopped = !n.stopped; n.stopped {
			n.Signal(syscall.SIGSTOP)
			return "stopped"
		}
		n.Signal(syscall.SIGCONT)
		return "continued"
	case 4:
		n.cut(other.host) // in one direction
		return "cut off"
	case 5:
		n.cut(other.host)
		other.cut(n.host)
		return "cut off from each other"
	case 6:
		n.cut(b.api)
		return "cut off from the API"
	case 7, 8, 9, 10:
		for _, o := range append(b.others(n), &node{host: b.api}) {
			n.join(o.host)
		}
		return "joined"
	default: // without calm there are no owners, and nothing moves
		for _, n := range b.nodes {
			n.heal()
		}
		<-time.After(3 * time.Second)
		return "calm"
	}
}

// shift lets the clocks of the node's next process step. While a process runs they cannot:
// nothing sets CLOCK_BOOTTIME and CLOCK_MONOTONIC, and no decision is by another clock.
func (n *node) shift(rng *rand.Rand) { n.uptime = time.Duration(1+rng.IntN(1e6)) * time.Second }

// revive starts what was killed, and continues what was stopped.
func (n *node) revive() {
	if n.stopped {
		n.Signal(syscall.SIGCONT)
		n.stopped = false
	}
	if n.dead {
		n.dead = false
		n.start()
	}
}

func (n *node) heal() {
	for _, o := range append(n.bed.others(n), &node{host: n.bed.api}) {
		n.join(o.host)
	}
	n.revive()
}
