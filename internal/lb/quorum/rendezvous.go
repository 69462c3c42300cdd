package quorum

import (
	"net/netip"
)

// Member is a speaker whose node may announce.
type Member struct {
	Name string
	// Attrs describes the speaker (Node.SetAttrs). By it other speakers decide whether it
	// can announce an address. It is not empty.
	Attrs string
}

// Owner returns the member that should answer for an address, of the members
// that may: the one with the highest random weight (rendezvous hashing). A member that
// leaves only moves its own addresses, and one that joins only the addresses that it gets. It returns "" if none may.
func Owner(a netip.Addr, members []Member, may func(*Member) bool) string {
	best, owner := uint64(0), ""
	for i := range members {
		m := &members[i]
		if may != nil && !may(m) {
			continue
		}
		if w := weight(a, m.Name); owner == "" || w > best || w == best && m.Name < owner {
			best, owner = w, m.Name
		}
	}
	return owner
}

// weight is the same in every process: FNV-1a of name and address, mixed as in
// MurmurHash3, since the last bytes of FNV-1a barely reach its high bits.
func weight(a netip.Addr, name string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(name) {
		h = (h ^ uint64(name[i])) * 1099511628211
	}
	b := a.As16()
	for _, c := range b {
		h = (h ^ uint64(c)) * 1099511628211
	}
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
