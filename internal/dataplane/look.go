package dataplane

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Installed is what a mode has for one frontend, as it has just been read back.
type Installed struct {
	// Front is the frontend in the words of FrontKey.String.
	Front string `json:"front"`
	// Present reports whether packets find the frontend.
	Present bool `json:"present"`
	// Outside is what clients elsewhere meet; Inside is for this node and its Pods, nil
	// where there is no difference.
	Outside Fate  `json:"outside"`
	Inside  *Fate `json:"inside,omitempty"`
	// Holes is how many endpoints are missing where connections are still sent: these are dropped.
	Holes int `json:"holes,omitempty"`
	// Allow are the clients that are let in, if Limited.
	Limited bool           `json:"limited,omitempty"`
	Allow   []netip.Prefix `json:"allow,omitempty"`
	// Kept is the endpoint that the client asked about is kept at by affinity, not
	// valid if it is not known to be kept.
	Kept netip.AddrPort `json:"kept,omitzero"`
	// Proof are the elements that this was read from.
	Proof []Proof `json:"proof,omitempty"`
}

// Fate is what becomes of a new connection: it goes to one of the Endpoints, sorted by
// address, or without any it is refused, or dropped if Drop is set.
type Fate struct {
	Endpoints []netip.AddrPort `json:"endpoints,omitempty"`
	Drop      bool             `json:"drop,omitempty"`
}

// Proof is one element of the kernel, or of the process that carries connections.
type Proof struct {
	// Element is its place, Text its content.
	Element string `json:"element"`
	Text    string `json:"text"`
}

// Asked is a frontend to read back.
type Asked struct {
	FrontKey
	Family svc.Family
	// At is where packets are sent to: the frontend's address, for a node port one of this
	// node's, not valid if it has none.
	At netip.Addr
}

// Looker is an Applier that can read back single frontends. Look may be called at any time, beside the other
// methods: what Apply writes at that time may be seen in part. The order of the result is that of fronts; client is
// one whose affinity is asked for, not valid for none.
type Looker interface {
	Look(ctx context.Context, fronts []Asked, client netip.Addr) ([]Installed, error)
}

// NewFate returns the Fate of connections with these endpoints.
func NewFate(endpoints []netip.AddrPort, drop bool) Fate {
	list := slices.Clone(endpoints)
	slices.SortFunc(list, netip.AddrPort.Compare)
	list = slices.Compact(list)
	return Fate{Endpoints: list, Drop: drop && len(list) == 0}
}

// Is reports whether both say the same.
func (f Fate) Is(o Fate) bool { return f.Drop == o.Drop && slices.Equal(f.Endpoints, o.Endpoints) }

// For returns what clients on this node (inside) or elsewhere meet.
func (i *Installed) For(inside bool) Fate {
	if inside && i.Inside != nil {
		return *i.Inside
	}
	return i.Outside
}

// Says adds an element to the Proof.
func (i *Installed) Says(element, text string) {
	i.Proof = append(i.Proof, Proof{Element: element, Text: text})
}

// Expected is what a mode that did all of it has for a frontend: Installed without a proof.
func Expected(p *table.ServicePort, f *table.Frontend) Installed {
	out := Installed{Front: KeyOf(p.Protocol, f).String(), Present: true, Outside: NewFate(addresses(f.Endpoints), f.Drop)}
	if f.LocalClients != nil {
		inside := NewFate(addresses(f.LocalClients), false)
		out.Inside = &inside
	}
	if f.SourceRanges != nil {
		out.Limited, out.Allow = true, slices.Clone(f.SourceRanges)
	}
	return out
}

func addresses(list []table.Endpoint) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, len(list))
	for _, e := range list {
		out = append(out, e.Addr)
	}
	return out
}

// Differs returns in what the installed frontend differs from the expected one, empty if in nothing.
func (i *Installed) Differs(want *Installed) string {
	switch {
	case i.Present != want.Present && want.Present:
		return "the frontend is not installed"
	case i.Present != want.Present:
		return "the frontend is still installed"
	case i.Limited != want.Limited || !sameRanges(i.Allow, want.Allow):
		return fmt.Sprintf("it lets in %v, not %v", i.Allow, want.Allow)
	}
	for _, inside := range []bool{false, true} {
		if has, wants := i.For(inside), want.For(inside); !has.Is(wants) {
			who := "clients elsewhere"
			if inside {
				who = "clients on this node"
			}
			return fmt.Sprintf("%s are %s, not %s", who, has, wants)
		}
	}
	return ""
}

// String returns for example "sent to 10.244.0.5:80 10.244.1.7:80", "refused" or "dropped".
func (f Fate) String() string {
	switch {
	case len(f.Endpoints) > 0:
		return "sent to " + strings.Trim(fmt.Sprint(f.Endpoints), "[]")
	case f.Drop:
		return "dropped"
	}
	return "refused"
}

func sameRanges(a, b []netip.Prefix) bool {
	sorted := func(list []netip.Prefix) []netip.Prefix {
		out := slices.Clone(list)
		for i := range out {
			out[i] = out[i].Masked()
		}
		slices.SortFunc(out, netip.Prefix.Compare)
		return slices.Compact(out)
	}
	return slices.Equal(sorted(a), sorted(b))
}

// AskedOf returns how to ask for a frontend of a Table.
func AskedOf(t *table.Table, p *table.ServicePort, f *table.Frontend) Asked {
	a := Asked{FrontKey: KeyOf(p.Protocol, f), Family: p.Family, At: f.Addr.Addr()}
	if !a.Node {
		return a
	}
	a.At = netip.Addr{}
	for _, addr := range t.NodePortAddrs {
		if svc.FamilyOf(addr) == p.Family && !addr.IsLoopback() {
			a.At = addr
			break
		}
	}
	return a
}
