package proxy

import (
	"context"
	"errors"
	"net/netip"

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
	ctx     context.Context
	choose  func(*table.Table) []*table.ServicePort
	clients []netip.Addr
	answer  chan<- lookResult
}

type lookResult struct {
	view *View
	err  error
}

var errNotProgrammed = errors.New("the proxy has not programmed any Service yet")

// Look reads back what the node has for the ports that choose returns. clients are the
// addresses, one of each family at most, of a client whose affinity is asked for. It waits for the programming that is under way.
func (p *Proxy) Look(ctx context.Context, choose func(*table.Table) []*table.ServicePort, clients []netip.Addr) (*View, error) {
	answer := make(chan lookResult, 1)
	select {
	case p.looks <- look{ctx, choose, clients, answer}:
	case <-ctx.Done():
		return nil, errors.Join(errNotProgrammed, ctx.Err())
	}
	select {
	case r := <-answer:
		return r.view, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// serve answers in the goroutine that uses the Dataplane.
func (l *look) serve(p *Proxy) {
	view, err := l.view(p)
	l.answer <- lookResult{view, err}
}

func (l *look) view(p *Proxy) (*View, error) {
	if p.applied == nil || p.wanted == nil {
		return nil, errNotProgrammed
	}
	v := &View{Table: p.applied, Addresses: p.machine}
	if p.opts.Unreached != nil {
		v.Unreached = p.opts.Unreached()
	}
	chosen := l.choose(p.wanted)
	services := map[svc.Name]bool{}
	var asked []dataplane.Asked
	for _, port := range chosen {
		v.Ports = append(v.Ports, ViewedPort{Port: port, Rejected: p.rejected[port.Key()]})
		services[port.ID.Name] = true
		for i := range port.Frontends {
			asked = append(asked, dataplane.AskedOf(p.wanted, port, &port.Frontends[i]))
		}
	}
	for n := range services {
		v.Problems = append(v.Problems, p.status.problemsOf(n)...)
	}
	if looker, ok := p.opts.Dataplane.(dataplane.Looker); ok {
		found, err := l.installed(looker, asked)
		if err != nil {
			return nil, err
		}
		for i := range v.Ports {
			n := len(v.Ports[i].Port.Frontends)
			v.Ports[i].Installed, found = found[:n:n], found[n:]
		}
	}
	if c, ok := p.opts.Dataplane.(dataplane.Counter); ok {
		counts, err := c.Drops(l.ctx)
		if err != nil {
			return nil, err
		}
		v.count(counts)
	}
	return v, nil
}

// installed reads the frontends of each family with the client's address of that family.
func (l *look) installed(looker dataplane.Looker, asked []dataplane.Asked) ([]dataplane.Installed, error) {
	out := make([]dataplane.Installed, len(asked))
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		var client netip.Addr
		for _, a := range l.clients {
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
		found, err := looker.Look(l.ctx, fronts, client)
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
