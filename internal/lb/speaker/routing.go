package speaker

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/routes"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// routing is what a speaker announces by BGP. Every eligible node announces every
// address: there are no votes. Only the loop uses it.
type routing struct {
	name     string // of the node
	known    *Known
	forwards *forwarding
	log      *slog.Logger
	changed  func()         // is called when the Speaker object has to show something else
	routes   *routes.Routes // nil with v1.AnnounceNone
	began    time.Time
	begun    bool
	complete bool   // whether routers with graceful restart know that
	rebooted bool   // the machine has started not long ago
	why      string // why the node may not announce, empty if it may
	may      bool   // whether the node did, when it was last looked at
	// since is when each address was announced first. unprogrammed are addresses that
	// wait for the proxy.
	since        map[netip.Addr]time.Time
	unprogrammed map[netip.Addr]struct{}
	only         map[netip.Addr][]string // the peers that get the routes, for addresses that not all get
	peers        []v1.PeerStatus         // as they were last reported
}

const (
	// beginAnyway is after how long the sessions begin although the node may not announce all yet. Routers with graceful restart
	// wait for a session with their restart time only.
	beginAnyway = 10 * time.Second
	// completeAnyway is after how long such a router drops the routes of this node's earlier process that are not announced again.
	// Until then the node's kernel still forwards over them. A busy machine can need long to program all Services.
	completeAnyway = time.Minute
	// forgetful is for how long after the start of the machine routes are not kept so: the kernel has lost what it forwarded.
	forgetful = 10 * time.Minute
)

// closeTimeout bounds how long Run waits for routers to take the withdrawals.
const closeTimeout = 2 * time.Second

// set announces and withdraws the changed addresses. reason is why the node may not
// announce, empty if it may.
func (r *routing) set(node *corev1.Node, reason string, changed []address) {
	if r.routes == nil {
		return
	}
	r.routes.SetNode(node)
	r.why = reason
	if may := reason == ""; may != r.may {
		r.may = may
		changed = r.known.every()
	}
	for i := range changed {
		r.setOne(&changed[i])
	}
	for a := range r.unprogrammed {
		known := r.known.one(a)
		r.setOne(&known)
	}
	r.begin(time.Since(r.began))
	if now := r.routes.Status(); !slices.Equal(now, r.peers) {
		r.peers = now
		r.changed()
	}
}

// begin starts the sessions, and ends what routers with graceful restart keep, once the node announces all; or when it has
// lasted too long.
func (r *routing) begin(after time.Duration) {
	if r.complete || !r.known.Listed() {
		return
	}
	all := r.may && len(r.unprogrammed) == 0
	if !r.begun && (all || after > beginAnyway) {
		r.begun = true
		r.routes.Begin()
	}
	if all || after > completeAnyway || r.rebooted && after > beginAnyway {
		r.complete = true
		r.routes.Complete()
	}
}

func (r *routing) setOne(a *address) {
	wanted := r.may && len(a.services) > 0 && a.ways.takes(v1.AnnounceBGP) && a.permits(r.name)
	delete(r.unprogrammed, a.addr)
	switch _, announced := r.since[a.addr]; {
	case !wanted && announced:
		r.routes.Withdraw(a.addr)
		delete(r.since, a.addr)
		delete(r.only, a.addr)
		r.log.Info("withdrawing a route", "address", a.addr, "reason", r.why)
		r.changed()
	case wanted && !announced && !r.forwards.has(a):
		r.unprogrammed[a.addr] = struct{}{}
	case wanted:
		r.routes.Announce(a.addr, a.ways.object) // as its pool has it now
		if peers, all := a.ways.peers(); all {
			delete(r.only, a.addr)
		} else {
			r.only[a.addr] = peers
		}
		if !announced {
			r.since[a.addr] = time.Now()
			r.log.Info("announcing a route", "address", a.addr, "service", claim.Join(a.services))
			r.changed()
		}
	}
}

// networks returns the prefixes that are announced as a whole, for several addresses.
func (r *routing) networks() []netip.Prefix {
	established := func(p v1.PeerStatus) bool { return p.State == v1.PeerEstablished }
	if r.routes == nil || !slices.ContainsFunc(r.peers, established) {
		return nil
	}
	return r.routes.Networks()
}

// oldest returns when the oldest of the sessions began over which routes go to peers that are listed, or to all if none is. It is
// zero if there is none.
func (r *routing) oldest(only []string) (first time.Time) {
	for _, p := range r.peers {
		if p.State == v1.PeerEstablished && (first.IsZero() || p.Since.Time.Before(first)) && (len(only) == 0 || slices.Contains(only, p.Name)) {
			first = p.Since.Time
		}
	}
	return first
}

// statusOf adds what is announced by BGP to a status. Nothing is announced before there is a session.
func (r *routing) statusOf(status *v1.SpeakerStatus) {
	status.Peers = r.peers
	toAll := r.oldest(nil)
	if toAll.IsZero() {
		return
	}
	for a, since := range r.since {
		first := toAll
		if only := r.only[a]; len(only) > 0 {
			if first = r.oldest(only); first.IsZero() {
				continue
			}
		}
		if since.Before(first) {
			since = first
		}
		status.Addresses = append(status.Addresses, v1.AnnouncedAddress{Address: a.String(), Via: "bgp", Since: metav1.NewMicroTime(since)})
	}
}

// withdraw withdraws the routes of addresses.
func (r *routing) withdraw(which func(netip.Addr) bool) {
	for a := range r.since {
		if which(a) {
			r.routes.Withdraw(a)
		}
	}
}

// close withdraws all routes and returns when the routers have taken that. If another process returns soon, routers with
// graceful restart keep them.
func (r *routing) close(ctx context.Context, returns bool) {
	if r.routes == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	if returns {
		r.routes.Restart(ctx)
	} else {
		r.routes.Close(ctx)
	}
	clear(r.since)
	clear(r.only)
	r.peers = nil
}
