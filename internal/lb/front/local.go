package front

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
)

// localAddresses makes the addresses of Services addresses of this node, of which only the listeners can be reached.
type localAddresses struct {
	log     *slog.Logger
	network *Network
	// vips are the addresses that were made local.
	vips []netip.Addr
	// begun is true after the first set.
	begun bool
	// clusterIPs are the same for ClusterIPs, and from are the addresses of the node that it calls both from. The ClusterIPs in
	// leaving have no listener any more: connections end until the time comes.
	clusterIPs, from []netip.Addr
	leaving          map[netip.Addr]time.Time
	// staleVIPs and staleClusterIPs are true if the kernel may have others: the next set writes them, changed or not.
	staleVIPs, staleClusterIPs bool
	filterErr                  string // the last logged reason why the filter could not be set
}

func newLocalAddresses(log *slog.Logger, network *Network) *localAddresses {
	return &localAddresses{
		log: log, network: network, leaving: map[netip.Addr]time.Time{},
		staleVIPs: true, staleClusterIPs: true, // an earlier process may have left some
	}
}

// repair makes the next set write the local routes again, if there are any. The filter stays as it is.
func (l *localAddresses) repair() {
	l.staleVIPs = l.staleVIPs || len(l.vips) > 0
	l.staleClusterIPs = l.staleClusterIPs || len(l.clusterIPs) > 0
}

// setSources sets the addresses of the node that it calls load balancers and ClusterIPs from.
func (l *localAddresses) setSources(from []netip.Addr) {
	if !slices.Equal(from, l.from) {
		l.from, l.staleVIPs, l.staleClusterIPs = from, true, true
	}
}

// close closes doors that no Service has any more: packets are rejected before the listener goes.
func (l *localAddresses) close(doors []proxied.Door, services []*proxied.Service) {
	wanted := map[proxied.Door]bool{}
	for _, s := range services {
		for _, at := range s.Spec.Listeners {
			for _, a := range s.Addrs {
				wanted[proxied.Door{UDP: at.Protocol == dialect.UDP, At: netip.AddrPortFrom(a, at.Port)}] = true
			}
		}
	}
	leaves := func(d proxied.Door) bool { return !d.Inherited && !wanted[proxied.Door{UDP: d.UDP, At: d.At}] }
	stay := slices.DeleteFunc(slices.Clone(doors), leaves)
	had := l.known()
	if len(had) == 0 || len(stay) == len(doors) {
		return
	}
	// A packet passes two chains and then looks for its socket. One that the first chain has led here must not be rejected by the
	// second, nor find no socket: the listener stays there until no such packet is on its way.
	between, led := listenersOf(doors), false
	for i, d := range doors {
		if leaves(d) && between[i].First {
			between[i].First, led = false, true
		}
	}
	if led {
		_ = l.setFilter(had, between)
		l.network.Filter.Settle()
	}
	_ = l.setFilter(had, listenersOf(stay))
	if led {
		l.network.Filter.Settle()
	}
}

// known returns the addresses that were made local.
func (l *localAddresses) known() []netip.Addr { return slices.Concat(l.vips, l.clusterIPs) }

// begin takes over the ClusterIPs that an earlier process has made local: their connections come here from the first filter on.
func (l *localAddresses) begin() {
	if l.begun {
		return
	}
	l.begun = true
	var err error
	if l.clusterIPs, err = l.network.ClusterIPs(); err != nil {
		l.log.Warn("cannot list the ClusterIPs of an earlier process; for a moment connections pass their routes by", "err", err)
	}
}

// set makes the addresses of doors, and no others, local. An address is filtered before it becomes local and until it no
// longer is. A ClusterIP is local before its connections come here, and for some time after: the open ones end then.
func (l *localAddresses) set(doors []proxied.Door) error {
	l.begin()
	listeners := listenersOf(doors)
	vips, clusterIPs := addressesOf(listeners)
	clusterIPs = l.linger(clusterIPs)
	had := l.known()
	local, early := setOf(had), slices.Clone(listeners)
	for i := range early {
		early[i].First = early[i].First && local[early[i].At.Addr()]
	}
	all := slices.Concat(vips, clusterIPs)
	err := l.setFilter(append(had, all...), early)
	writesVIPs := l.staleVIPs || !slices.Equal(vips, l.vips)
	writesClusterIPs := l.staleClusterIPs || !slices.Equal(clusterIPs, l.clusterIPs)
	if !writesVIPs && !writesClusterIPs {
		return err
	}
	if writesVIPs {
		if err := l.called(l.network.SetVIPs, vips); err != nil {
			l.log.Error("cannot make addresses of load balancers local; retrying", "err", err)
			l.vips, l.staleVIPs = append(l.vips, vips...), true // some are local now
			slices.SortFunc(l.vips, netip.Addr.Compare)
			l.vips = slices.Compact(l.vips)
			return err
		}
		l.vips, l.staleVIPs = vips, false
	}
	if writesClusterIPs && l.setClusterIPs(clusterIPs) != nil {
		listeners = early // load balancers do not wait for ClusterIPs
	}
	return l.setFilter(all, listeners)
}

// called makes addresses local. It does without the node's own address if that is not known to the kernel yet.
func (l *localAddresses) called(set func(addrs, from []netip.Addr) error, addrs []netip.Addr) error {
	err := set(addrs, l.from)
	if err != nil && len(l.from) > 0 {
		err = set(addrs, nil)
	}
	return err
}

// setClusterIPs makes ClusterIPs local.
func (l *localAddresses) setClusterIPs(clusterIPs []netip.Addr) error {
	if err := l.called(l.network.SetClusterIPs, clusterIPs); err != nil {
		l.log.Error("cannot make ClusterIPs with routes local; retrying", "err", err)
		l.staleClusterIPs = true
		return err
	}
	l.clusterIPs, l.staleClusterIPs = clusterIPs, false
	return nil
}

// lingerTime is how long the connections to a ClusterIP may go on after its routes have gone.
const lingerTime = 5 * time.Minute

// linger returns the ClusterIPs that must be local beside wanted ones: the ones that had a listener until now.
func (l *localAddresses) linger(wanted []netip.Addr) []netip.Addr {
	now, served := time.Now(), setOf(wanted)
	for _, a := range l.clusterIPs {
		if _, known := l.leaving[a]; !known && !served[a] {
			l.leaving[a] = now.Add(lingerTime)
		}
	}
	for _, a := range wanted {
		delete(l.leaving, a)
	}
	out := slices.Clone(wanted)
	for a, until := range l.leaving {
		if now.After(until) {
			delete(l.leaving, a)
		} else {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// setFilter sets the filter. Without one, as on a kernel without nf_tables, the load balancer still works, unless packets
// have to be led to its listeners: then it returns the error.
func (l *localAddresses) setFilter(vips []netip.Addr, listeners []filter.Bound) error {
	failure := ""
	err := l.network.Filter.SetBound(vips, listeners)
	if err != nil {
		failure = err.Error()
	}
	if failure != l.filterErr && failure != "" {
		l.log.Warn("cannot filter packets to addresses of load balancers; until a retry succeeds every port of this node "+
			"can be reached there", "err", failure)
	}
	l.filterErr = failure
	if !slices.ContainsFunc(listeners, func(l filter.Bound) bool { return l.Inside.IsValid() }) {
		return nil
	}
	return err
}

// release removes the addresses from this node, except the addresses of kept listeners: connections wait there for the next
// process.
func (l *localAddresses) release(kept []proxied.Door) {
	listeners := listenersOf(kept)
	vips, clusterIPs := addressesOf(listeners)
	err := l.called(l.network.SetVIPs, vips)
	if err2 := l.setClusterIPs(clusterIPs); err != nil || err2 != nil {
		l.log.Error("cannot remove the local routes of load balancers", "err", errors.Join(err, err2))
	}
	if err := errors.Join(l.network.Filter.SetBound(append(vips, clusterIPs...), listeners), l.network.Filter.Close()); err != nil {
		l.log.Error("cannot remove the packet filter of load balancers", "err", err)
	}
}

func setOf(addrs []netip.Addr) map[netip.Addr]bool {
	out := make(map[netip.Addr]bool, len(addrs))
	for _, a := range addrs {
		out[a] = true
	}
	return out
}

// listenersOf returns doors as the filter knows them.
func listenersOf(doors []proxied.Door) (out []filter.Bound) {
	for _, d := range doors {
		l := filter.Bound{Listener: filter.Listener{Protocol: svc.TCP, At: d.At}, Inside: d.Inside, First: d.ClusterIP}
		if d.UDP {
			l.Protocol = svc.UDP
		}
		out = append(out, l)
	}
	return out
}

// addressesOf returns the addresses of listeners, sorted, each once.
func addressesOf(listeners []filter.Bound) (vips, clusterIPs []netip.Addr) {
	for _, l := range listeners {
		if l.First {
			clusterIPs = append(clusterIPs, l.At.Addr())
		} else {
			vips = append(vips, l.At.Addr())
		}
	}
	slices.SortFunc(vips, netip.Addr.Compare)
	slices.SortFunc(clusterIPs, netip.Addr.Compare)
	return slices.Compact(vips), slices.Compact(clusterIPs)
}
