package web

import (
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// keptConns are the connections of all transports that wait for a request of HTTP/1.1. There is one bound for them, since
// they need open files as connections of clients do.
type keptConns struct {
	mu             sync.Mutex
	oldest, newest *upstream
	count          int
	sweeps         bool
}

// upstreams are the kept connections of a transport.
type upstreams struct {
	all    *keptConns
	most   func() int // of all transports
	pods   map[netip.AddrPort]keptStack
	closed bool // none is kept any more; guarded by all.mu, as pods
}

// keptStack has the connections to a Pod: the one that was kept last is used first.
type keptStack struct {
	top   *upstream
	count int
}

// get returns a connection to a Pod that is still open and on which the Pod has sent nothing, nil if there is none.
func (p *upstreams) get(pod netip.AddrPort) *upstream {
	for {
		p.all.mu.Lock()
		u := p.pods[pod].top
		if u != nil {
			u.forgetKept()
		}
		p.all.mu.Unlock()
		if u == nil || u.probe.Quiet() {
			return u
		}
		u.close()
	}
}

// put keeps a connection of which everything was taken, or closes it. It may cost the one that has waited longest.
func (p *upstreams) put(u *upstream) {
	if len(u.buffered()) > 0 {
		u.close()
		return
	}
	u.wire.release()
	k := p.all
	k.mu.Lock()
	defer k.mu.Unlock()
	if p.closed || p.pods[u.pod].count >= maxIdle {
		stream.CloseNow(u.conn)
		return
	}
	if p.pods == nil {
		p.pods = map[netip.AddrPort]keptStack{}
	}
	u.keep(p)
	for most := p.most(); k.count > most; {
		k.drop(k.oldest)
	}
	if !k.sweeps {
		k.sweeps = true
		time.AfterFunc(podIdle/4, k.sweep)
	}
}

// keep makes a connection the newest one. The caller holds p.all.mu.
func (u *upstream) keep(p *upstreams) {
	k, pod := p.all, p.pods[u.pod]
	u.kept, u.since, u.of, u.older, u.below = true, time.Now(), p, k.newest, pod.top
	if u.older != nil {
		u.older.newer = u
	} else {
		k.oldest = u
	}
	k.newest = u
	k.count++
	if u.below != nil {
		u.below.above = u
	}
	p.pods[u.pod] = keptStack{u, pod.count + 1}
}

// forgetKept undoes keep. The caller holds the mu of u.of.all.
func (u *upstream) forgetKept() {
	k, pod := u.of.all, u.of.pods[u.pod]
	if u.older != nil {
		u.older.newer = u.newer
	} else {
		k.oldest = u.newer
	}
	if u.newer != nil {
		u.newer.older = u.older
	} else {
		k.newest = u.older
	}
	k.count--
	if u.below != nil {
		u.below.above = u.above
	}
	if u.above != nil {
		u.above.below = u.below
	} else {
		pod.top = u.below
	}
	if pod.count--; pod.count > 0 {
		u.of.pods[u.pod] = pod
	} else {
		delete(u.of.pods, u.pod)
	}
	u.of, u.older, u.newer, u.below, u.above = nil, nil, nil, nil, nil
}

// drop closes a connection. The caller holds mu.
func (k *keptConns) drop(u *upstream) {
	u.forgetKept()
	stream.CloseNow(u.conn)
}

// sweep closes connections that have waited for too long.
func (k *keptConns) sweep() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for before := time.Now().Add(-podIdle); k.oldest != nil && k.oldest.since.Before(before); {
		k.drop(k.oldest)
	}
	if k.sweeps = k.oldest != nil; k.sweeps {
		time.AfterFunc(podIdle/4, k.sweep)
	}
}

// close closes the waiting connections, and has others closed when their request is complete.
func (p *upstreams) close() {
	p.all.mu.Lock()
	defer p.all.mu.Unlock()
	p.closed = true
	for _, pod := range p.pods {
		for pod.top != nil {
			u := pod.top
			pod.top = u.below
			p.all.drop(u)
		}
	}
}
