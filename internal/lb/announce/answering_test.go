package announce

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/testbed"
)

// An interface that comes up is not used before its network answers (metallb/metallb#1710), unless no other node may
// announce.
func TestNetworkAnswersFirst(t *testing.T) {
	n := testbed.NewNetwork(t)
	silent := []netip.Addr{netip.MustParseAddr("192.168.77.150"), netip.MustParseAddr("fd00:77::96")}
	other := newStation(t, n.Host("other"))
	for i, what := range []string{"another speaker by ARP", "another speaker by NDP", "the gateway", "no other speaker"} {
		t.Run(what, func(t *testing.T) {
			h := n.Host(fmt.Sprint("node", i))
			alone, known := what == "no other speaker", atomic.Bool{}
			neighbour := silent[i%2]
			for _, family := range []string{"-4", "-6"} { // whose gateway answers
				_ = h.Command(t.Context(), "ip", family, "route", "del", "default").Run()
			}
			if what == "the gateway" { // and a speaker on another network
				if err := h.Command(t.Context(), "ip", "route", "add", "default", "via", "192.168.77.151").Run(); err != nil {
					t.Fatal(err)
				}
				neighbour = netip.MustParseAddr("10.99.0.1")
			}
			a := New(Options{
				May:      func(_ netip.Addr, send func()) bool { send(); return true },
				IsPeer:   func(MAC) bool { return false },
				Conflict: func(Conflict) {},
				Neighbours: func() ([]netip.Addr, bool) {
					if alone {
						return nil, known.Load()
					}
					return []netip.Addr{neighbour}, known.Load()
				},
				Log: slog.New(slog.DiscardHandler),
			})
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() {
				h.Do(func() {
					if err := a.Run(ctx); err != nil {
						t.Error(err)
					}
				})
			})
			defer running.Wait()
			defer cancel()
			uses := func() error {
				if links := a.Links(); len(links) != 1 || links[0].Name != "eth0" || len(a.Unanswered()) > 0 {
					return fmt.Errorf("it uses %+v; %s do not answer", links, a.Unanswered())
				}
				return nil
			}
			waits := func() error {
				if names := a.Unanswered(); !slices.Equal(names, []string{"eth0"}) || len(a.Links()) > 0 {
					return fmt.Errorf("it waits for %q and uses %+v", names, a.Links())
				}
				return nil
			}
			testbed.Until(t, "the interface to be found", waits)
			known.Store(true)
			if alone {
				testbed.Until(t, "the interface to be used", uses)
				return
			}
			target := neighbour
			if what == "the gateway" {
				target = netip.MustParseAddr("192.168.77.151")
			}
			asked := 0
			testbed.Until(t, "the network to be asked", func() error {
				other.mu.Lock()
				defer other.mu.Unlock()
				for _, q := range other.seen {
					if !q.answer && q.target == target {
						asked++
					}
				}
				if other.seen = nil; asked < 3 {
					return fmt.Errorf("%s was asked for %d times", target, asked)
				}
				return nil
			})
			if err := waits(); err != nil {
				t.Error(err)
			}
			held := netip.MustParseAddr("192.168.77.210").Next()
			a.Take(nil, held)
			if err := other.Command(t.Context(), "ip", "addr", "add", target.String(), "dev", "eth0").Run(); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			testbed.Until(t, "the interface to be used", uses)
			if took := time.Since(began); took > askLimit/2 {
				t.Errorf("it is used after %s", took)
			}
			testbed.Until(t, "the address to be answered for", func() error {
				if !slices.Equal(a.Where(held), []string{"eth0"}) {
					return errors.New("it is not")
				}
				return nil
			})
		})
	}
}

// Only an interface where nothing has answered is reported when its time is over.
func TestLateAnswerIsNoWarning(t *testing.T) {
	for _, answered := range []bool{false, true} {
		var log bytes.Buffer
		a := New(Options{
			Neighbours: func() ([]netip.Addr, bool) { return []netip.Addr{netip.MustParseAddr("192.0.2.1")}, true },
			Log:        slog.New(slog.NewTextHandler(&log, nil)),
		})
		now := time.Now()
		n := &newLink{link: link.Interface{Index: 1, Name: "eth0"}, since: now.Add(-2 * askLimit)}
		n.answered.Store(answered)
		a.newLinks[1] = n
		a.ask(now)
		if len(a.newLinks) > 0 {
			t.Errorf("answered %t: the interface is not used", answered)
		}
		if warned := strings.Contains(log.String(), "level=WARN"); warned == answered {
			t.Errorf("answered %t: %s", answered, &log)
		}
	}
}
