package proxy

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"slices"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// View is the state of some service ports on the node at one moment.
type View struct {
	// Table is the one that is programmed.
	Table *table.Table
	Ports []ViewedPort
	// Addresses are the machine's.
	Addresses []netip.Addr
	Problems  []table.Problem
	// Unreached are the nodes that this one does not reach, as Options have it.
	Unreached []string

	wanted *table.Table // has Ports
}

// ViewedPort is one service port of a View.
type ViewedPort struct {
	// Port is as the Table has it, or as it should, if it was Rejected.
	Port *table.ServicePort
	// Rejected is why the mode could not write it, empty if it did.
	Rejected string
	// Installed has the installed state of each frontend; empty if the mode cannot read it back.
	Installed []dataplane.Installed
	Counts    []dataplane.DropCount
}

// look is a View that is asked for.
type look struct {
	choose func(*table.Table) []*table.ServicePort
	answer chan<- *View // nil as long as nothing is programmed
}

var (
	errNotProgrammed = errors.New("the proxy has not programmed any Service yet")
	errChanges       = errors.New("the Service changed each time that it was read back; ask again")
)

// maxLooks bounds how often ports are read back that change meanwhile.
const maxLooks = 4

// Look reads back what the node has for the ports that choose returns. clients are the
// addresses, one of each family at most, of a client whose affinity is asked for. It waits for the programming that is under way;
// programming does not wait for it.
func (p *Proxy) Look(ctx context.Context, choose func(*table.Table) []*table.ServicePort, clients []netip.Addr) (*View, error) {
	v, err := intended(ctx, p, choose)
	if err != nil {
		return nil, err
	}
	for range maxLooks {
		if err := v.read(ctx, p.opts.Dataplane, clients); err != nil {
			return nil, err
		}
		after, err := intended(ctx, p, choose)
		if err != nil {
			return nil, err
		}
		if slices.EqualFunc(v.Ports, after.Ports, same) {
			return v, nil
		}
		v = after
	}
	return nil, errChanges
}

// same reports whether a port is the same before and after it was read back.
func same(a, b ViewedPort) bool {
	return a.Rejected == b.Rejected && (a.Port == b.Port || reflect.DeepEqual(a.Port, b.Port))
}

// intended asks the loop for a View without what is read back.
func intended(ctx context.Context, p *Proxy, choose func(*table.Table) []*table.ServicePort) (*View, error) {
	answer := make(chan *View, 1)
	select {
	case p.looks <- look{choose, answer}:
	case <-ctx.Done():
		return nil, errors.Join(errNotProgrammed, ctx.Err())
	}
	select {
	case v := <-answer:
		if v == nil {
			return nil, errNotProgrammed
		}
		return v, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// serve answers in the goroutine that programs, which has the Tables.
func (l *look) serve(p *Proxy) {
	if p.applied == nil || p.wanted == nil {
		l.answer <- nil
		return
	}
	v := &View{Table: p.applied, Addresses: p.machine, wanted: p.wanted}
	if p.opts.Unreached != nil {
		v.Unreached = p.opts.Unreached()
	}
	services := map[svc.Name]bool{}
	for _, port := range l.choose(p.wanted) {
		v.Ports = append(v.Ports, ViewedPort{Port: port, Rejected: p.rejected[port.Key()]})
		services[port.ID.Name] = true
	}
	for n := range services {
		v.Problems = append(v.Problems, p.status.problemsOf(n)...)
	}
	l.answer <- v
}

// read adds what the data plane has.
func (v *View) read(ctx context.Context, plane dataplane.Applier, clients []netip.Addr) error {
	if looker, ok := plane.(dataplane.Looker); ok {
		var asked []dataplane.Asked
		for _, p := range v.Ports {
			for i := range p.Port.Frontends {
				asked = append(asked, dataplane.AskedOf(v.wanted, p.Port, &p.Port.Frontends[i]))
			}
		}
		found, err := installed(ctx, looker, asked, clients)
		if err != nil {
			return err
		}
		for i := range v.Ports {
			n := len(v.Ports[i].Port.Frontends)
			v.Ports[i].Installed, found = found[:n:n], found[n:]
		}
	}
	if c, ok := plane.(dataplane.Counter); ok {
		counts, err := c.Drops(ctx)
		if err != nil {
			return err
		}
		v.count(counts)
	}
	return nil
}

// installed reads the frontends of each family with the client's address of that family.
func installed(ctx context.Context, looker dataplane.Looker, asked []dataplane.Asked, clients []netip.Addr) ([]dataplane.Installed, error) {
	out := make([]dataplane.Installed, len(asked))
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		var client netip.Addr
		for _, a := range clients {
			if svc.FamilyOf(a) == f {
				client = a
			}
		}
		var at []int
		var fronts []dataplane.Asked
		for i := range asked {
			if asked[i].Family == f {
				at, fronts = append(at, i), append(fronts, asked[i])
			}
		}
		if len(fronts) == 0 {
			continue
		}
		found, err := looker.Look(ctx, fronts, client)
		if err != nil {
			return nil, err
		}
		for i := range found {
			out[at[i]] = found[i]
		}
	}
	return out, nil
}

// count gives each port the counts of its frontends.
func (v *View) count(counts []dataplane.DropCount) {
	for i := range v.Ports {
		p := v.Ports[i].Port
		for _, c := range counts {
			for k := range p.Frontends {
				for _, at := range v.Table.Destinations(&p.Frontends[k]) {
					if c.To == at && c.Protocol == p.Protocol {
						v.Ports[i].Counts = append(v.Ports[i].Counts, c)
					}
				}
			}
		}
	}
}

// problemsOf returns the problems of a Service.
func (st *status) problemsOf(n svc.Name) []table.Problem {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.problems[n]
}
