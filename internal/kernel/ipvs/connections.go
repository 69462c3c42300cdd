package ipvs

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// Connection is an entry of IPVS's own table of connections.
type Connection struct {
	Proto svc.Protocol
	// Client sent to Virtual, and Dest answers.
	Client, Virtual, Dest netip.AddrPort
	// State is the kernel's name for it, such as ESTABLISHED.
	State string
}

// Open reports whether packets may still come: the connection is of TCP or SCTP, and neither reset nor closed by both sides. Of UDP the
// kernel only knows when the last datagram passed.
func (c *Connection) Open() bool {
	switch c.State {
	case "NONE", "TIME_WAIT", "CLOSE", "CLOSED", "LISTEN":
		return false
	}
	return c.Proto != svc.UDP
}

// Connections calls f for each connection in the network namespace of the calling thread. It calls f for none where the kernel has no
// IPVS. What only remembers an endpoint for a client (persistence) is left out.
func Connections(f func(Connection)) (err error) {
	list, err := os.Open("/proc/thread-self/net/ip_vs_conn")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer list.Close()
	lines := bufio.NewScanner(list)
	for n := 0; lines.Scan(); n++ {
		if n == 0 { // the head
			continue
		}
		c, ok, err := parseConnection(lines.Text())
		if err != nil {
			return fmt.Errorf("connections of IPVS: %w", err)
		}
		if ok {
			f(c)
		}
	}
	return lines.Err()
}

// parseConnection reads a line of ip_vs_conn_seq_show of Linux: protocol, three addresses with ports, state. ok is false for
// persistence, and for protocols without ports.
func parseConnection(line string) (c Connection, ok bool, err error) {
	fields := strings.Fields(line)
	if len(fields) < 8 {
		return c, false, fmt.Errorf("the line %q has too few fields", line)
	}
	if c.Proto, err = svc.ParseProtocol(fields[0]); err != nil {
		return c, false, nil //nolint:nilerr // AH and ESP
	}
	for i, to := range []*netip.AddrPort{&c.Client, &c.Virtual, &c.Dest} {
		if *to, err = parseAddress(fields[1+2*i], fields[2+2*i]); err != nil {
			return c, false, fmt.Errorf("the line %q: %w", line, err)
		}
	}
	c.State = fields[7]
	return c, c.Client.Port() != 0, nil
}

// parseAddress reads 0A600064 0050, and 2001:0db8:0000:0000:0000:0000:0000:0001 0050.
func parseAddress(addr, port string) (netip.AddrPort, error) {
	p, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if strings.Contains(addr, ":") {
		a, err := netip.ParseAddr(addr)
		return netip.AddrPortFrom(a, uint16(p)), err
	}
	a, err := strconv.ParseUint(addr, 16, 32)
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{byte(a >> 24), byte(a >> 16), byte(a >> 8), byte(a)}), uint16(p)), err
}
