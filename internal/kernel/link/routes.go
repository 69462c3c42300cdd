package link

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// RouteMetric is the metric of our routes to ranges of pods. A route to the same
// range that another program has made has a lower one as a rule (0, or 1024 for IPv6),
// stays beside ours, and takes precedence.
const RouteMetric = 2500

// Route is how packets to a range of pods' addresses go.
type Route struct {
	Dst netip.Prefix
	// Via is the neighbour that has the pods. The zero Addr makes the range
	// unreachable but for the more specific routes of pods that run here: who sends
	// to a dead pod is told so at once, and nothing of it leaves by a default route.
	Via netip.Addr
	// Device is the index of the device of an Overlay, 0 for a neighbour of the machine. That of
	// WireGuard needs no Via.
	Device int
}

// Routes are the routes to ranges of pods that bear our protocol number. It is used by one
// goroutine at a time, in one network namespace.
type Routes struct {
	// written are the routes that the kernel has, nil after Forget.
	written map[Route]bool
}

// Forget has the next Set compare everything with the kernel.
func (s *Routes) Forget() { s.written = nil }

// Set makes want the only routes: others are deleted, and then
// missing ones added. It never replaces a route: one of others with the same range and
// RouteMetric makes ours fail. It goes on after an error; failed has the errors of single
// routes by range, err all others. Nothing is read from the kernel, and only differences
// from the last call are written.
func (s *Routes) Set(want []Route) (failed map[netip.Prefix]error, err error) {
	var old []*netlink.Route
	if s.written == nil {
		if old, err = s.read(); err != nil {
			return nil, err
		}
	}
	wanted := make(map[Route]bool, len(want))
	for _, r := range want {
		wanted[Route{r.Dst.Masked(), r.Via, r.Device}] = true
	}
	var errs []error
	remove := func(r *netlink.Route) error {
		err := netlink.RouteDel(r)
		if errors.Is(err, unix.ESRCH) {
			return nil
		}
		if err != nil {
			err = fmt.Errorf("remove route to %s: %w", r.Dst, err)
			errs = append(errs, err)
		}
		return err
	}
	for r := range s.written { // first, for a new gateway of the same range would collide
		if !wanted[r] && remove(encodeRoute(r)) == nil {
			delete(s.written, r)
		}
	}
	failed = map[netip.Prefix]error{}
	for r := range wanted {
		if s.written[r] {
			continue
		}
		if err := netlink.RouteAdd(encodeRoute(r)); err != nil {
			failed[r.Dst] = addError(r, err)
			continue
		}
		s.written[r] = true
	}
	for _, r := range old {
		_ = remove(r)
	}
	return failed, errors.Join(errs...)
}

// read takes what the kernel has as written, and returns routes of earlier versions, which
// Set does not make.
func (s *Routes) read() (old []*netlink.Route, err error) {
	have, err := ours()
	if err != nil {
		return nil, err
	}
	s.written = map[Route]bool{}
	for _, r := range have {
		if r.Priority != RouteMetric {
			old = append(old, r)
			continue
		}
		s.written[decodeRoute(r)] = true
	}
	return old, nil
}

// Add adds routes to the routes of Set, until its next call.
func (s *Routes) Add(routes []Route) error {
	s.Forget()
	var errs []error
	for _, r := range routes {
		if err := netlink.RouteAdd(encodeRoute(Route{r.Dst.Masked(), r.Via, r.Device})); err != nil && !errors.Is(err, unix.EEXIST) {
			errs = append(errs, addError(r, err))
		}
	}
	return errors.Join(errs...)
}

func addError(r Route, err error) error {
	switch {
	case errors.Is(err, unix.EEXIST):
		return fmt.Errorf("cannot add route to %s: another one with metric %d is there; remove it or give it another metric", r.Dst, RouteMetric)
	case r.Device != 0:
		return fmt.Errorf("cannot add route to %s by the overlay: %w", r.Dst, err)
	case !r.Via.IsValid():
		return fmt.Errorf("cannot make %s unreachable: %w", r.Dst, err)
	}
	return fmt.Errorf("cannot add route to %s via %s: %w; nodes must reach each other's InternalIP in one hop", r.Dst, r.Via, err)
}

func encodeRoute(r Route) *netlink.Route {
	out := &netlink.Route{Dst: network(r.Dst), Protocol: Protocol, Priority: RouteMetric}
	if r.Via.IsValid() {
		out.Gw = r.Via.AsSlice()
		if out.LinkIndex = r.Device; r.Device != 0 && r.Via.Is4() {
			out.Flags = unix.RTNH_F_ONLINK
		}
	} else if out.LinkIndex = r.Device; r.Device == 0 {
		out.Type = unix.RTN_UNREACHABLE
	}
	return out
}

func decodeRoute(r *netlink.Route) Route {
	a, _ := netip.AddrFromSlice(r.Dst.IP)
	via, _ := netip.AddrFromSlice(r.Gw)
	ones, _ := r.Dst.Mask.Size()
	out := Route{Dst: netip.PrefixFrom(a.Unmap(), min(ones, a.Unmap().BitLen())), Via: via.Unmap()}
	if r.Flags&unix.RTNH_F_ONLINK != 0 || out.Via.IsLinkLocalUnicast() || r.Gw == nil && r.Type != unix.RTN_UNREACHABLE {
		out.Device = r.LinkIndex
	}
	return out
}

// ours lists the routes of Routes.
func ours() ([]*netlink.Route, error) {
	var out []*netlink.Route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := Whole(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(family, &netlink.Route{Protocol: Protocol}, netlink.RT_FILTER_PROTOCOL)
		})
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for i := range routes {
			if r := &routes[i]; r.Dst != nil && (r.Gw != nil || r.Type == unix.RTN_UNREACHABLE || r.Priority == RouteMetric) {
				out = append(out, r)
			}
		}
	}
	return out, nil
}
