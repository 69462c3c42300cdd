package front

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
)

// localAddresses makes the addresses of Services addresses of this node, of which only the listeners can be reached.
type localAddresses struct {
	log     *slog.Logger
	network *Network
	// vips are the addresses that were made local. An invalid one among them means that the kernel's are unknown.
	vips      []netip.Addr
	filterErr string // the last logged reason why the filter could not be set
}

func newLocalAddresses(log *slog.Logger, network *Network) *localAddresses {
	l := &localAddresses{log: log, network: network}
	l.forget() // an earlier process may have left some
	return l
}

func (l *localAddresses) forget() { l.vips = []netip.Addr{{}} }

// repair makes the next set write the local routes again, if there are any.
func (l *localAddresses) repair() {
	if len(l.vips) > 0 {
		l.forget()
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
	stay := slices.DeleteFunc(slices.Clone(doors), func(d proxied.Door) bool {
		return !d.Inherited && !wanted[proxied.Door{UDP: d.UDP, At: d.At}]
	})
	if had := l.valid(); len(had) > 0 && len(stay) < len(doors) {
		_ = l.setFilter(had, listenersOf(stay))
	}
}

// valid returns the addresses that are known to be local.
func (l *localAddresses) valid() []netip.Addr {
	return slices.DeleteFunc(slices.Clone(l.vips), func(a netip.Addr) bool { return !a.IsValid() })
}

// set makes the addresses of doors, and no others, local. An address is filtered before it becomes local and until it no
// longer is.
func (l *localAddresses) set(doors []proxied.Door) error {
	listeners := listenersOf(doors)
	vips := addressesOf(listeners)
	err := l.setFilter(append(l.valid(), vips...), listeners)
	if slices.Equal(vips, l.vips) {
		return err
	}
	if err := l.network.SetVIPs(vips); err != nil {
		l.log.Error("cannot make addresses of load balancers local; retrying", "err", err)
		l.forget()
		return err
	}
	l.vips = vips
	return l.setFilter(vips, listeners)
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
	vips := addressesOf(listeners)
	if err := l.network.SetVIPs(vips); err != nil {
		l.log.Error("cannot remove the local routes of load balancers", "err", err)
	}
	if err := errors.Join(l.network.Filter.SetBound(vips, listeners), l.network.Filter.Close()); err != nil {
		l.log.Error("cannot remove the packet filter of load balancers", "err", err)
	}
}

// listenersOf returns doors as the filter knows them.
func listenersOf(doors []proxied.Door) (out []filter.Bound) {
	for _, d := range doors {
		l := filter.Bound{Listener: filter.Listener{Protocol: svc.TCP, At: d.At}, Inside: d.Inside}
		if d.UDP {
			l.Protocol = svc.UDP
		}
		out = append(out, l)
	}
	return out
}

// addressesOf returns the addresses of listeners, sorted, each once.
func addressesOf(listeners []filter.Bound) (out []netip.Addr) {
	for _, l := range listeners {
		out = append(out, l.At.Addr())
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}
