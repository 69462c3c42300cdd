// Package static compares the addresses that a Gateway asks for with its own. It is pure.
package static

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/svc"
)

// Address is an address of a Gateway's spec, by its place there.
type Address struct {
	Index int
	Value string
}

// Addresses are the ones that a Gateway asks for.
type Addresses []Address

// Unusable returns why the Gateway does not have one of them, "" if it has all. have are the addresses of its Service.
func (all Addresses) Unusable(have []string, service svc.Name) string {
	families := map[bool]bool{}
	for _, a := range all {
		asked, err := netip.ParseAddr(a.Value)
		switch {
		case err != nil:
			return fmt.Sprintf("addresses[%d].value: want an IP address", a.Index)
		case families[asked.Is4()]:
			return fmt.Sprintf("addresses[%d]: a Gateway has one address of each family", a.Index)
		case !slices.ContainsFunc(have, func(h string) bool { had, err := netip.ParseAddr(h); return err == nil && had == asked }):
			return fmt.Sprintf("addresses[%d]: %s is of no pool for this Gateway, or in use, or not assigned yet: see the Events of Service %s",
				a.Index, asked, service)
		}
		families[asked.Is4()] = true
	}
	return ""
}
