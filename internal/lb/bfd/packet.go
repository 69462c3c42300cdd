package bfd

import (
	"encoding/binary"
	"errors"
	"time"
)

// State is that of a session (RFC 5880, section 4.1).
type State uint8

// The states, by their numbers in packets.
const (
	AdminDown State = iota
	Down
	Init
	Up
)

// String returns the name of the state in RFC 5880.
func (s State) String() string {
	return [...]string{"AdminDown", "Down", "Init", "Up"}[s&3]
}

// Diagnostics of RFC 5880, section 4.1: why a session left the state Up.
const (
	diagNone         = 0
	diagExpired      = 1 // nothing was heard for the detection time
	diagNeighborDown = 3 // the neighbor says that its session is down
	diagAdminDown    = 7
)

const (
	packetBytes = 24
	version     = 1
)

// Flags of a packet's second byte. Authentication and multipoint are refused.
const (
	flagPoll       = 0x20
	flagFinal      = 0x10
	flagAuth       = 0x04
	flagDemand     = 0x02
	flagMultipoint = 0x01
)

// packet is a control packet without an authentication section.
type packet struct {
	state               State
	diag                uint8
	poll, final, demand bool
	mult                uint8
	mine, yours         uint32 // discriminators
	minTx, minRx        time.Duration
}

func (p packet) encode() []byte {
	b := make([]byte, packetBytes)
	b[0] = version<<5 | p.diag
	b[1] = byte(p.state) << 6
	if p.poll {
		b[1] |= flagPoll
	}
	if p.final {
		b[1] |= flagFinal
	}
	b[2], b[3] = p.mult, packetBytes
	binary.BigEndian.PutUint32(b[4:], p.mine)
	binary.BigEndian.PutUint32(b[8:], p.yours)
	binary.BigEndian.PutUint32(b[12:], uint32(p.minTx.Microseconds()))
	binary.BigEndian.PutUint32(b[16:], uint32(p.minRx.Microseconds()))
	return b // the last field, of the echo function, is 0: it is not supported
}

var errPacket = errors.New("not a BFD packet for a session of this node")

// decode reads a packet that may be for a session, by the rules of RFC 5880, section 6.8.6, that need no session.
func decode(b []byte) (packet, error) {
	if len(b) < packetBytes || b[0]>>5 != version || int(b[3]) < packetBytes || int(b[3]) > len(b) {
		return packet{}, errPacket
	}
	p := packet{
		state: State(b[1] >> 6), diag: b[0] & 0x1f, mult: b[2],
		poll: b[1]&flagPoll != 0, final: b[1]&flagFinal != 0, demand: b[1]&flagDemand != 0,
		mine: binary.BigEndian.Uint32(b[4:]), yours: binary.BigEndian.Uint32(b[8:]),
		minTx: time.Duration(binary.BigEndian.Uint32(b[12:])) * time.Microsecond,
		minRx: time.Duration(binary.BigEndian.Uint32(b[16:])) * time.Microsecond,
	}
	switch {
	case p.mult == 0, p.mine == 0, b[1]&(flagAuth|flagMultipoint) != 0, p.yours == 0 && p.state != Down && p.state != AdminDown:
		return packet{}, errPacket
	}
	return p, nil
}
