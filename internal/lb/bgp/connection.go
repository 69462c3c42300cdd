package bgp

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	wire "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// connection is an established session.
type connection struct {
	session *session
	conn    net.Conn
	terms   terms
	sent    map[netip.Prefix]string // what the router has, with the key of its attributes
	missing string                  // what cannot be announced, and why
	over    chan struct{}           // closed at the end
}

// ending is why the router's side of a session has ended.
type ending struct{ err error }

// refreshPeriod is the least time between two answers to ROUTE-REFRESH, each of which sends
// all routes.
const refreshPeriod = time.Second

// run announces what changes until the session ends, and returns why.
func (c *connection) run() error {
	s := c.session
	incoming := make(chan ending, 1)
	refresh := make(chan wire.Family, 1)
	go func() { incoming <- ending{c.read(refresh)} }()
	defer func() { // the reader ends with the connection
		close(c.over)
		_ = c.conn.Close()
		<-incoming
	}()
	fail := func(err error) error {
		incoming <- ending{} // there is nothing to wait for
		return err
	}
	s.update(func(p *PeerStatus) { p.State, p.Reason = established, "" })
	s.announcer.options.Log.Info("BGP session established", "peer", s.peer.String())

	release := context.AfterFunc(s.ctx, func() { _ = c.conn.SetWriteDeadline(time.Now().Add(lingerTime)) })
	defer release()
	s.takeDirty()
	if err := c.announce(s.announcer.table.prefixes()); err != nil {
		return err
	}
	complete := s.announcer.complete
	dead, unwatch := c.watchPath()
	defer unwatch()
	var keepalive <-chan time.Time
	if c.terms.keep > 0 {
		ticker := time.NewTicker(c.terms.keep)
		defer ticker.Stop()
		keepalive = ticker.C
	}
	wanted, soon, last := map[wire.Family]bool{}, (<-chan time.Time)(nil), time.Time{}
	for {
		var err error
		select {
		case end := <-incoming:
			return fail(reject(c.conn, end.err))
		case <-s.ctx.Done():
			return c.goodbye(incoming)
		case reason := <-dead:
			return c.deadPath(reason)
		case <-s.wake:
			err = c.announce(slices.Collect(maps.Keys(s.takeDirty())))
		case <-complete:
			complete = nil
			if err = c.announce(slices.Collect(maps.Keys(s.takeDirty()))); err == nil {
				err = c.endOfRIB()
			}
		case f := <-refresh:
			if wanted[f] = true; soon == nil {
				soon = time.After(time.Until(last.Add(refreshPeriod)))
			}
		case <-soon:
			for f := range wanted {
				err = errors.Join(err, c.again(f))
			}
			soon, last = nil, time.Now()
			clear(wanted)
		case <-keepalive:
			err = c.write(wire.NewBGPKeepAliveMessage())
		}
		if err != nil {
			return err
		}
	}
}

// read reads until the session ends, and returns why. The hold time is the deadline of
// every read.
func (c *connection) read(refresh chan<- wire.Family) error {
	r := bufio.NewReader(c.conn)
	for {
		deadline := time.Time{}
		if c.terms.hold > 0 {
			deadline = time.Now().Add(c.terms.hold)
		}
		if err := c.conn.SetReadDeadline(deadline); err != nil {
			return err
		}
		kind, body, err := readMessage(r)
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			return wire.NewMessageError(wire.BGP_ERROR_HOLD_TIMER_EXPIRED, 0, nil,
				fmt.Sprintf("nothing was heard from the router for the hold time of %s", c.terms.hold))
		}
		if err != nil {
			return err
		}
		switch kind {
		case wire.BGP_MSG_KEEPALIVE, wire.BGP_MSG_UPDATE: // what the router announces is not of interest
		case wire.BGP_MSG_ROUTE_REFRESH:
			if len(body) < 4 || body[2] != 0 {
				continue // RFC 7313's markers, which were not agreed on
			}
			select {
			case refresh <- wire.NewFamily(binary.BigEndian.Uint16(body), body[3]):
			case <-c.over:
			}
		default:
			return wire.NewMessageError(wire.BGP_ERROR_FSM_ERROR, 3, []byte{kind}, fmt.Sprintf("message of type %d", kind))
		}
	}
}

// write sends messages. A router that reads nothing for the hold time is as good as
// gone (RFC 9687).
func (c *connection) write(messages ...*wire.BGPMessage) error {
	wait := c.terms.hold
	if wait == 0 {
		wait = silentWrite
	}
	if err := c.conn.SetWriteDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	if c.session.ctx.Err() != nil { // who waits for the end does not wait for a router that reads nothing
		if err := c.conn.SetWriteDeadline(time.Now().Add(lingerTime)); err != nil {
			return err
		}
	}
	if err := write(c.conn, messages...); err != nil {
		return fmt.Errorf("cannot send to the router: %w", err)
	}
	return nil
}

// change is an update of one family: routes with the same attributes.
type change struct {
	family wire.Family
	key    string
}

// announce brings the router's routes of prefixes up to date.
func (c *connection) announce(prefixes []netip.Prefix) error {
	gone := map[wire.Family][]netip.Prefix{}
	routes := map[change][]netip.Prefix{}
	attributes := map[change]Attributes{}
	unreachable := map[wire.Family]int{}
	for _, p := range prefixes {
		f := familyOf(p)
		a, key, ok := c.session.announcer.table.get(p, c.session.peer.Name)
		old, sent := c.sent[p]
		switch {
		case !c.terms.reachable(f):
			if ok {
				unreachable[f]++
			}
		case ok && (!sent || old != key):
			k := change{f, key}
			routes[k], attributes[k] = append(routes[k], p), a
			c.sent[p] = key
		case !ok && sent:
			gone[f] = append(gone[f], p)
			delete(c.sent, p)
		}
	}
	var messages []*wire.BGPMessage
	for f, list := range gone {
		m, err := c.terms.withdrawals(f, list)
		if err != nil {
			return err
		}
		messages = append(messages, m...)
	}
	for k, list := range routes {
		m, err := c.terms.announcements(k.family, list, attributes[k])
		if err != nil {
			return err
		}
		messages = append(messages, m...)
	}
	if len(messages) > 0 {
		if err := c.write(messages...); err != nil {
			return err
		}
	}
	c.report(unreachable)
	return nil
}

// report puts the number of routes into the status, and why some are missing.
func (c *connection) report(unreachable map[wire.Family]int) {
	for f := range unreachable {
		name := "IPv4"
		if f == wire.RF_IPv6_UC {
			name = "IPv6"
		}
		c.missing = fmt.Sprintf("%s routes are not announced: the router does not take the family", name)
		if c.terms.family[f] {
			c.missing = fmt.Sprintf("%s routes are not announced: interface %s has no %s address for their next hop",
				name, c.terms.hops.device, name)
		}
	}
	news := c.session.update(func(p *PeerStatus) { p.Prefixes, p.Reason = len(c.sent), c.missing })
	if news && c.missing != "" {
		c.session.announcer.options.Log.Warn("BGP session with less than all routes", "peer", c.session.peer.String(), "reason", c.missing)
	}
}

// endOfRIB tells a router with graceful restart that all routes have been sent, so
// that it drops the others of an earlier process (RFC 4724, section 4.1).
func (c *connection) endOfRIB() error {
	if !c.terms.restarts {
		return nil
	}
	for _, f := range families {
		if c.terms.family[f] {
			if err := c.write(wire.NewEndOfRib(f)); err != nil {
				return err
			}
		}
	}
	return nil
}

// again sends the routes of a family once more, which the router asked for (RFC 2918).
func (c *connection) again(f wire.Family) error {
	var prefixes []netip.Prefix
	for p := range c.sent {
		if familyOf(p) == f {
			prefixes = append(prefixes, p)
		}
	}
	for _, p := range prefixes {
		delete(c.sent, p)
	}
	if err := c.announce(prefixes); err != nil {
		return err
	}
	// A prefix that was withdrawn since is marked, and no longer in sent.
	var gone []netip.Prefix
	for _, p := range prefixes {
		if _, ok := c.sent[p]; !ok {
			gone = append(gone, p)
		}
	}
	return c.withdraw(gone)
}

// goodbye withdraws everything and ends the session, and waits until the router has
// closed its end: it has then worked on the withdrawals. A router that keeps the routes over a
// restart is told what has changed, and no more.
func (c *connection) goodbye(incoming chan ending) error {
	s := c.session
	if c.terms.restarts && s.returns.Load() {
		return cmp.Or(c.announce(slices.Collect(maps.Keys(s.takeDirty()))), s.ctx.Err())
	}
	s.mu.Lock()
	subcode := s.subcode
	s.mu.Unlock()
	all := make([]netip.Prefix, 0, len(c.sent))
	for p := range c.sent {
		all = append(all, p)
	}
	err := c.withdraw(all)
	if err == nil {
		err = c.write(cease(subcode))
	}
	if err == nil {
		timer := time.NewTimer(lingerTime)
		defer timer.Stop()
		select {
		case <-incoming:
			incoming <- ending{}
		case <-timer.C:
		}
	}
	return err
}

// withdraw sends withdrawals.
func (c *connection) withdraw(prefixes []netip.Prefix) error {
	lists := map[wire.Family][]netip.Prefix{}
	for _, p := range prefixes {
		lists[familyOf(p)] = append(lists[familyOf(p)], p)
	}
	for f, list := range lists {
		messages, err := c.terms.withdrawals(f, list)
		if err != nil {
			return err
		}
		if err := c.write(messages...); err != nil {
			return err
		}
	}
	return nil
}
