package cli

import (
	"fmt"
	"net/netip"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fairlead/fairlead/internal/svc"
)

// addrsValue, prefixesValue and portRangeValue are flags of a comma-separated
// list of addresses, of networks, and of a range of ports.
type (
	addrsValue     []netip.Addr
	prefixesValue  []netip.Prefix
	portRangeValue svc.PortRange
)

func (v *addrsValue) String() string { return listOf(*v) }

func (*addrsValue) Type() string { return "IP,..." }

func (v *addrsValue) Set(s string) error { return parseList(s, v, netip.ParseAddr, "an IP address") }

func (v *prefixesValue) String() string { return listOf(*v) }

func (*prefixesValue) Type() string { return "CIDR,..." }

func (v *prefixesValue) Set(s string) error {
	return parseList(s, v, netip.ParsePrefix, "a network such as 10.96.0.0/16")
}

func (v *portRangeValue) String() string {
	if *v == (portRangeValue{}) {
		return ""
	}
	return svc.PortRange(*v).String()
}

func (*portRangeValue) Type() string { return "FIRST-LAST" }

func (v *portRangeValue) Set(s string) error {
	r, err := svc.ParsePortRange(s)
	if err == nil {
		*v = portRangeValue(r)
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
			return fmt.Errorf("%q is not %s", part, want)
		}
		out = append(out, v)
	}
	*to = out
	return nil
}

func listOf[S ~[]T, T fmt.Stringer](list S) string {
	var parts []string
	for _, v := range list {
		parts = append(parts, v.String())
	}
	return strings.Join(parts, ",")
}

// variants are the values of --iptables-variant, and balances those of --balance.
func variants() []string { return []string{"auto", "nft", "legacy"} }
func balances() []string { return []string{"random", "roundrobin"} }

// checkNodeName rejects what cannot be the name of a Node.
func checkNodeName(name string) error {
	if name == "" {
		return usagef("--node-name is empty")
	}
	if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 {
		return usagef("--node-name %q cannot be the name of a Node: %s", name, errs[0])
	}
	return nil
}
