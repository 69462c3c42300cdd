package speaker

import (
	"encoding/json"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// memberLink is an interface of a speaker's node as it reports it to the others (quorum.Member.Attrs,
// a list of these as JSON).
type memberLink struct {
	Name     string         `json:"n"`
	MAC      []byte         `json:"m"`
	Networks []netip.Prefix `json:"p,omitempty"`
	// Any is true for an interface of Options: its networks do not matter.
	Any bool `json:"a,omitempty"`
}

// maxLinks and maxNetworks bound the interfaces that a speaker reports.
const (
	maxLinks    = 16
	maxNetworks = 8
)

// encodeLinks returns the interfaces that a speaker reports to the others: interfaces with a network or with one of these
// names. Pods' interfaces have no network, and there may be many.
func encodeLinks(links []link.Interface, anyNetwork bool, names []string) string {
	var out []memberLink
	for _, l := range links {
		if len(out) < maxLinks && (anyNetwork || len(l.Networks) > 0 || slices.Contains(names, l.Name)) {
			out = append(out, memberLink{l.Name, l.MAC[:], l.Networks[:min(len(l.Networks), maxNetworks)], anyNetwork})
		}
	}
	text, _ := json.Marshal(out) // of strings
	return string(text)
}

// links are the interfaces of the members. Only the loop uses it.
type links struct {
	log    *slog.Logger
	parsed map[string][]memberLink // by quorum.Member.Attrs
}

func newLinks(log *slog.Logger) *links { return &links{log, map[string][]memberLink{}} }

// of returns the interfaces of a member.
func (l *links) of(m *quorum.Member) []memberLink {
	if known, is := l.parsed[m.Attrs]; is {
		return known
	}
	var list []memberLink
	if err := json.Unmarshal([]byte(m.Attrs), &list); err != nil {
		l.log.Warn("cannot read the interfaces of a speaker; it gets no addresses", "node", m.Name, "err", err)
	}
	l.parsed[m.Attrs] = list
	return list
}

// own returns the interfaces that a node reports, none if it reports nothing.
func (l *links) own(node, attrs string) []memberLink {
	if attrs == "" {
		return nil
	}
	return l.of(&quorum.Member{Name: node, Attrs: attrs})
}

// bound forgets what is parsed if that is much more than members have.
func (l *links) bound(members int) {
	if len(l.parsed) > 4*members+16 {
		clear(l.parsed)
	}
}

// mayAnnounce reports whether a member's node can and may announce an address.
func (l *links) mayAnnounce(a *address, m *quorum.Member) bool {
	if !a.ways.takes(v1.AnnounceARP) || !a.permits(m.Name) {
		return false
	}
	return slices.ContainsFunc(l.of(m), func(i memberLink) bool {
		return i.Any && len(a.ways.interfaces) == 0 ||
			announce.Reaches(link.Interface{Name: i.Name, Networks: i.Networks}, a.addr, a.ways.interfaces)
	})
}

// reportInterfaces adds to a status the interfaces at which the speaker answers.
func reportInterfaces(status *v1.SpeakerStatus, own []memberLink) {
	for _, l := range own {
		status.Interfaces = append(status.Interfaces, l.Name)
		status.AnyNetwork = status.AnyNetwork || l.Any
	}
}
