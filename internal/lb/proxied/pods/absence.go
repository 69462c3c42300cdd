package pods

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Absence is a Pod that gets no new clients, why, and since when.
type Absence struct {
	Service svc.Name
	Pod     netip.AddrPort
	// Ejected is true after failures of clients' connections and requests, false after failed checks.
	Ejected bool
	Reason  string
	Since   time.Time

	until time.Time // of an ejection
}

// Absences are the Pods of all pools that get no new clients. It is safe for concurrent use.
type Absences struct {
	changed func()

	mu  sync.Mutex
	all map[*Member]Absence
}

// NewAbsences returns an empty list. changed is called, with locks held, when an entry comes or goes: it must not wait.
func NewAbsences(changed func()) *Absences {
	return &Absences{changed: changed, all: map[*Member]Absence{}}
}

// maxReason bounds the bytes of a reason: it may repeat what a Pod has answered.
const maxReason = 200

// add records why a member is absent. One that is absent already keeps its time; what checks say goes before what clients met.
func (a *Absences) add(m *Member, now Absence) {
	if len(now.Reason) > maxReason {
		now.Reason = strings.ToValidUTF8(now.Reason[:maxReason], "") + "..."
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	was, had := a.all[m]
	if had && !was.Ejected && now.Ejected {
		return
	}
	if had {
		now.Since = was.Since
	}
	a.all[m] = now
	if !had || was.Ejected != now.Ejected {
		a.changed()
	}
}

// remove undoes add. With ejected, only what clients met.
func (a *Absences) remove(m *Member, ejected bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if was, had := a.all[m]; had && (!ejected || was.Ejected) {
		delete(a.all, m)
		a.changed()
	}
}

// List returns them in the order of their Services and addresses; a Pod that several ports share once. The end of an
// ejection does not make a Pod return: it is on trial until it is reached, or nobody has tried for long.
func (a *Absences) List() []Absence {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	out := make([]Absence, 0, len(a.all))
	for m, one := range a.all {
		if one.Ejected && now.Sub(one.until) > mostEject {
			delete(a.all, m)
			continue
		}
		out = append(out, one)
	}
	slices.SortFunc(out, func(x, y Absence) int { return cmp.Or(x.Compare(&y), x.Since.Compare(y.Since)) })
	return slices.CompactFunc(out, func(x, y Absence) bool { return x.Compare(&y) == 0 })
}

// Compare orders by Services and addresses.
func (a *Absence) Compare(b *Absence) int {
	return cmp.Or(strings.Compare(a.Service.Namespace, b.Service.Namespace), strings.Compare(a.Service.Name, b.Service.Name),
		a.Pod.Compare(b.Pod))
}
