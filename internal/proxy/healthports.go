package proxy

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// healthPorts answers on the healthCheckNodePorts of Services with
// externalTrafficPolicy Local: 200 while this node has ready endpoints, 503
// while it has not, with kube-proxy's headers and body (behaviour 103).
type healthPorts struct {
	proxyHealthy func() bool
	wildcard     bool // listen on all addresses

	// Used by the loop alone.
	wanted map[table.Key]*table.ServicePort
	// of are the ready local endpoints by port of a Service: the same number for
	// each, but a pod of two families counts once in each family.
	of     map[checkedService]map[table.Key]int
	dirty  map[checkedService]bool // to be synced
	open   map[checkedService]*healthPort
	failed map[checkedService]bool // reported already; retried by every sync
	addrs  []netip.Addr
}

type checkedService struct {
	name svc.Name
	port uint16
}

type healthPort struct {
	service      svc.Name
	proxyHealthy func() bool
	ready        atomic.Int64
	addrs        []netip.Addr
	stop         func() // returns when all its goroutines have ended
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
		addrs = []netip.Addr{{}}
	}
	if !slices.Equal(addrs, h.addrs) {
		h.addrs = addrs
		for c := range h.of {
			h.dirty[c] = true
		}
	}
	for c := range h.failed {
		h.dirty[c] = true
	}
	// Close first: another Service may have got the same port.
	for c := range h.dirty {
		if p := h.open[c]; p != nil && (h.of[c] == nil || !slices.Equal(p.addrs, addrs)) {
			p.stop()
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
		var err error
		if p, err = h.listen(c, h.addrs); err != nil {
			reported := h.failed[c]
			if h.failed[c] = true; reported {
				return nil
			}
			return fmt.Errorf("cannot answer on health check port %d: %w", c.port, err)
		}
		delete(h.failed, c)
		h.open[c] = p
	}
	p.ready.Store(int64(slices.Max(slices.Collect(maps.Values(of)))))
	return nil
}

func (h *healthPorts) listen(c checkedService, addrs []netip.Addr) (*healthPort, error) {
	p := &healthPort{service: c.name, proxyHealthy: h.proxyHealthy, addrs: addrs}
	var servers []*server
	for _, a := range addrs {
		host := ""
		if a.IsValid() {
			host = a.String()
		}
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(int(c.port))))
		if err != nil {
			for _, s := range servers {
				_ = s.listener.Close()
			}
			return nil, err
		}
		servers = append(servers, newServer(l, p))
	}
	ctx, cancel := context.WithCancel(context.Background()) // ended by stop
	var running sync.WaitGroup
	for _, s := range servers {
		running.Go(func() { s.run(ctx) })
	}
	p.stop = func() {
		cancel()
		running.Wait()
	}
	return p, nil
}

// close closes all ports.
func (h *healthPorts) close() {
	for c, p := range h.open {
		p.stop()
		delete(h.open, c)
	}
}

func (p *healthPort) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	ready, healthy := p.ready.Load(), p.proxyHealthy()
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
