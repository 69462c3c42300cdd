package bgp

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"strconv"
	"time"
	"unicode/utf8"

	wire "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// families are those announced, all over one session (RFC 4760).
var families = []wire.Family{wire.RF_IPv4_UC, wire.RF_IPv6_UC}

// readMessage reads one message and returns its type and body.
func readMessage(r io.Reader) (kind uint8, body []byte, err error) {
	var head [wire.BGP_HEADER_LENGTH]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	var h wire.BGPHeader
	if err := h.DecodeFromBytes(head[:]); err != nil {
		return 0, nil, err
	}
	if h.Len > wire.BGP_MAX_MESSAGE_LENGTH {
		return 0, nil, wire.NewMessageError(wire.BGP_ERROR_MESSAGE_HEADER_ERROR, wire.BGP_ERROR_SUB_BAD_MESSAGE_LENGTH, head[16:18],
			fmt.Sprintf("message of %d bytes", h.Len))
	}
	body = make([]byte, int(h.Len)-len(head))
	if _, err := io.ReadFull(r, body); err != nil {
		return 0, nil, err
	}
	if h.Type == wire.BGP_MSG_NOTIFICATION {
		return 0, nil, parseNotification(body)
	}
	return h.Type, body, nil
}

// notificationError is a NOTIFICATION of the router, with which it closes the session.
type notificationError struct {
	code, subcode uint8
	text          string // that its administrator gave (RFC 9003)
}

func parseNotification(body []byte) error {
	if len(body) < 2 {
		return errors.New("the router closed the session without a reason")
	}
	e := &notificationError{code: body[0], subcode: body[1]}
	if data := body[2:]; e.code == wire.BGP_ERROR_CEASE && len(data) > 1 {
		if n := int(data[0]); n < len(data) && utf8.Valid(data[1:1+n]) {
			e.text = string(data[1 : 1+n])
		}
	}
	return e
}

// meanings are what some notifications mostly mean.
var meanings = map[[2]uint8]string{
	{wire.BGP_ERROR_OPEN_MESSAGE_ERROR, wire.BGP_ERROR_SUB_BAD_PEER_AS}:           ": it expects another AS number than the local one here",
	{wire.BGP_ERROR_OPEN_MESSAGE_ERROR, wire.BGP_ERROR_SUB_BAD_BGP_IDENTIFIER}:    ": another of its neighbors has this node's router ID",
	{wire.BGP_ERROR_CEASE, wire.BGP_ERROR_SUB_CONNECTION_REJECTED}:                ": it may not know this node as a neighbor",
	{wire.BGP_ERROR_CEASE, wire.BGP_ERROR_SUB_MAXIMUM_NUMBER_OF_PREFIXES_REACHED}: ": it takes fewer routes than are announced",
}

// Error returns what the router says, and what it mostly means.
func (e *notificationError) Error() string {
	s := "the router closed the session: " + wire.NewNotificationErrorCode(e.code, e.subcode).String()
	if e.text != "" {
		s += " " + strconv.Quote(e.text)
	}
	s += meanings[[2]uint8{e.code, e.subcode}]
	return s
}

// cease returns the NOTIFICATION that ends a session on purpose (RFC 4486).
func cease(subcode uint8) *wire.BGPMessage {
	var text []byte
	if subcode == wire.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN {
		const why = "fairlead stops"
		text = append([]byte{uint8(len(why))}, why...) // RFC 9003
	}
	return wire.NewBGPNotificationMessage(wire.BGP_ERROR_CEASE, subcode, text)
}

// open returns the OPEN message for p. restarted reports that routes of an earlier
// process may still be with the router, which keeps them until the End-of-RIB.
func open(p Peer, routerID netip.Addr, restarted bool) (*wire.BGPMessage, error) {
	capabilities := []wire.ParameterCapabilityInterface{wire.NewCapRouteRefresh(), wire.NewCapFourOctetASNumber(p.LocalASN)}
	var kept []*wire.CapGracefulRestartTuple
	for _, f := range families {
		capabilities = append(capabilities, wire.NewCapMultiProtocol(f))
		// What forwards is the kernel, which goes on without this process.
		kept = append(kept, wire.NewCapGracefulRestartTuple(f, true))
	}
	capabilities = append(capabilities, wire.NewCapExtendedNexthop([]*wire.CapExtendedNexthopTuple{
		wire.NewCapExtendedNexthopTuple(wire.RF_IPv4_UC, wire.AFI_IP6),
	}))
	if p.GracefulRestart {
		capabilities = append(capabilities, wire.NewCapGracefulRestart(restarted, false, uint16(p.RestartTime/time.Second), kept))
	}
	as := uint16(wire.AS_TRANS)
	if p.LocalASN <= math.MaxUint16 {
		as = uint16(p.LocalASN)
	}
	return wire.NewBGPOpenMessage(as, uint16(p.HoldTime/time.Second), routerID,
		[]wire.OptionParameterInterface{wire.NewOptionParameterCapability(capabilities)})
}

// terms are what both ends of a session have agreed on.
type terms struct {
	peer       Peer
	hold, keep time.Duration // 0: neither end ever breaks the silence
	family     map[wire.Family]bool
	// restarts reports that the router waits for the End-of-RIB of a restarted peer.
	restarts bool
	// extendedNextHop reports that IPv4 routes may have an IPv6 next hop (RFC 8950).
	extendedNextHop bool
	hops            nextHops
}

// agree reads the router's OPEN. An error of type *wire.MessageError is what it is to
// be sent.
func agree(p Peer, routerID netip.Addr, body []byte) (t terms, err error) {
	defer func() { // the decoder is not ours, and what it decodes comes from outside
		if broken := recover(); broken != nil {
			err = wire.NewMessageError(wire.BGP_ERROR_OPEN_MESSAGE_ERROR, 0, nil, fmt.Sprintf("cannot decode the router's OPEN: %v", broken))
		}
	}()
	var m wire.BGPOpen
	t = terms{peer: p, family: map[wire.Family]bool{}}
	if err := m.DecodeFromBytes(body); err != nil {
		return t, err
	}
	if _, err := wire.ValidateOpenMsg(&m, p.PeerASN, p.LocalASN, routerID); err != nil {
		return t, err
	}
	wideASN, multiprotocol := false, false
	for _, parameter := range m.OptParams {
		list, ok := parameter.(*wire.OptionParameterCapability)
		if !ok {
			continue
		}
		for _, c := range list.Capability {
			switch c := c.(type) {
			case *wire.CapMultiProtocol:
				multiprotocol = true
				t.family[c.CapValue] = true
			case *wire.CapFourOctetASNumber:
				wideASN = true
			case *wire.CapGracefulRestart:
				t.restarts = p.GracefulRestart
			case *wire.CapExtendedNexthop:
				for _, tuple := range c.Tuples {
					t.extendedNextHop = t.extendedNextHop || tuple.NLRIAFI == wire.AFI_IP && tuple.NLRISAFI == wire.SAFI_UNICAST &&
						tuple.NexthopAFI == wire.AFI_IP6
				}
			}
		}
	}
	if !multiprotocol {
		t.family[wire.RF_IPv4_UC] = true
	}
	if !wideASN {
		return t, wire.NewMessageError(wire.BGP_ERROR_OPEN_MESSAGE_ERROR, wire.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY, nil,
			"the router has no four-octet AS numbers (RFC 6793)")
	}
	t.hold = min(p.HoldTime, time.Duration(m.HoldTime)*time.Second)
	t.keep = min(p.KeepaliveTime, t.hold/3)
	return t, nil
}
