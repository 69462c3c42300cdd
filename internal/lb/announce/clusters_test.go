package announce

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
)

// Of two clusters on one network that have the same address in their pools one answers for it, whichever was first or
// won; the other one reports that and keeps silent, and takes the address when it is free.
func TestTwoClusters(t *testing.T) {
	n := testbed.NewNetwork(t)
	client := newStation(t, n.Outside("client"))
	quick := func(a *Announcer) {
		a.probeWait, a.newWait, a.conflictRetry = 100*time.Millisecond, 50*time.Millisecond, 400*time.Millisecond
	}
	nodes := []*bed{startWith(t, n.Host("one"), quick), startWith(t, n.Host("two"), quick)}
	const leaves = 0 // the one whose owner gives it up
	for i, a := range []netip.Addr{addresses()[0], addresses()[1], addresses()[0].Next()} {
		for _, b := range nodes {
			b.TakeNew(nil, a) // at the same time
		}
		var winner, loser *bed
		testbed.Until(t, "one of the clusters to answer", func() error {
			for at, b := range nodes {
				o := nodes[1-at]
				if len(b.Where(a)) == 1 && len(o.Where(a)) == 0 && slices.ContainsFunc(o.Conflicts(), func(c Conflict) bool {
					return c.Addr == a && c.MAC == b.mac && c.Held
				}) && (i == leaves || o.holdOff(a)) {
					winner, loser = b, o
					return nil
				}
			}
			return fmt.Errorf("one: %s %v, two: %s %v", nodes[0].Where(a), nodes[0].Conflicts(), nodes[1].Where(a), nodes[1].Conflicts())
		})
		client.owners(a)
		for asked := 0; asked < 10 && i != leaves; {
			client.ask(a)
			testbed.Until(t, "an answer", func() error {
				for _, mac := range client.owners(a) {
					if mac != winner.mac {
						t.Fatalf("%s answers beside %s", mac, winner.mac)
					}
					asked++
				}
				if asked == 0 {
					return fmt.Errorf("none")
				}
				return nil
			})
		}
		reported := false
		for len(loser.conflicts) > 0 {
			c := <-loser.conflicts
			reported = reported || c.Addr == a && c.Held
		}
		if !reported {
			t.Errorf("%s: the other cluster does not report it", a)
		}
		if i != leaves {
			continue
		}
		winner.Leave(a)
		testbed.Until(t, "the other cluster to take it", func() error {
			if len(loser.Where(a)) == 0 || slices.ContainsFunc(loser.Conflicts(), func(c Conflict) bool { return c.Held }) {
				return fmt.Errorf("it does not: %v", loser.Conflicts())
			}
			return nil
		})
	}
}

// holdOff puts the next probe for an address off, during which the owner must not be stalled, and reports whether
// it is not used.
func (b *bed) holdOff(a netip.Addr) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.entries[a]
	if e.state == active {
		return false
	}
	e.due = time.Now().Add(testbed.Patience)
	return true
}
