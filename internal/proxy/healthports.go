package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// healthPorts answers on the healthCheckNodePorts of Services with
// externalTrafficPolicy Local: 200 while this node has ready endpoints, 503
// while it has not, with kube-proxy's headers and body (behaviour 103). Each
// address has its own listener, which answers for its family: one family of
// a Service can have endpoints here while the other has none.
type healthPorts struct {
	proxyHealthy func() bool
	wildcard     bool // listen on all addresses

	// Used only by the loop.
	wanted map[table.Key]*table.ServicePort
	// of are the ready local endpoints by port of a Service: the same number for
	// each, but a pod of two families counts once in each family.
	of     map[checkedService]map[table.Key]int
	dirty  map[checkedService]bool // to be synced
	open   map[checkedService]*healthPort
	failed map[checkedService]bool // some address is not open, which was reported; retried by every sync
	addrs  []netip.Addr
}

type checkedService struct {
	name svc.Name
	port uint16
}

// healthPort is the port of one Service.
type healthPort struct {
	service      svc.Name
	proxyHealthy func() bool
	ready4       atomic.Int64
	ready6       atomic.Int64
	listeners    map[netip.Addr]func() // what closes them, and returns when that is done
}

func newHealthPorts(proxyHealthy func() bool, wildcard bool) *healthPorts {
	return &healthPorts{proxyHealthy: proxyHealthy, wildcard: wildcard,
		wanted: map[table.Key]*table.ServicePort{}, of: map[checkedService]map[table.Key]int{}, dirty: map[checkedService]bool{},
		open: map[checkedService]*healthPort{}, failed: map[checkedService]bool{},
	}
}

// update records the changed service ports of t.
func (h *healthPorts) update(t *table.Table, changed []table.Key) {
	for _, k := range changed {
		if old := h.wanted[k]; old != nil {
			c := checkedServiceOf(old)
			if delete(h.of[c], k); len(h.of[c]) == 0 {
				delete(h.of, c)
			}
			delete(h.wanted, k)
			h.dirty[c] = true
		}
		p := t.Get(k)
		if p == nil || p.HealthCheckNodePort == 0 {
			continue
		}
		c := checkedServiceOf(p)
		if h.of[c] == nil {
			h.of[c] = map[table.Key]int{}
		}
		h.wanted[k], h.of[c][k], h.dirty[c] = p, p.LocalReady, true
	}
}

func checkedServiceOf(p *table.ServicePort) checkedService {
	return checkedService{p.ID.Name, p.HealthCheckNodePort}
}

// sync opens, updates and closes the ports of what changed, and returns each that
// it could not open once; every sync retries them.
func (h *healthPorts) sync(nodePortAddrs []netip.Addr) []serviceProblem {
	addrs := nodePortAddrs
	if h.wildcard {
		addrs = []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
	}
	if !slices.Equal(addrs, h.addrs) {
		h.addrs = slices.Clone(addrs)
		for c := range h.of {
			h.dirty[c] = true
		}
	}
	for c := range h.failed {
		h.dirty[c] = true
	}
	// Close first: another Service may have got the same port.
	for c := range h.dirty {
		if p := h.open[c]; p != nil && h.of[c] == nil {
			p.keep(nil)
			delete(h.open, c)
		}
	}
	var problems []serviceProblem
	for c := range h.dirty {
		if err := h.syncOne(c); err != nil {
			problems = append(problems, serviceProblem{c.name, "FailedToStartServiceHealthcheck", err})
		}
	}
	clear(h.dirty)
	return problems
}

// retry is sync where nothing has changed.
func (h *healthPorts) retry() []serviceProblem {
	if len(h.failed) == 0 {
		return nil
	}
	return h.sync(h.addrs)
}

// syncOne brings a Service's port up to date. It returns the error of the first
// attempt only.
func (h *healthPorts) syncOne(c checkedService) error {
	of := h.of[c]
	if of == nil {
		delete(h.failed, c)
		return nil
	}
	p := h.open[c]
	if p == nil {
		p = &healthPort{service: c.name, proxyHealthy: h.proxyHealthy, listeners: map[netip.Addr]func(){}}
		h.open[c] = p
	}
	p.setReady(of)
	p.keep(h.addrs)
	var errs []error
	for _, a := range h.addrs {
		if p.listeners[a] == nil {
			errs = append(errs, p.listen(a, c.port))
		}
	}
	err := errors.Join(errs...)
	reported := h.failed[c]
	if delete(h.failed, c); err == nil {
		return nil
	}
	if h.failed[c] = true; reported {
		return nil
	}
	return fmt.Errorf("cannot answer on health check port %d; retrying: %w", c.port, err)
}

// setReady takes over the ready local endpoints by port. A family that the Service
// does not have is asked about the other one: load balancers may reach the node by
// either.
func (p *healthPort) setReady(of map[table.Key]int) {
	ready4, ready6 := -1, -1
	for k, n := range of {
		if k.Family == svc.IPv4 {
			ready4 = max(ready4, n)
		} else {
			ready6 = max(ready6, n)
		}
	}
	if ready4 < 0 {
		ready4 = ready6
	}
	if ready6 < 0 {
		ready6 = ready4
	}
	p.ready4.Store(int64(ready4))
	p.ready6.Store(int64(ready6))
}

// listen opens the port on one address. A family that the kernel does not have is
// no error: no client can ask there.
func (p *healthPort) listen(a netip.Addr, port uint16) error {
	network, ready := "tcp4", &p.ready4
	if a.Is6() {
		network, ready = "tcp6", &p.ready6
	}
	ctx, cancel := context.WithCancel(context.Background()) // ended by what listeners has
	at := netip.AddrPortFrom(a, port)
	// An IPv6 address may be tentative for a second or two.
	config := socket.ListenConfig(at, socket.Options{AnyAddress: true})
	l, err := config.Listen(ctx, network, net.JoinHostPort(a.String(), strconv.Itoa(int(port))))
	if err != nil {
		cancel()
		if errors.Is(err, syscall.EAFNOSUPPORT) || a == netip.IPv6Unspecified() && errors.Is(err, syscall.EADDRNOTAVAIL) {
			return nil
		}
		return err
	}
	s := newServer(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { p.answer(w, ready.Load()) }))
	var running sync.WaitGroup
	running.Go(func() { s.run(ctx) })
	p.listeners[a] = func() {
		cancel()
		running.Wait()
	}
	return nil
}

// keep closes the listeners on all addresses but addrs.
func (p *healthPort) keep(addrs []netip.Addr) {
	for a, stop := range p.listeners {
		if !slices.Contains(addrs, a) {
			stop()
			delete(p.listeners, a)
		}
	}
}

// close closes all ports.
func (h *healthPorts) close() {
	for c, p := range h.open {
		p.keep(nil)
		delete(h.open, c)
	}
}

func (p *healthPort) answer(w http.ResponseWriter, ready int64) {
	healthy := p.proxyHealthy()
	code := http.StatusServiceUnavailable
	if ready > 0 && healthy {
		code = http.StatusOK
	}
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.FormatInt(ready, 10))
	writeHealth(w, code, fmt.Sprintf(`{
	"service": {
		"namespace": %q,
		"name": %q
	},
	"localEndpoints": %d,
	"serviceProxyHealthy": %v
}`, p.service.Namespace, p.service.Name, ready, healthy))
}
