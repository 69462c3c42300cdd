package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/svc"
)

// The numbers of linux/ip_vs.h.
const (
	cmdNewService = 1
	cmdSetService = 2
	cmdDelService = 3
	cmdGetService = 4
	cmdNewDest    = 5
	cmdSetDest    = 6
	cmdDelDest    = 7
	cmdGetDest    = 8
	cmdSetConfig  = 12
	cmdGetConfig  = 13

	attrService = 1
	attrDest    = 2
	attrTCP     = 4
	attrTCPFin  = 5
	attrUDP     = 6

	svcFamily    = 1
	svcProtocol  = 2
	svcAddr      = 3
	svcPort      = 4
	svcMark      = 5
	svcScheduler = 6
	svcFlags     = 7
	svcTimeout   = 8
	svcNetmask   = 9

	destAddr     = 1
	destPort     = 2
	destMethod   = 3
	destWeight   = 4
	destUpper    = 5
	destLower    = 6
	destActive   = 7
	destInactive = 8
	destPersist  = 9
	destFamily   = 11

	// perSend bounds the changes of one message, and with it the kernel's
	// answers, which must fit into the socket.
	perSend = 500
)

// ErrNotSupported is the error of a kernel without IPVS.
var ErrNotSupported = errors.New("the kernel has no IPVS (module ip_vs)")

// Conn talks to the virtual servers of one network namespace. It is used by one
// goroutine at a time.
type Conn struct {
	nl     *netlink.Conn
	family uint16
}

// Dial opens a Conn in the network namespace of the calling thread. The kernel
// loads its module if it has to. An error wraps ErrNotSupported where there is
// none.
func Dial() (*Conn, error) {
	nl, err := netlink.DialGeneric()
	if err != nil {
		return nil, err
	}
	c := &Conn{nl: nl}
	if err := c.resolve(); err != nil {
		_ = nl.Close()
		return nil, fmt.Errorf("ipvs: %w", err)
	}
	return c, nil
}

// resolve asks for the number of the generic netlink family.
func (c *Conn) resolve() error {
	var e netlink.Encoder
	e.Begin(unix.GENL_ID_CTRL, unix.NLM_F_ACK, unix.CTRL_CMD_GETFAMILY, 0)
	e.String(unix.CTRL_ATTR_FAMILY_NAME, "IPVS")
	e.End()
	errs := c.nl.Ask(e.Buf, func(body []byte) {
		if v := netlink.Attr(body, unix.CTRL_ATTR_FAMILY_ID); len(v) == 2 {
			c.family = binary.NativeEndian.Uint16(v)
		}
	})
	switch {
	case len(errs) > 0 && errors.Is(errs[0], unix.ENOENT), len(errs) == 0 && c.family == 0:
		return ErrNotSupported
	case len(errs) > 0:
		return errs[0]
	}
	return nil
}

// Close releases the socket.
func (c *Conn) Close() error { return c.nl.Close() }

// Batch collects changes for Conn.Send, which makes them in their order. Each
// has an owner, any value that identifies the caller's object.
type Batch[O any] struct {
	enc    netlink.Encoder
	starts []int
	owners []O
	what   []string
	family uint16
}

// NewBatch returns an empty Batch for c.
func NewBatch[O any](c *Conn) *Batch[O] { return &Batch[O]{family: c.family} }

// Len is the number of changes.
func (b *Batch[O]) Len() int { return len(b.starts) }

// AddService makes a virtual server.
func (b *Batch[O]) AddService(owner O, s Service) { b.service(owner, cmdNewService, "add", &s) }

// SetService changes one that is there.
func (b *Batch[O]) SetService(owner O, s Service) { b.service(owner, cmdSetService, "change", &s) }

// DelService removes one and all its real servers.
func (b *Batch[O]) DelService(owner O, k Key) {
	b.begin(owner, cmdDelService, "remove virtual server "+k.String())
	key(&b.enc, k)
	b.enc.End()
}

func (b *Batch[O]) service(owner O, cmd uint8, verb string, s *Service) {
	b.begin(owner, cmd, verb+" virtual server "+s.String()+" with scheduler "+s.Scheduler)
	e := &b.enc
	at := e.Nest(attrService)
	keyAttrs(e, s.Key)
	e.String(svcScheduler, s.Scheduler)
	flags := s.Flags
	if s.Persistence > 0 {
		flags |= flagPersistent
	}
	e.Bytes(svcFlags, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, uint32(flags)), ^uint32(0)))
	native32(e, svcTimeout, uint32(s.Persistence/time.Second))
	if s.Family == svc.IPv6 {
		native32(e, svcNetmask, 128)
	} else {
		native32(e, svcNetmask, ^uint32(0))
	}
	e.Close(at)
	e.End()
}

// AddDest adds a real server, SetDest changes the weight of one that is there,
// DelDest removes one.
func (b *Batch[O]) AddDest(owner O, k Key, d Dest) { b.dest(owner, cmdNewDest, "add", k, d) }

// SetDest is explained at AddDest.
func (b *Batch[O]) SetDest(owner O, k Key, d Dest) { b.dest(owner, cmdSetDest, "change", k, d) }

// DelDest is explained at AddDest.
func (b *Batch[O]) DelDest(owner O, k Key, d Dest) { b.dest(owner, cmdDelDest, "remove", k, d) }

func (b *Batch[O]) dest(owner O, cmd uint8, verb string, k Key, d Dest) {
	b.begin(owner, cmd, verb+" real server "+d.Addr.String()+" of "+k.String())
	e := &b.enc
	key(e, k)
	at := e.Nest(attrDest)
	a := d.Addr.Addr()
	native16(e, destFamily, family(svc.FamilyOf(a)))
	e.Bytes(destAddr, padded(a))
	e.Uint16(destPort, d.Addr.Port())
	native32(e, destMethod, 0) // by translation (masquerading)
	native32(e, destWeight, d.Weight)
	native32(e, destUpper, 0)
	native32(e, destLower, 0)
	e.Close(at)
	e.End()
}

func (b *Batch[O]) begin(owner O, cmd uint8, what string) {
	b.starts = append(b.starts, len(b.enc.Buf))
	b.owners = append(b.owners, owner)
	b.what = append(b.what, what)
	b.enc.Begin(b.family, unix.NLM_F_ACK, cmd, 0)
}

// Refusal is a change that the kernel rejected.
type Refusal[O any] struct {
	Owner O
	Err   error
}

// Send makes the changes of b and returns the refused ones; all others
// are made. The error is of the socket, after which it is unknown what was made.
func Send[O any](c *Conn, b *Batch[O]) ([]Refusal[O], error) {
	var refused []Refusal[O]
	for at := 0; at < b.Len(); at += perSend {
		end, to := min(at+perSend, b.Len()), len(b.enc.Buf)
		if end < b.Len() {
			to = b.starts[end]
		}
		for _, err := range c.nl.Send(b.enc.Buf[b.starts[at]:to]) {
			var e *netlink.Error
			if !errors.As(err, &e) || e.Index < 0 {
				return refused, fmt.Errorf("ipvs: %w", err)
			}
			i := at + e.Index
			refused = append(refused, Refusal[O]{b.owners[i], fmt.Errorf("ipvs: %s: %w", b.what[i], explain(e))})
		}
	}
	return refused, nil
}

// explain translates the kernel's error numbers to what they mean here.
func explain(e *netlink.Error) error {
	switch e.Errno {
	case unix.ENOENT:
		return fmt.Errorf("no such server, or the kernel lacks the scheduler (module ip_vs_NAME): %w", e)
	case unix.ESRCH:
		return fmt.Errorf("no such virtual server: %w", e)
	case unix.EPERM:
		return fmt.Errorf("it needs CAP_NET_ADMIN: %w", e)
	case unix.EPROTONOSUPPORT:
		return fmt.Errorf("the kernel's IPVS lacks the protocol: %w", e)
	}
	return e
}

func key(e *netlink.Encoder, k Key) {
	at := e.Nest(attrService)
	keyAttrs(e, k)
	e.Close(at)
}

func keyAttrs(e *netlink.Encoder, k Key) {
	native16(e, svcFamily, family(k.Family))
	if k.Mark != 0 {
		native32(e, svcMark, k.Mark)
		return
	}
	native16(e, svcProtocol, uint16(k.Proto))
	e.Bytes(svcAddr, padded(k.Addr.Addr()))
	e.Uint16(svcPort, k.Addr.Port())
}

// padded is an address in the 16 bytes of nf_inet_addr.
func padded(a netip.Addr) []byte {
	b := make([]byte, 16)
	copy(b, a.AsSlice())
	return b
}

func family(f svc.Family) uint16 {
	if f == svc.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func native16(e *netlink.Encoder, typ, v uint16) {
	e.Bytes(typ, binary.NativeEndian.AppendUint16(nil, v))
}

func native32(e *netlink.Encoder, typ uint16, v uint32) {
	e.Bytes(typ, binary.NativeEndian.AppendUint32(nil, v))
}

// Services calls f for each virtual server.
func (c *Conn) Services(f func(Service)) error {
	var e netlink.Encoder
	e.Begin(c.family, unix.NLM_F_DUMP, cmdGetService, 0)
	e.End()
	err := c.nl.Dump(e.Buf, func(body []byte) {
		if s, ok := decodeService(netlink.Attr(body, attrService)); ok {
			f(s)
		}
	})
	if err != nil {
		return fmt.Errorf("ipvs: list virtual servers: %w", err)
	}
	return nil
}

// Dests calls f for each real server of a virtual one. A virtual server that is
// not there has none.
func (c *Conn) Dests(k Key, f func(Dest)) error {
	var e netlink.Encoder
	e.Begin(c.family, unix.NLM_F_DUMP, cmdGetDest, 0)
	key(&e, k)
	e.End()
	err := c.nl.Dump(e.Buf, func(body []byte) {
		if d, ok := decodeDest(netlink.Attr(body, attrDest), k.Family); ok {
			f(d)
		}
	})
	if err != nil {
		return fmt.Errorf("ipvs: list real servers of %s: %w", k, err)
	}
	return nil
}

func decodeService(b []byte) (Service, bool) {
	var s Service
	var addr, port []byte
	var timeout uint32
	netlink.Attrs(b, func(typ uint16, v []byte) {
		switch typ {
		case svcFamily:
			s.Family = svc.IPv4
			if number(v) == unix.AF_INET6 {
				s.Family = svc.IPv6
			}
		case svcProtocol:
			s.Proto = svc.Protocol(number(v))
		case svcAddr:
			addr = v
		case svcPort:
			port = v
		case svcMark:
			s.Mark = number(v)
		case svcScheduler:
			s.Scheduler = netlink.CString(v)
		case svcFlags:
			s.Flags = Flags(number(v))
		case svcTimeout:
			timeout = number(v)
		}
	})
	if s.Flags&flagPersistent != 0 {
		s.Persistence = time.Duration(timeout) * time.Second
	}
	s.Flags &= Fallback
	if s.Mark != 0 {
		return s, s.Family != 0
	}
	var ok bool
	s.Addr, ok = addrPort(s.Family, addr, port)
	return s, ok
}

func decodeDest(b []byte, f svc.Family) (Dest, bool) {
	var d Dest
	var addr, port []byte
	netlink.Attrs(b, func(typ uint16, v []byte) {
		switch typ {
		case destAddr:
			addr = v
		case destPort:
			port = v
		case destWeight:
			d.Weight = number(v)
		case destActive, destInactive, destPersist:
			d.Connections += uint64(number(v))
		}
		if typ == destActive {
			d.Active = uint64(number(v))
		}
	})
	var ok bool
	d.Addr, ok = addrPort(f, addr, port)
	return d, ok
}

func addrPort(f svc.Family, addr, port []byte) (netip.AddrPort, bool) {
	if len(port) != 2 || len(addr) < 16 {
		return netip.AddrPort{}, false
	}
	n := 4
	if f == svc.IPv6 {
		n = 16
	}
	a, ok := netip.AddrFromSlice(addr[:n])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port)), ok
}

// number reads a number in the byte order of the machine.
func number(v []byte) uint32 {
	switch len(v) {
	case 2:
		return uint32(binary.NativeEndian.Uint16(v))
	case 4, 8:
		return binary.NativeEndian.Uint32(v)
	}
	return 0
}

// SetTimeouts sets for how long idle connections are remembered.
func (c *Conn) SetTimeouts(t Timeouts) error {
	now, err := c.Timeouts()
	if err != nil {
		return err
	}
	var e netlink.Encoder
	e.Begin(c.family, unix.NLM_F_ACK, cmdSetConfig, 0)
	for _, v := range []struct {
		typ       uint16
		want, now time.Duration
	}{{attrTCP, t.TCP, now.TCP}, {attrTCPFin, t.TCPFin, now.TCPFin}, {attrUDP, t.UDP, now.UDP}} {
		if v.want == 0 {
			v.want = v.now
		}
		native32(&e, v.typ, uint32((v.want+time.Second-1)/time.Second))
	}
	e.End()
	if errs := c.nl.Send(e.Buf); len(errs) > 0 {
		return fmt.Errorf("ipvs: set timeouts: %w", errs[0])
	}
	return nil
}

// Timeouts are those the kernel has.
func (c *Conn) Timeouts() (Timeouts, error) {
	var e netlink.Encoder
	e.Begin(c.family, unix.NLM_F_ACK, cmdGetConfig, 0)
	e.End()
	var t Timeouts
	errs := c.nl.Ask(e.Buf, func(body []byte) {
		netlink.Attrs(body, func(typ uint16, v []byte) {
			d := time.Duration(number(v)) * time.Second
			switch typ {
			case attrTCP:
				t.TCP = d
			case attrTCPFin:
				t.TCPFin = d
			case attrUDP:
				t.UDP = d
			}
		})
	})
	if len(errs) > 0 {
		return t, fmt.Errorf("ipvs: read timeouts: %w", errs[0])
	}
	return t, nil
}

// IsMissing reports whether a change was rejected because the kernel lacks what it names:
// the scheduler, or the server.
func IsMissing(err error) bool { return errors.Is(err, unix.ENOENT) }
