package bfd

import (
	"errors"
	"fmt"
	"time"
)

// Bounds and defaults of a Config. The least interval keeps a typo from using a processor.
const (
	DefaultInterval   = 300 * time.Millisecond
	DefaultMultiplier = 3
	MinInterval       = 10 * time.Millisecond
	MaxInterval       = time.Minute
	minMultiplier     = 2
	maxMultiplier     = 255
	// slow is the least interval of a session that is not up (RFC 5880, section 6.8.3).
	slow = time.Second
)

// Config are the times of a session. The zero Config is for none.
type Config struct {
	// Transmit is how often a packet is sent, Receive how often one may come. The longer interval of both ends counts.
	Transmit, Receive time.Duration
	// Multiplier is after how many intervals without a packet the other end gives up.
	Multiplier int
}

// Default returns the times of a session without configured ones: a neighbor is given up after 0.9 s.
func Default() Config {
	return Config{Transmit: DefaultInterval, Receive: DefaultInterval, Multiplier: DefaultMultiplier}
}

// Validate returns what is wrong with c.
func (c Config) Validate() error {
	var errs []error
	interval := func(what string, d time.Duration) {
		if d < MinInterval || d > MaxInterval {
			errs = append(errs, fmt.Errorf("the BFD %s interval %s is not between %s and %s", what, d, MinInterval, MaxInterval))
		}
	}
	interval("transmit", c.Transmit)
	interval("receive", c.Receive)
	if c.Multiplier < minMultiplier || c.Multiplier > maxMultiplier {
		errs = append(errs, fmt.Errorf("the BFD detection multiplier %d is not between %d and %d", c.Multiplier, minMultiplier, maxMultiplier))
	}
	return errors.Join(errs...)
}

// machine decides about one session, as in RFC 5880, section 6.8. It has one user at a time.
type machine struct {
	cfg         Config
	mine, yours uint32 // discriminators; yours is 0 while it is not known
	state       State
	diag        uint8
	failed      bool          // see Status
	remote      packet        // the neighbor's last
	transmit    time.Duration // what is announced now: slow while the session is not up
	polling     bool          // until the neighbor confirms a new interval
	deadline    time.Time     // when the neighbor is given up, zero for never
}

func newMachine(cfg Config, discriminator uint32) *machine {
	return &machine{cfg: cfg, mine: discriminator, state: Down, transmit: max(cfg.Transmit, slow), remote: silent()}
}

// silent is what counts for a neighbor that has sent nothing.
func silent() packet { return packet{state: Down, minRx: time.Microsecond} }

// receive takes a packet of the neighbor and reports whether it must be answered at once.
func (m *machine) receive(p packet, now time.Time) (answer bool) {
	if m.state == AdminDown {
		return false
	}
	m.yours, m.remote = p.mine, p
	if p.final {
		m.polling = false
	}
	m.deadline = now.Add(m.detection())
	switch {
	case p.state == AdminDown && m.state != Down, p.state == Down && m.state == Up:
		m.turn(Down, diagNeighborDown)
	case p.state == Down && m.state == Down:
		m.turn(Init, m.diag)
	case p.state == Init && m.state != Up, p.state == Up && m.state == Init:
		m.turn(Up, diagNone)
	}
	return p.poll
}

// detection is how long the neighbor may be silent.
func (m *machine) detection() time.Duration {
	return time.Duration(m.remote.mult) * max(m.cfg.Receive, m.remote.minTx)
}

func (m *machine) turn(to State, diag uint8) {
	m.failed = m.failed || m.state == Up && to == Down && m.remote.state != AdminDown
	m.state, m.diag = to, diag
	was := m.transmit
	m.transmit = m.cfg.Transmit
	if to != Up {
		m.transmit = max(m.transmit, slow)
	}
	m.polling = to == Up && m.transmit != was
}

// expire gives the neighbor up if it was silent for too long.
func (m *machine) expire(now time.Time) {
	if m.deadline.IsZero() || now.Before(m.deadline) {
		return
	}
	m.deadline, m.yours = time.Time{}, 0
	m.remote = silent()
	if m.state == Init || m.state == Up {
		m.turn(Down, diagExpired)
	}
}

// interval is how long after a packet the next one is due, before jitter; 0 while the neighbor wants none.
func (m *machine) interval() time.Duration {
	quiet := m.remote.demand && m.state == Up && m.remote.state == Up && !m.polling
	if m.remote.minRx == 0 || quiet {
		return 0
	}
	return max(m.transmit, m.remote.minRx)
}

// packet is the next one to be sent; final answers a poll.
func (m *machine) packet(final bool) packet {
	return packet{
		state: m.state, diag: m.diag, poll: m.polling && !final, final: final, mult: uint8(m.cfg.Multiplier),
		mine: m.mine, yours: m.yours, minTx: m.transmit, minRx: m.cfg.Receive,
	}
}

// reason returns why a session is not up.
func (m *machine) reason() string {
	switch {
	case m.state == Up:
		return ""
	case m.diag == diagExpired:
		return "nothing was heard from the router for the BFD detection time"
	case m.remote.state == AdminDown && m.yours != 0:
		return "the router's BFD session is administratively down"
	case m.diag == diagNeighborDown:
		return "the router says that its BFD session is down: it does not hear this node"
	case m.yours == 0:
		return "the router has not answered by BFD"
	}
	return "the BFD session begins"
}
