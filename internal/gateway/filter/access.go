package filter

import (
	"net/netip"
	"slices"
)

// Access is which clients may send requests.
type Access struct {
	Allow []netip.Prefix // empty for all
	Deny  []netip.Prefix // of them
}

// Admits reports whether a client may. nil is for all.
func (a *Access) Admits(client netip.Addr) bool {
	if a == nil {
		return true
	}
	client = client.Unmap().WithZone("")
	has := func(p netip.Prefix) bool { return p.Contains(client) }
	return (len(a.Allow) == 0 || slices.ContainsFunc(a.Allow, has)) && !slices.ContainsFunc(a.Deny, has)
}

// Names reports whether a client may since an entry of Allow is for it.
func (a *Access) Names(client netip.Addr) bool {
	return a != nil && len(a.Allow) > 0 && a.Admits(client)
}
