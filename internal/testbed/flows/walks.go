package flows

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Inside runs f in an empty network namespace with a new Applier of a mode.
type Inside func(t testing.TB, f func(p dataplane.Applier))

// Dump is an Applier's Dump.
func Dump(t testing.TB, p dataplane.Applier) string {
	t.Helper()
	d, err := p.Dump(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Apply is an Applier's Apply, which is to go well.
func Apply(t testing.TB, p dataplane.Applier, tab *table.Table, changed []table.Key) {
	t.Helper()
	if err := p.Apply(t.Context(), tab, changed); err != nil {
		t.Fatal(err)
	}
}

// Command runs a command in the namespace of the calling thread.
func Command(t testing.TB, stdin string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

// Golden compares text with a file in testdata, or writes it.
func Golden(t testing.TB, update bool, name, got string) {
	t.Helper()
	file := "testdata/" + name
	if update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s (-want +got), rewrite with -update:\n%s", file, d)
	}
}

// routeLoopback leaves the calling thread's network namespace as any Table with a frontend
// on 127.0.0.1 does: the guard against other machines then belongs to every Table.
func routeLoopback(t testing.TB) {
	t.Helper()
	if err := sysctl.Write("net/ipv4/conf/all/route_localnet", "1"); err != nil {
		t.Fatal(err)
	}
}

// Fresh is the dump of each Table written into an empty kernel in which 127.0.0.0/8 is routed.
func Fresh(t testing.TB, inside Inside, tabs []*table.Table) []string {
	var out []string
	for _, tab := range tabs {
		inside(t, func(p dataplane.Applier) {
			routeLoopback(t)
			Apply(t, p, tab, nil)
			out = append(out, Dump(t, p))
		})
	}
	return out
}

// repairer is a mode that can say what it put right.
type repairer interface{ Repaired() []string }

// RandomWalk goes from any of tabs to any other, by changes or by a full
// comparison, by one process or its successor, and fails unless the kernel has
// what a fresh start would give. successor makes another Applier where the test
// runs now.
func RandomWalk(t testing.TB, steps int, tabs []*table.Table, inside Inside, successor func() dataplane.Applier) {
	t.Helper()
	want := Fresh(t, inside, tabs)
	inside(t, func(p dataplane.Applier) {
		routeLoopback(t)
		r := rand.New(rand.NewPCG(1, 2))
		at := table.New()
		Apply(t, p, at, nil)
		for step := range steps {
			i := r.IntN(len(tabs))
			how := Changes(at, tabs[i])
			switch r.IntN(6) {
			case 0:
				how = nil
			case 1:
				p = successor()
				defer func() { _ = p.Close() }()
			}
			Apply(t, p, tabs[i], how)
			at = tabs[i]
			if d := cmp.Diff(want[i], Dump(t, p)); d != "" {
				t.Fatalf("step %d, to state %d with %d changes (-fresh +here):\n%s", step, i, len(how), d)
			}
			if r, ok := p.(repairer); ok && len(r.Repaired()) > 0 {
				t.Fatalf("step %d repaired its own work: %q", step, r.Repaired())
			}
		}
	})
}

// Converge walks among tabs, whose dumps are want, with an Applier whose work is
// made to fail now and then, as a caller does that keeps to the contract of
// Applier. It fails unless that leads to the same end.
func Converge(t testing.TB, steps int, tabs []*table.Table, want []string, p dataplane.Applier) {
	t.Helper()
	routeLoopback(t)
	r := rand.New(rand.NewPCG(3, 4))
	at, known := table.New(), false
	behind := map[table.Key]bool{} // refused, or not yet written
	for step := range steps {
		i := r.IntN(len(tabs))
		for _, k := range Changes(at, tabs[i]) {
			behind[k] = true
		}
		at = tabs[i]
		for try := 0; !known || len(behind) > 0 || try == 0; try++ {
			var how []table.Key
			if known {
				how = []table.Key{}
				for k := range behind {
					how = append(how, k)
				}
			}
			err := p.Apply(t.Context(), at, how)
			var refused *dataplane.Rejected
			known = err == nil || errors.As(err, &refused)
			if known {
				clear(behind)
			}
			if refused != nil {
				for k := range refused.Ports {
					behind[k] = true
				}
			}
			if try == 20 {
				t.Fatalf("step %d: still %v", step, err)
			}
		}
		if d := cmp.Diff(want[i], Dump(t, p)); d != "" {
			t.Fatalf("step %d, to state %d (-fresh +here):\n%s", step, i, d)
		}
	}
}

// OneBadPort shows that a port which cannot be written costs none of the
// others, and is named. has and hasNot are parts of the dump for the good and
// the bad one.
func OneBadPort(t testing.TB, inside Inside, has, hasNot string) {
	t.Helper()
	good := Port("good", "", svc.IPv4, svc.TCP, table.Frontend{Addr: AP("10.96.0.1:80"), Endpoints: Endpoints("10.0.0.1:80")})
	bad := Port("bad", "", svc.IPv4, svc.TCP, table.Frontend{Addr: AP("10.96.0.2:80"), Endpoints: Endpoints("[fd00::1]:80")})
	more := Port("more", "", svc.IPv4, svc.TCP, table.Frontend{Addr: AP("10.96.0.3:80"), Endpoints: Endpoints("10.0.0.1:80")})
	inside(t, func(p dataplane.Applier) {
		for _, how := range [][]table.Key{nil, {good.Key(), bad.Key()}, nil} {
			err := p.Apply(t.Context(), table.New(good, bad), how)
			var refused *dataplane.Rejected
			if !errors.As(err, &refused) || len(refused.Ports) != 1 || !strings.Contains(err.Error(), "default/bad") {
				t.Errorf("changed %v: %v, want an error that names default/bad alone", how, err)
			} else if _, named := refused.Ports[bad.Key()]; !named {
				t.Errorf("changed %v: refused %v, want the key of default/bad", how, refused.Ports)
			}
			if d := Dump(t, p); !strings.Contains(d, has) || strings.Contains(d, hasNot) {
				t.Errorf("the kernel has\n%s", d)
			}
		}
		// Others change without the bad one being named again.
		Apply(t, p, table.New(good, bad, more), []table.Key{more.Key()})
		Apply(t, p, table.New(good), []table.Key{bad.Key(), more.Key()})
		Apply(t, p, table.New(good), nil)
	})
}

// StopsWithItsContext shows that an Apply whose context has ended says so, and
// that the next one does all of it; has is a part of the dump then.
func StopsWithItsContext(t testing.TB, p dataplane.Applier, has string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Apply(ctx, EveryField(), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("Apply = %v, want that it was cancelled", err)
	}
	Apply(t, p, EveryField(), []table.Key{})
	if d := Dump(t, p); !strings.Contains(d, has) {
		t.Errorf("an Apply after one that failed did not do all of it:\n%s", d)
	}
}

// Repair writes tab, lets damage be done, and shows that the next full Apply
// puts it right and says so (say is a part of what it says), once.
func Repair(t testing.TB, p dataplane.Applier, tab *table.Table, damage func(), say string) {
	t.Helper()
	repaired := p.(repairer).Repaired
	Apply(t, p, tab, nil)
	if r := repaired(); len(r) != 0 {
		t.Errorf("the first Apply repaired %q", r)
	}
	before := Dump(t, p)
	damage()
	if before == Dump(t, p) {
		t.Fatal("the damage does not show")
	}
	Apply(t, p, tab, nil)
	if d := cmp.Diff(before, Dump(t, p)); d != "" {
		t.Errorf("(-before +repaired):\n%s", d)
	}
	if r := strings.Join(repaired(), "\n"); !strings.Contains(r, say) {
		t.Errorf("Repaired says\n%s\nwant something about %q", r, say)
	}
	Apply(t, p, tab, nil)
	if r := repaired(); len(r) != 0 {
		t.Errorf("repaired again: %q", r)
	}
}

// AdoptionUnderLoad shows that what was written goes on working without a
// process, and that its successor takes it over without a packet lost
// (behaviour 50).
func AdoptionUnderLoad(t *testing.T, create Factory) {
	e := NewEnv(t, create)
	other := Port("other", "", svc.IPv4, svc.TCP, table.Frontend{Addr: AP("10.96.1.1:80"), Endpoints: Endpoints("10.244.9.9:80")})
	e.Apply(t, e.Stable(other), nil)
	e.UnderLoad(t, func() {
		for i := range 15 {
			if err := e.Dataplane.Close(); err != nil {
				t.Error(err)
			}
			e.Node.Do(func() { e.Dataplane = create(t, e.Node) })
			if i%2 == 0 {
				e.Apply(t, e.Stable(), nil)
			} else {
				e.Apply(t, e.Stable(other), nil)
			}
		}
	})
}

// ChurnUnderLoad lets endpoints of the Service under load come and go: no client
// but their own connections notices, and no frontend leads nowhere.
func ChurnUnderLoad(t *testing.T, create Factory) {
	e := NewEnv(t, create)
	e.Apply(t, e.Stable(), nil)
	e.UnderLoad(t, func() {
		start := time.Now()
		for i := 0; time.Since(start) < 1500*time.Millisecond; i++ {
			for q := range e.Stable().All() {
				p := *q
				p.Frontends = slices.Clone(p.Frontends)
				all := p.Frontends[0].Endpoints
				n := i % len(all)
				p.Frontends[0].Endpoints = slices.Delete(slices.Clone(all), n, n+i%2)
				e.Apply(t, table.New(&p), []table.Key{p.Key()})
			}
		}
	})
}
