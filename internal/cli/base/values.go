package base

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fairlead/fairlead/internal/svc"
)

// The values of flags.
type (
	// Addrs is a comma-separated list of addresses.
	Addrs []netip.Addr
	// Prefixes is a comma-separated list of networks.
	Prefixes []netip.Prefix
	// PortRange is a range of ports, as of svc.ParsePortRange.
	PortRange svc.PortRange
)

func (v *Addrs) String() string { return ListOf(*v) }

// Type names the value in --help.
func (*Addrs) Type() string { return "IP,..." }

// Set parses the value.
func (v *Addrs) Set(s string) error { return parseList(s, v, netip.ParseAddr, "an IP address") }

func (v *Prefixes) String() string { return ListOf(*v) }

// Type names the value in --help.
func (*Prefixes) Type() string { return "CIDR,..." }

// Set parses the value.
func (v *Prefixes) Set(s string) error {
	return parseList(s, v, netip.ParsePrefix, "a network such as 10.96.0.0/16")
}

func (v *PortRange) String() string {
	if *v == (PortRange{}) {
		return ""
	}
	return svc.PortRange(*v).String()
}

// Type names the value in --help.
func (*PortRange) Type() string { return "FIRST-LAST" }

// Set parses the value.
func (v *PortRange) Set(s string) error {
	r, err := svc.ParsePortRange(s)
	if err == nil {
		*v = PortRange(r)
	}
	return err
}

func parseList[S ~[]T, T any](s string, to *S, parse func(string) (T, error), want string) error {
	var out S
	for part := range strings.SplitSeq(s, ",") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		v, err := parse(part)
		if err != nil {
			return fmt.Errorf("%q is not %s%s", part, want, cause(err))
		}
		out = append(out, v)
	}
	*to = out
	return nil
}

// cause returns what an error of netip says last, which is what is wrong: its beginning repeats the value.
func cause(err error) string {
	text := err.Error()
	if i := strings.LastIndex(text, "): "); i >= 0 {
		return ": " + text[i+len("): "):]
	}
	return ""
}

// ListOf joins values by commas.
func ListOf[S ~[]T, T fmt.Stringer](list S) string {
	var parts []string
	for _, v := range list {
		parts = append(parts, v.String())
	}
	return strings.Join(parts, ",")
}

// CheckNodeName rejects what cannot be the name of a Node.
func CheckNodeName(name string) error {
	if name == "" {
		return Usagef("--node-name is empty")
	}
	if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 {
		return Usagef("--node-name %q cannot be the name of a Node: %s", name, errs[0])
	}
	return nil
}

// CheckBind rejects an address to listen on that is not IP:PORT or empty, which is for none.
func CheckBind(flag, addr string) error {
	if addr == "" {
		return nil
	}
	if _, port, err := net.SplitHostPort(addr); err == nil {
		if _, err := strconv.ParseUint(port, 10, 16); err == nil {
			return nil
		}
	}
	return Usagef("--%s is %q; want IP:PORT, or nothing for none", flag, addr)
}

// Hostname is the default of --node-name: the machine's name in lower case, as
// node names are.
func Hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return strings.ToLower(name)
}

// First returns the first element of list, "" if there is none.
func First(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}
