package node

import (
	"context"
	"fmt"
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
// while it has not, with kube-proxy's headers and body (SEEDS 103).
type healthPorts struct {
	proxyHealthy func() bool
	wildcard     bool // listen on all addresses

	// Used by the loop alone.
	wanted map[table.Key]*table.ServicePort
	open   map[checkedService]*healthPort
	failed map[checkedService]bool // told already
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
	stop         func() // returns when nothing of it runs any more
}

func newHealthPorts(proxyHealthy func() bool, wildcard bool) *healthPorts {
	return &healthPorts{proxyHealthy: proxyHealthy, wildcard: wildcard, wanted: map[table.Key]*table.ServicePort{}, open: map[checkedService]*healthPort{}, failed: map[checkedService]bool{}}
}

// update takes over the changed service ports of t.
func (h *healthPorts) update(t *table.Table, changed []table.Key) {
	for _, k := range changed {
		if p := t.Get(k); p != nil && p.HealthCheckNodePort != 0 {
			h.wanted[k] = p
		} else {
			delete(h.wanted, k)
		}
	}
}

// sync opens, updates and closes ports, and returns those that it could not
// open, each once; every sync tries them again.
func (h *healthPorts) sync(nodePortAddrs []netip.Addr) []serviceProblem {
	addrs := nodePortAddrs
	if h.wildcard {
		addrs = []netip.Addr{{}}
	}
	want := map[checkedService]int{}
	for _, p := range h.wanted {
		// Every port of the Service says the same; a pod of two families
		// counts once in each.
		c := checkedService{p.ID.Name, p.HealthCheckNodePort}
		want[c] = max(want[c], p.LocalReady)
	}
	for c, p := range h.open {
		if _, wanted := want[c]; !wanted || !slices.Equal(p.addrs, addrs) {
			p.stop()
			delete(h.open, c)
		}
	}
	for c := range h.failed {
		if _, wanted := want[c]; !wanted {
			delete(h.failed, c)
		}
	}
	var problems []serviceProblem
	for c, ready := range want {
		p := h.open[c]
		if p == nil {
			var err error
			if p, err = h.listen(c, addrs); err != nil {
				if !h.failed[c] {
					h.failed[c] = true
					problems = append(problems, serviceProblem{c.name, fmt.Errorf("cannot answer on health check port %d: %w", c.port, err)})
				}
				continue
			}
			delete(h.failed, c)
			h.open[c] = p
		}
		p.ready.Store(int64(ready))
	}
	return problems
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
	writeHealth(w, code, fmt.Sprintf("{\n\t\"service\": {\n\t\t\"namespace\": %q,\n\t\t\"name\": %q\n\t},\n\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": %v\n}",
		p.service.Namespace, p.service.Name, ready, healthy))
}
