package dataplane_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

var ap, eps = flows.AP, flows.Endpoints

func addrs(list []table.Endpoint) []netip.AddrPort {
	var out []netip.AddrPort
	for _, e := range list {
		out = append(out, e.Addr)
	}
	return out
}

func TestReslotKeepsPlaces(t *testing.T) {
	a, b, c, d := "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1"
	for _, tc := range []struct {
		name            string
		old, want, slot []table.Endpoint
	}{
		{"from nothing", nil, eps(a, b), eps(a, b)},
		{"to nothing", eps(a, b), nil, nil},
		{"the last fills the gap", eps(a, b, c, d), eps(a, c, d), eps(a, d, c)},
		{"a new one fills the gap", eps(a, b, c), eps(a, c, d), eps(a, d, c)},
		{"a new one at the end", eps(b, c), eps(a, b, c), eps(b, c, a)},
		{"holes left by others", []table.Endpoint{{}, eps(b)[0]}, eps(a, b), eps(a, b)},
		{"one found twice", eps(b, b), eps(a, b), eps(b, a)},
	} {
		if got := dataplane.Reslot(tc.old, tc.want); !slices.Equal(addrs(got), addrs(tc.slot)) {
			t.Errorf("%s: %v, want %v", tc.name, addrs(got), addrs(tc.slot))
		}
	}
}

// Whatever the lists, the result has each wanted endpoint once, and no more
// slots change than must.
func TestReslotProperties(t *testing.T) {
	list := rapid.Custom(func(t *rapid.T) []table.Endpoint {
		var out []table.Endpoint
		for _, n := range rapid.SliceOfNDistinct(rapid.IntRange(1, 12), 0, 12, rapid.ID).Draw(t, "hosts") {
			out = append(out, table.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 80)})
		}
		return out
	})
	rapid.Check(t, func(t *rapid.T) {
		old, want := list.Draw(t, "old"), list.Draw(t, "want")
		slices.SortFunc(want, func(a, b table.Endpoint) int { return a.Addr.Compare(b.Addr) })
		got := dataplane.Reslot(old, want)
		sorted := slices.SortedFunc(slices.Values(got), func(a, b table.Endpoint) int { return a.Addr.Compare(b.Addr) })
		if !slices.Equal(addrs(sorted), addrs(want)) {
			t.Fatalf("Reslot(%v, %v) = %v", addrs(old), addrs(want), addrs(got))
		}
		for i, e := range old {
			if i < len(got) && got[i].Addr != e.Addr && slices.Contains(addrs(want), e.Addr) {
				t.Fatalf("%v lost its slot %d in %v", e.Addr, i, addrs(got))
			}
		}
	})
}

func TestValidateNamesTheFault(t *testing.T) {
	port := func(p svc.Protocol, f ...table.Frontend) *table.ServicePort {
		return flows.Port("web", "", svc.IPv4, p, f...)
	}
	ok := port(svc.TCP, table.Frontend{Addr: ap("10.96.0.1:80"), Endpoints: eps("10.0.0.1:1")})
	if err := dataplane.Validate(ok, "some"); err != nil {
		t.Error(err)
	}
	if err := dataplane.Validate(port(1), "some"); err == nil {
		t.Error("a protocol without ports: no error")
	}
	for name, f := range map[string]table.Frontend{
		"family":          {Addr: ap("[fd00::1]:80")},
		"mapped":          {Addr: netip.AddrPortFrom(netip.MustParseAddr("::ffff:10.0.0.1"), 80)},
		"port":            {Addr: ap("10.96.0.1:0")},
		"endpoint family": {Addr: ap("10.96.0.1:80"), Endpoints: eps("[fd00::1]:80")},
		"endpoint port":   {Addr: ap("10.96.0.1:80"), LocalClients: eps("10.0.0.1:0")},
		"too many":        {Addr: ap("10.96.0.1:80"), Endpoints: slices.Repeat(eps("10.0.0.1:1"), table.MaxEndpoints+1)},
	} {
		if err := dataplane.Validate(port(svc.TCP, f), "some"); err == nil || !strings.Contains(err.Error(), "default/web") {
			t.Errorf("%s: %v, want an error that names the port", name, err)
		}
	}
}

func TestParseBalance(t *testing.T) {
	for s, want := range map[string]dataplane.Balance{"": dataplane.Random, "random": dataplane.Random, "roundrobin": dataplane.RoundRobin} {
		if b, err := dataplane.ParseBalance(s); err != nil || b != want {
			t.Errorf("ParseBalance(%q) = %v, %v", s, b, err)
		}
	}
	if _, err := dataplane.ParseBalance("rr"); err == nil {
		t.Error("rr is not a balance")
	}
}

// The first by name has a frontend, in whichever order they come and go, and one
// that is as the Table has it before one that is not.
func TestPlanOwners(t *testing.T) {
	at := table.Frontend{Kind: table.ExternalIP, Addr: ap("203.0.113.1:80")}
	var ports []*table.ServicePort
	for _, n := range []string{"a", "b", "c"} {
		ports = append(ports, flows.Port(n, "", svc.IPv4, svc.TCP, at))
	}
	fk := dataplane.KeyOf(svc.TCP, &at)
	rapid.Check(t, func(t *rapid.T) {
		p := dataplane.NewPlan("some", svc.IPv4)
		outdated := map[table.Key]bool{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			port := rapid.SampledFrom(ports).Draw(t, "port")
			k := port.Key()
			invalid := *port
			invalid.Protocol = 99
			next := rapid.SampledFrom([]*table.ServicePort{port, nil, &invalid}).Draw(t, "to")
			was, dirty := p.Port(k), dataplane.Dirty{}
			var rejected dataplane.Rejections
			tab := table.New()
			if next != nil {
				tab = table.New(next)
			}
			p.Update(tab, []table.Key{k}, dirty, &rejected)
			outdated[k] = next == &invalid && was != nil
			if _, is := dirty[fk]; is != (was != nil || next == port) {
				t.Fatalf("dirty %v from %v to %v", is, was, next)
			}
			var want *table.ServicePort
			for _, late := range []bool{false, true} {
				for _, q := range ports {
					if want == nil && p.Port(q.Key()) != nil && outdated[q.Key()] == late {
						want = q
					}
				}
			}
			if got, _ := p.Wanted(fk); got != want {
				t.Fatalf("%v has it, want %v", got, want)
			}
		}
	})
}

// A frontend that was rejected is dirty again with its port, even if that has
// another one by then, and with no other port.
func TestRejectedFrontendsComeAgain(t *testing.T) {
	first := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.1:80")})
	second := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.2:80")})
	other := flows.Port("other", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ap("10.96.0.3:80")})
	p := dataplane.NewPlan("some", svc.IPv4)
	update := func(port *table.ServicePort) dataplane.Dirty {
		dirty := dataplane.Dirty{}
		var rejected dataplane.Rejections
		p.Update(table.New(port), []table.Key{port.Key()}, dirty, &rejected)
		return dirty
	}
	update(first)
	old := dataplane.KeyOf(svc.TCP, &first.Frontends[0])
	c := p.ChangeOf(update(second))
	c.Reject(old, errors.New("no"))
	if c.RejectedPorts()[first.Key()] == nil || len(c.Errs()) > 0 || !c.Partial() {
		t.Errorf("the port of the rejected frontend is not named: %v", c.RejectedPorts())
	}
	if _, again := update(other)[old]; again {
		t.Error("the rejected frontend came with another port")
	}
	if _, again := update(second)[old]; !again {
		t.Error("the rejected frontend did not come again")
	}
	if _, again := update(second)[old]; again {
		t.Error("the rejected frontend came once more, though it was not rejected again")
	}
	c = p.ChangeOf(dataplane.Dirty{old: {}})
	c.Reject(old, errors.New("no"))
	if len(c.RejectedPorts()) > 0 || len(c.Errs()) != 1 {
		t.Errorf("rejected %v, errors %v for a frontend of no port, want one error", c.RejectedPorts(), c.Errs())
	}
}

// A caller finds what was rejected, unless something else went wrong.
func TestErrorsNameWhatIsKnown(t *testing.T) {
	key := func(n int) table.Key { return table.Key{ID: svc.PortName{Port: fmt.Sprint(n)}} }
	var r dataplane.Rejections
	if err := dataplane.JoinFamilies(r.Err(), nil); err != nil {
		t.Errorf("nothing rejected: %v", err)
	}
	for n := range 15 {
		r.Add(key(n), fmt.Errorf("port %d is bad", n))
	}
	var found *dataplane.Rejected
	if err := dataplane.JoinFamilies(fmt.Errorf("IPv4: %w", r.Err()), nil); !errors.As(err, &found) || len(found.Ports) != 15 {
		t.Errorf("joined = %v, want all 15", err)
	} else if lines := strings.Count(err.Error(), "\n") + 1; lines != 11 {
		t.Errorf("%d lines, want 10 and how many more:\n%v", lines, err)
	}
	other := errors.New("the kernel is gone")
	err := dataplane.JoinFamilies(r.Err(), other)
	if errors.As(err, &found) || !errors.Is(err, other) || !strings.Contains(err.Error(), "port 0 is bad") {
		t.Errorf("joined = %v, want both to read and no *Rejected to find", err)
	}
}
