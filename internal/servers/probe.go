package servers

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Run probes the servers that are not known to be up, and leaves servers that stop answering,
// until ctx ends. It always returns nil.
func (b *Balancer) Run(ctx context.Context) error {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	var probes sync.WaitGroup
	defer probes.Wait()
	// until is when silence counts again: while this process does not run, it hears nothing.
	last, until := time.Now(), time.Now()
	for {
		now := time.Now()
		if now.Sub(last) > 2*checkEvery {
			until = now.Add(silence)
		}
		last = now
		if !now.Before(until) {
			b.checkSilence(ctx, &probes, now)
		}
		b.mu.Lock()
		due := b.order(func(s *server) bool {
			return s.state != up && !s.asked && !now.Before(s.next) && (s.inUse() || !b.outage.IsZero())
		})
		for _, s := range due {
			s.asked = true
			probes.Go(func() { b.probe(ctx, s) })
		}
		changed := b.changed
		b.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-changed:
		}
	}
}

// probe asks a server once and records the result.
func (b *Balancer) probe(ctx context.Context, s *server) {
	err := b.handshake(ctx, s)
	b.mu.Lock()
	s.asked = false
	b.mu.Unlock()
	switch {
	case err == nil:
		b.answers(s)
	case ctx.Err() == nil:
		b.leave(s, err)
	}
}

// handshake connects to a server and verifies it, which takes a process that runs.
func (b *Balancer) handshake(ctx context.Context, s *server) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", s.at)
	if err != nil {
		return err
	}
	defer conn.Close()
	if b.tls == nil {
		return nil
	}
	config := b.tls.Clone()
	if config.ServerName == "" {
		config.ServerName, _, _ = net.SplitHostPort(s.at)
	}
	return tls.Client(conn, config).HandshakeContext(ctx)
}

// errSilent is why a silent server is left.
var errSilent = errors.New("it has not answered for " + silence.String() + ", and another server answers")

// checkSilence leaves the servers of which nothing was heard for silence, if another one
// answers: where all are slow, leaving one makes it worse.
func (b *Balancer) checkSilence(ctx context.Context, probes *sync.WaitGroup, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.all {
		if s.state != up || s.asked || len(s.conns) == 0 || now.Sub(s.heard()) < silence {
			continue
		}
		others := b.order(func(o *server) bool { return o != s && o.inUse() })
		if len(others) == 0 {
			continue
		}
		s.asked = true
		probes.Go(func() { b.leaveFor(ctx, s, others) })
	}
}

// leaveFor leaves a silent server as soon as one of others answers, unless it answers
// before that.
func (b *Balancer) leaveFor(ctx context.Context, s *server, others []*server) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answered := make(chan *server, len(others))
	var running sync.WaitGroup
	for _, o := range others {
		running.Go(func() {
			if b.handshake(ctx, o) == nil {
				answered <- o
			}
		})
	}
	go func() {
		running.Wait()
		close(answered)
	}()
	o := <-answered
	b.mu.Lock()
	s.asked = false
	silent := time.Since(s.heard()) >= silence
	b.mu.Unlock()
	if o != nil && silent {
		b.answers(o)
		b.leave(s, errSilent)
	}
}

// inUse reports whether the server is in the list or was given. The others are asked only while no server answers. It is called with mu
// held.
func (s *server) inUse() bool { return s.learned || s.given }

// heard returns when something was last received of a server. It is called with mu held.
func (s *server) heard() (last time.Time) {
	for c := range s.conns {
		if at := begin.Add(time.Duration(c.heard.Load())); at.After(last) {
			last = at
		}
	}
	return last
}

// begin is what times are counted from: unlike Unix time they do not follow steps of the clock.
var begin = time.Now()

// conn is a connection to a server.
type conn struct {
	net.Conn
	heard atomic.Int64 // when something was received, in nanoseconds since begin
	gone  func()
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.heard.Store(int64(time.Since(begin)))
	}
	return n, err
}

func (c *conn) Close() error {
	c.gone()
	return c.Conn.Close()
}
