// Package muxes has the connections of HTTP/2 that many requests share: the ones to Pods, and the ones of clients.
package muxes

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/lb/proxied/http2"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
)

// Pods are the connections to the Pods of a port. The zero value has none. Many goroutines may call its methods at a time.
type Pods struct {
	mu     sync.Mutex
	pods   map[netip.AddrPort]*Pod
	closed bool
}

// Pod is the connections to one Pod.
type Pod struct {
	conns   []*http2.Conn
	dialing *Attempt // nil if no connection is being made
	first   bool     // the Pod has chosen HTTP/1.1
}

// Attempt is a connection that is being made for all requests that wait for it. err is why it has failed, once done is closed.
type Attempt struct {
	done chan struct{}
	err  error
}

// Wait waits for the end of the attempt, and returns why it has failed, nil if it has not.
func (a *Attempt) Wait() error {
	<-a.done
	return a.err
}

// Result notes the result of the attempt, before its Finish.
func (a *Attempt) Result(err error) { a.err = err }

// Begin returns the attempt to reach a Pod, and whether it is the caller's to make and to end.
func (p *Pods) Begin(addr netip.AddrPort) (a *Attempt, m *Pod, own bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m = p.pods[addr]; m == nil {
		m = &Pod{}
		if p.pods == nil {
			p.pods = map[netip.AddrPort]*Pod{}
		}
		p.pods[addr] = m
	}
	if m.dialing != nil {
		return m.dialing, m, false
	}
	m.dialing = &Attempt{done: make(chan struct{}), err: panics.Err} // if there is one
	return m.dialing, m, true
}

// Finish ends an attempt.
func (p *Pods) Finish(addr netip.AddrPort, m *Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(m.dialing.done)
	m.dialing = nil
	if !m.first {
		p.tidy(addr, m)
	}
}

// tidy forgets a Pod without connections, and what it has chosen. The caller holds mu.
func (p *Pods) tidy(addr netip.AddrPort, m *Pod) {
	if m != nil && len(m.conns) == 0 && m.dialing == nil && p.pods[addr] == m {
		delete(p.pods, addr)
	}
}

// Forget forgets that a Pod has chosen HTTP/1.1: it may be another one by now.
func (p *Pods) Forget(addr netip.AddrPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.pods[addr]; m != nil {
		m.first = false
		p.tidy(addr, m)
	}
}

// Add adds a connection to those to a Pod. It reports false at the end.
func (p *Pods) Add(m *Pod, c *http2.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		m.conns = append(m.conns, c)
	}
	return !p.closed
}

// Remove removes a connection that has ended.
func (p *Pods) Remove(addr netip.AddrPort, m *Pod, c *http2.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(m.conns, c); i >= 0 {
		m.conns = slices.Delete(m.conns, i, i+1)
	}
	p.tidy(addr, m)
}

// First notes that a Pod has chosen HTTP/1.1.
func (p *Pods) First(m *Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m.first = true
}

// Open returns a stream to a Pod on a connection that is there, nil if none has room, and whether the Pod has chosen HTTP/1.1.
func (p *Pods) Open(addr netip.AddrPort, isHead bool) (_ *http2.Stream, first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.pods[addr]
	if m == nil {
		return nil, false
	}
	for _, c := range m.conns {
		if s := c.Open(isHead); s != nil {
			return s, false
		}
	}
	return nil, m.first
}

// Close has the connections end with their last streams.
func (p *Pods) Close() {
	p.mu.Lock()
	p.closed = true
	var all []*http2.Conn
	for _, m := range p.pods {
		all = append(all, m.conns...)
	}
	p.mu.Unlock()
	for _, c := range all {
		c.Leave()
	}
}

// Clients are the connections of clients. The zero value has none. Many goroutines may call its methods at a time.
type Clients struct {
	mu    sync.Mutex
	all   map[*http2.Conn]struct{}
	ended bool
}

// Add makes a connection count. It reports false at the end.
func (a *Clients) Add(c *http2.Conn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.all == nil {
		a.all = map[*http2.Conn]struct{}{}
	}
	if !a.ended {
		a.all[c] = struct{}{}
	}
	return !a.ended
}

// Remove removes a connection that has ended.
func (a *Clients) Remove(c *http2.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.all, c)
}

// End has the connections end with their last streams.
func (a *Clients) End() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	for c := range a.all {
		c.Leave()
	}
}
