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

// set makes the addresses of services, and of inherited listeners, and no others local. An address is filtered before it
// becomes local and until it no longer is.
func (l *localAddresses) set(services []*proxied.Service, inherited []netip.AddrPort) error {
	listeners := tcpListeners(inherited)
	for _, s := range services {
		for _, at := range s.Spec.Listeners {
			protocol := svc.TCP
			if at.Protocol == dialect.UDP {
				protocol = svc.UDP
			}
			for _, a := range s.Addrs {
				listeners = append(listeners, filter.Listener{Protocol: protocol, At: netip.AddrPortFrom(a, at.Port)})
			}
		}
	}
	vips := addressesOf(listeners)
	had := slices.DeleteFunc(slices.Clone(l.vips), func(a netip.Addr) bool { return !a.IsValid() })
	l.setFilter(append(had, vips...), listeners)
	if slices.Equal(vips, l.vips) {
		return nil
	}
	if err := l.network.SetVIPs(vips); err != nil {
		l.log.Error("cannot make addresses of load balancers local; retrying", "err", err)
		l.forget()
		return err
	}
	l.vips = vips
	l.setFilter(vips, listeners)
	return nil
}

// setFilter sets the filter. Without one, as on a kernel without nf_tables, the load balancer still works.
func (l *localAddresses) setFilter(vips []netip.Addr, listeners []filter.Listener) {
	failure := ""
	if err := l.network.Filter.Set(vips, listeners); err != nil {
		failure = err.Error()
	}
	if failure != l.filterErr && failure != "" {
		l.log.Warn("cannot filter packets to addresses of load balancers; until a retry succeeds every port of this node "+
			"can be reached there", "err", failure)
	}
	l.filterErr = failure
}

// release removes the addresses from this node, except the addresses of kept listeners: connections wait there for the next
// process.
func (l *localAddresses) release(kept []netip.AddrPort) {
	listeners := tcpListeners(kept)
	vips := addressesOf(listeners)
	if err := l.network.SetVIPs(vips); err != nil {
		l.log.Error("cannot remove the local routes of load balancers", "err", err)
	}
	if err := errors.Join(l.network.Filter.Set(vips, listeners), l.network.Filter.Close()); err != nil {
		l.log.Error("cannot remove the packet filter of load balancers", "err", err)
	}
}

// tcpListeners returns listeners of TCP.
func tcpListeners(at []netip.AddrPort) (out []filter.Listener) {
	for _, a := range at {
		out = append(out, filter.Listener{Protocol: svc.TCP, At: a})
	}
	return out
}

// addressesOf returns the addresses of listeners, sorted, each once.
func addressesOf(listeners []filter.Listener) (out []netip.Addr) {
	for _, l := range listeners {
		out = append(out, l.At.Addr())
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}
