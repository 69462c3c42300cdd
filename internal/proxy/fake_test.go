package proxy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/table"
)

// fakeDataplane is an Applier without a kernel. Like a real one it keeps state that
// others can damage, writes only the keys that changed, and panics if a caller
// forgets one.
type fakeDataplane struct {
	dataplane.Changes
	mu       sync.Mutex
	kernel   map[table.Key]string
	addrs    string
	synced   bool // the last Apply wrote all but what it rejected
	reject   map[table.Key]error
	behind   map[table.Key]bool // rejected
	repaired []string
	calls    []call
	slow     time.Duration // what one Apply takes
	fail     func() error  // asked by every Apply, may be nil
	busy     bool
}

type call struct {
	at      time.Time
	full    bool
	changed int
	err     error
}

func newFakeDataplane() *fakeDataplane {
	return &fakeDataplane{Changes: dataplane.NewChanges(), kernel: map[table.Key]string{}, behind: map[table.Key]bool{}}
}

// oneInTen fails at random, as a kernel under memory pressure does.
func oneInTen(seed uint64) func() error {
	r := rand.New(rand.NewPCG(seed, seed))
	return func() error {
		if r.IntN(10) == 0 {
			return errors.New("netlink: no buffer space available")
		}
		return nil
	}
}

func (p *fakeDataplane) Apply(_ context.Context, t *table.Table, changed []table.Key) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy {
		panic("two Applies at once")
	}
	p.busy = true
	defer func() { p.busy = false }()
	if p.slow > 0 {
		p.mu.Unlock()
		time.Sleep(p.slow) // inside a synctest bubble
		p.mu.Lock()
	}
	err := p.apply(t, changed)
	var rejected *dataplane.Rejected
	p.synced = err == nil || errors.As(err, &rejected)
	p.calls = append(p.calls, call{time.Now(), changed == nil, len(changed), err})
	return err
}

func (p *fakeDataplane) apply(t *table.Table, changed []table.Key) error {
	if changed != nil && !p.synced {
		panic("changed keys after an error or before the first Apply")
	}
	var failed error
	if p.fail != nil {
		failed = p.fail()
	}
	p.repaired = nil
	keys := changed
	if changed == nil {
		all := map[table.Key]bool{}
		for k := range p.kernel {
			all[k] = true
		}
		for port := range t.All() {
			all[port.Key()] = true
		}
		keys = slices.Collect(maps.Keys(all))
	}
	var rejected dataplane.Rejections
	for i, k := range keys {
		if failed != nil && i%2 == 0 {
			continue // half of it goes wrong
		}
		delete(p.behind, k)
		if err := p.reject[k]; err != nil {
			rejected.Add(k, err)
			p.behind[k] = true
			continue
		}
		have, want := p.kernel[k], ""
		if port := t.Get(k); port != nil {
			want = port.String()
		}
		switch {
		case have == want:
		case want == "":
			delete(p.kernel, k)
		default:
			p.kernel[k] = want
			if changed == nil {
				p.repaired = append(p.repaired, fmt.Sprintf("service port %s %s", k.ID, k.Family))
			}
		}
	}
	if failed != nil {
		return failed
	}
	p.addrs = fmt.Sprint(t.NodePortAddrs)
	for port := range t.All() {
		if p.kernel[port.Key()] != port.String() && !p.behind[port.Key()] {
			panic(fmt.Sprintf("%v differs and is not among the changed", port.Key()))
		}
	}
	return rejected.Err()
}

func (p *fakeDataplane) Repaired() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.repaired
}

func (p *fakeDataplane) Dump(context.Context) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	lines := slices.Sorted(maps.Values(p.kernel))
	return strings.Join(lines, ""), nil
}

func (p *fakeDataplane) Close() error { return nil }

func (p *fakeDataplane) log() []call {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls)
}

func (p *fakeDataplane) set(f func(*fakeDataplane)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(p)
}
