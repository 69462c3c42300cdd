package web

import (
	"cmp"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
)

// secondAfter is how long a Pod has to accept before another one is asked beside it, as clients with several addresses do
// (RFC 8305, section 5).
const secondAfter = 250 * time.Millisecond

// dialling is what a connection to a Pod is for. It outlives the request.
type dialling struct {
	engine      *engine
	client, at  netip.AddrPort
	isHead      bool
	multiplexes bool // the request goes on by HTTP/2, if the Pod speaks that
}

func (x *exchange) dialling() dialling {
	return dialling{x.engine, x.conn.client, x.conn.at, x.isHead, transportOf(x.to).multiplexes(x)}
}

// kept returns a connection to a Pod that is there already, nil if there is none.
func (t *transport) kept(d dialling, addr netip.AddrPort) pod {
	if d.multiplexes {
		s, first := t.muxes.Open(addr, d.isHead)
		if s != nil {
			return newMuxStream(s)
		}
		if !first { // it may speak HTTP/2
			return nil
		}
	}
	if t.isHTTP1() {
		if u := t.upstreams.get(addr); u != nil {
			return u
		}
	}
	return nil
}

// dial connects to a Pod.
func (t *transport) dial(d dialling, addr netip.AddrPort) (pod, error) {
	if d.multiplexes {
		b, err := t.stream(d, addr)
		if b != nil || err != nil {
			return b, err
		}
	}
	u, err := t.connect(d.engine.host.Context(), addr, d.client, d.at)
	if err != nil {
		t.muxes.Forget(addr)
		return nil, err
	}
	return u, nil
}

// reaching is the search for a Pod that takes a request.
type reaching struct {
	x        *exchange
	t        *transport
	tried    []*pods.Member
	again    bool                        // it is a retry, if possible not at the one that is tried
	space    [pods.MaxDials]*pods.Member // of tried
	last     error                       // why the last one was not reached
	before   *pods.Member                // has failed last or, without a failure, was asked last; nil before the first attempt
	redial   *pods.Member                // is asked next, by a new connection
	redialed []*pods.Member              // have been so
	results  chan reached
	running  int // attempts whose result has not come
}

// reached is the result of an attempt.
type reached struct {
	pod    pod
	member *pods.Member
	err    error
}

// reach returns a Pod that takes the request, and none twice. Who accepts first has it.
func (r *reaching) reach() (pod, *pods.Member, error) {
	for {
		b, m, err := r.next()
		if b != nil {
			return b, m, nil
		}
		if err != nil && r.running == 0 {
			return nil, nil, cmp.Or(r.last, err)
		}
		result, came := r.wait(err == nil)
		switch {
		case !came && (r.x.again.late() || policy.Over(r.x.deadline)):
			return nil, nil, errSilent
		case !came:
		case result.err == nil:
			r.x.pod = result.member.Addr()
			return result.pod, result.member, nil
		default:
			r.last, r.before = result.err, result.member
			r.x.trace.Got(result.member.Addr(), 0, result.err)
			if !isUndialed(result.err) && r.running == 0 {
				return nil, nil, result.err
			}
		}
	}
}

// next chooses a further Pod and begins to connect to it, or returns a connection that is there. It fails when there is no
// further one.
func (r *reaching) next() (pod, *pods.Member, error) {
	x := r.x
	m, fresh := r.redial, r.redial != nil
	if r.redial = nil; !fresh && len(r.tried) >= pods.MaxDials || x.drained.Load() {
		return nil, nil, pods.ErrNone
	}
	if !fresh {
		var err error
		if m, err = choose(x, r.tried); err != nil && r.again {
			m, err = choose(x, nil)
		}
		if err != nil {
			return nil, nil, err
		}
		r.again = false
		r.tried = append(r.tried, m)
	}
	if r.before != nil {
		retried(x, r.before)
	}
	r.before = m
	x.pod, x.asked = m.Addr(), time.Now()
	x.trace.Try(x.pod)
	d := x.dialling()
	if !fresh {
		if b := r.t.kept(d, m.Addr()); b != nil {
			return b, m, nil
		}
	}
	if r.results == nil {
		r.results = make(chan reached, 2*pods.MaxDials) // each once more
	}
	r.running++
	t, pool, results := r.t, x.to.Pool, r.results
	d.engine.host.Run(func() {
		result := reached{member: m, err: panics.Err} // if there is one
		defer func() { results <- result }()
		defer d.engine.host.Panics().Recover(t.service)
		result.pod, result.err = t.dial(d, m.Addr())
		switch {
		case result.err == nil:
			pool.Reached(m)
		case isUndialed(result.err):
			pool.Failed(m, result.err)
		}
	})
	return nil, nil, nil
}

// wait waits for a result, but with others only until a further Pod should be asked.
func (r *reaching) wait(others bool) (result reached, came bool) {
	patience := secondAfter
	if !others || len(r.tried) >= pods.MaxDials {
		patience = 2 * pods.DialTimeout // after that there is a result in any case
	}
	timer := time.NewTimer(policy.Within(r.x.deadline, r.x.again.within(patience)))
	defer timer.Stop()
	select {
	case result = <-r.results:
		r.running--
		return result, true
	case <-timer.C:
		return result, false
	}
}

// end keeps or closes connections that come too late.
func (r *reaching) end() {
	if r.running == 0 {
		return
	}
	n, t, results := r.running, r.t, r.results
	r.x.engine.host.Go(func() {
		for range n {
			late := <-results
			switch b := late.pod.(type) {
			case nil:
			case *upstream:
				if t.kind.proxy != 0 {
					b.close() // it is of one client
				} else {
					t.upstreams.put(b)
				}
			default:
				b.release(nil, false)
			}
		}
	})
}
