package corefile

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	mdns "github.com/miekg/dns"
)

// Ports of the transports.
const (
	portDNS = 53
	portTLS = 853
)

// parseKey reads a zone as it stands before a block: [TRANSPORT://]ZONE[:PORT]. A range of
// addresses stands for its reverse zones.
func parseKey(k token) ([]Zone, error) {
	transport, rest := cutTransport(k.text)
	port := uint16(portDNS)
	switch transport {
	case DNS:
	case TLSTransport:
		port = portTLS
	default:
		return nil, k.pos.errorf("%s: the transport %s is not supported; want dns:// or tls://", k.text, transport)
	}
	if strings.HasSuffix(rest, ":") {
		return nil, k.pos.errorf("%s: there is no port behind the colon", k.text)
	}
	host, given := cutPort(rest)
	if given != 0 {
		port = given
	}
	names, err := expandZone(host)
	if err != nil {
		return nil, k.pos.errorf("%w", err)
	}
	var out []Zone
	for _, n := range names {
		out = append(out, Zone{Name: n, Port: port, Transport: transport})
	}
	return out, nil
}

// cutTransport divides "tls://REST"; the default is dns.
func cutTransport(s string) (transport, rest string) {
	if t, rest, ok := strings.Cut(s, "://"); ok {
		return strings.ToLower(t), rest
	}
	return DNS, s
}

// cutPort divides "HOST:PORT"; the port is 0 if there is none.
func cutPort(s string) (host string, port uint16) {
	at := strings.LastIndexByte(s, ':')
	if at < 0 {
		return s, 0
	}
	n, err := strconv.ParseUint(s[at+1:], 10, 16)
	if err != nil || n == 0 {
		return s, 0
	}
	return s[:at], uint16(n)
}

// expandZone returns the zones that a name or a range of addresses stands for.
func expandZone(s string) ([]string, error) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return reverseZones(p), nil
	}
	if s == "" {
		s = "."
	}
	if _, ok := mdns.IsDomainName(s); !ok {
		return nil, fmt.Errorf("%q is neither a domain name nor a range of addresses", s)
	}
	return []string{strings.ToLower(mdns.Fqdn(s))}, nil
}

// reverseZones returns the reverse zones of a range, one for each value of the octet, in
// IPv6 of the nibble, in which the range ends.
func reverseZones(p netip.Prefix) []string {
	unit, suffix := 8, "in-addr.arpa."
	if p.Addr().Is6() {
		unit, suffix = 4, "ip6.arpa."
	}
	p = p.Masked()
	whole := (p.Bits() + unit - 1) / unit
	count := 1 << (whole*unit - p.Bits())
	digits := addressDigits(p.Addr(), unit)
	var out []string
	for i := range count {
		name := suffix
		for at := range whole {
			d := digits[at]
			if at == whole-1 {
				d += i
			}
			base := 10
			if unit == 4 {
				base = 16
			}
			name = strconv.FormatInt(int64(d), base) + "." + name
		}
		out = append(out, name)
	}
	return out
}

// addressDigits returns the octets or nibbles of an address.
func addressDigits(a netip.Addr, unit int) (out []int) {
	for _, b := range a.AsSlice() {
		if unit == 4 {
			out = append(out, int(b>>4), int(b&15))
		} else {
			out = append(out, int(b))
		}
	}
	return out
}
