package bgp

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/bfd"
)

// Defaults of a Peer.
const (
	// Port is the one registered for BGP.
	Port = 179
	// DefaultHoldTime is what RFC 4271, section 10, suggests.
	DefaultHoldTime = 90 * time.Second
	// DefaultRestartTime is for how long a router with graceful restart keeps the routes.
	DefaultRestartTime = 120 * time.Second
)

// Bounds of a Peer's times: section 4.2 of RFC 4271 and section 3 of RFC 4724.
const (
	MinHoldTime    = 3 * time.Second
	maxHoldTime    = math.MaxUint16 * time.Second
	maxRestartTime = 4095 * time.Second
)

// Peer is a router that routes are announced to. Two Peers are the same
// configuration if they are equal.
type Peer struct {
	// Name identifies the peer in an Announcer.
	Name string
	// Address is the router's. A link-local one has a zone.
	Address netip.Addr
	// Port is 179 if it is 0.
	Port uint16
	// LocalASN and PeerASN are the numbers of the autonomous systems on both ends; if
	// they are equal, the session is internal (iBGP).
	LocalASN, PeerASN uint32
	// Password is the TCP MD5 password (RFC 2385), if any.
	Password string
	// HoldTime is after how much silence of one end the other gives the session up. The
	// router's value holds if it is lower. KeepaliveTime is how often this end breaks
	// the silence. Zero is 90 s, and a third of the hold time.
	HoldTime, KeepaliveTime time.Duration
	// GracefulRestart asks the router to keep the routes for RestartTime after a
	// session that ended without a message, as when this process was killed (RFC 4724).
	GracefulRestart bool
	RestartTime     time.Duration
	// MultihopTTL is the TTL of packets to a router of another AS that is not on the
	// node's own network; 0 and 1 are for one that is.
	MultihopTTL int
	// BFD are the times of a BFD session beside the one of BGP, which ends when the router is not heard by it any more. The zero
	// Config is for none.
	BFD bfd.Config
	// SourceAddress and Interface restrict from where the router is connected to.
	SourceAddress netip.Addr
	Interface     string
}

// String returns the peer as messages name it, without the password.
func (p Peer) String() string {
	return fmt.Sprintf("%s (%s, AS %d)", p.Name, netip.AddrPortFrom(p.Address, p.Port), p.PeerASN)
}

// Internal reports whether the peer is in the same AS.
func (p Peer) Internal() bool { return p.LocalASN == p.PeerASN }

// withDefaults returns p with nothing left to be chosen.
func (p Peer) withDefaults() Peer {
	if p.Port == 0 {
		p.Port = Port
	}
	if p.HoldTime == 0 {
		p.HoldTime = DefaultHoldTime
	}
	p.HoldTime = p.HoldTime.Truncate(time.Second) // the unit of the protocol
	if p.KeepaliveTime == 0 {
		p.KeepaliveTime = p.HoldTime / 3
	}
	if p.RestartTime == 0 {
		p.RestartTime = DefaultRestartTime
	}
	return p
}

// ttl returns the TTL of the session's packets, 0 for the system's. One hop is the
// rule between autonomous systems (RFC 4271, section 5.1.3).
func (p Peer) ttl() int {
	if p.Internal() {
		return 0
	}
	return max(1, p.MultihopTTL)
}

// Validate returns what is wrong with p.
func (p Peer) Validate() error {
	p = p.withDefaults()
	var errs []error
	bad := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	a := p.Address
	bad(!a.IsValid() || a.IsUnspecified() || a.IsMulticast() || a.Is4In6(), "address %s is not that of a router", a)
	bad(a.IsLinkLocalUnicast() && a.Is6() && a.Zone() == "" && p.Interface == "",
		"address %s is link-local: an interface is needed, as in %s%%eth0", a, a)
	bad(p.PeerASN == 0, "the peer's AS number is missing")
	bad(p.LocalASN == 0, "the local AS number is missing")
	bad(len(p.Password) > socket.MaxPassword, "the password has %d bytes, and %d are the most", len(p.Password), socket.MaxPassword)
	bad(p.HoldTime < MinHoldTime || p.HoldTime > maxHoldTime, "hold time %s is not between %s and %s", p.HoldTime, MinHoldTime, maxHoldTime)
	bad(p.KeepaliveTime <= 0 || p.KeepaliveTime >= p.HoldTime, "keepalive time %s is not below the hold time of %s",
		p.KeepaliveTime, p.HoldTime)
	bad(p.RestartTime < time.Second || p.RestartTime > maxRestartTime,
		"restart time %s is not between 1s and %s", p.RestartTime, maxRestartTime)
	bad(p.MultihopTTL < 0 || p.MultihopTTL > math.MaxUint8, "multihop TTL %d is not between 1 and 255", p.MultihopTTL)
	bad(p.MultihopTTL > 1 && p.Internal(), "multihop is for a peer of another AS")
	bad(p.SourceAddress.IsValid() && p.SourceAddress.Is4() != a.Is4(), "address %s and source address %s are of different families",
		a, p.SourceAddress)
	if p.BFD != (bfd.Config{}) {
		errs = append(errs, p.BFD.Validate())
	}
	return errors.Join(errs...)
}

// ParsePeer reads a Peer as a flag has it: ADDRESS[:PORT],peer-asn=N,local-asn=N and
// more of KEY=VALUE. Its name is the address. password-file is read at once.
func ParsePeer(s string) (Peer, error) {
	where, options, _ := strings.Cut(s, ",")
	var p Peer
	if at, err := netip.ParseAddrPort(where); err == nil {
		p.Address, p.Port = at.Addr(), at.Port()
	} else if p.Address, err = netip.ParseAddr(where); err != nil {
		return p, fmt.Errorf("BGP peer %q: want ADDRESS or ADDRESS:PORT (IPv6 as [ADDRESS]:PORT) at its beginning", s)
	}
	p.Name = p.Address.String()
	for option := range strings.SplitSeq(options, ",") {
		if option == "" {
			continue
		}
		key, value, _ := strings.Cut(option, "=")
		if err := p.setOption(key, value); err != nil {
			return p, fmt.Errorf("BGP peer %s: %s: %w", where, key, err)
		}
	}
	if err := p.Validate(); err != nil {
		return p, fmt.Errorf("BGP peer %s: %w", where, err)
	}
	return p, nil
}

func (p *Peer) setOption(key, value string) (err error) {
	switch key {
	case "peer-asn":
		p.PeerASN, err = parseUint32(value)
	case "local-asn":
		p.LocalASN, err = parseUint32(value)
	case "name":
		p.Name = value
	case "password-file":
		p.Password, err = readPassword(value)
	case "hold-time":
		p.HoldTime, err = time.ParseDuration(value)
	case "keepalive-time":
		p.KeepaliveTime, err = time.ParseDuration(value)
	case "graceful-restart":
		p.GracefulRestart = true
		if value != "" {
			p.RestartTime, err = time.ParseDuration(value)
		}
	case "multihop":
		p.MultihopTTL, err = strconv.Atoi(value)
	case "source-address":
		p.SourceAddress, err = netip.ParseAddr(value)
	case "interface":
		p.Interface = value
	case "bfd":
		p.BFD = bfd.Default()
		if value != "" {
			p.BFD.Transmit, err = time.ParseDuration(value)
			p.BFD.Receive = p.BFD.Transmit
		}
	case "bfd-multiplier":
		if p.BFD == (bfd.Config{}) {
			return errors.New("give bfd before it")
		}
		p.BFD.Multiplier, err = strconv.Atoi(value)
	default:
		return errors.New("unknown option; known are peer-asn, local-asn, name, password-file, hold-time, keepalive-time, " +
			"graceful-restart, bfd, bfd-multiplier, multihop, source-address, interface")
	}
	return err
}

func readPassword(file string) (string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	password := strings.TrimRight(string(b), "\r\n")
	if password == "" {
		return "", fmt.Errorf("%s is empty", file)
	}
	return password, nil
}

func parseUint32(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err
}
