package chain

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/clientmetrics"
	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// web is the HTTP servers of the plugins health, ready and prometheus, by address.
type web struct {
	s   *Server
	mu  sync.Mutex
	on  map[string]*page
	wg  sync.WaitGroup
	mux http.Handler
	// wasReady: without "monitor continuously", ready stays ready.
	wasReady bool
}

func newWeb(s *Server) *web {
	reg := prometheus.NewRegistry()
	reg.MustRegister(s.metrics.fixed()...)
	reg.MustRegister(collector{s}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	all := prometheus.Gatherers{reg, clientmetrics.Gatherer()}
	w := &web{s: s, on: map[string]*page{}}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(all, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("OK")) })
	mux.HandleFunc("/ready", w.ready)
	w.mux = mux
	return w
}

func (w *web) ready(out http.ResponseWriter, _ *http.Request) {
	in := w.s.current.Load()
	if in == nil || w.s.ending.Load() {
		http.Error(out, "the server is stopping", http.StatusServiceUnavailable)
		return
	}
	continuously := false
	for _, b := range in.plan.Blocks {
		for _, r := range corefile.Find[*corefile.Ready](b.Plugins) {
			continuously = continuously || r.Continuously
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if missing := in.unready(); missing != "" && (continuously || !w.wasReady) {
		http.Error(out, missing, http.StatusServiceUnavailable)
		return
	}
	w.wasReady = true
	_, _ = out.Write([]byte("OK"))
}

// paths returns which paths the plan serves at which address.
func paths(p *corefile.Plan) map[string]map[string]bool {
	out := map[string]map[string]bool{}
	add := func(addr, path string) {
		if out[addr] == nil {
			out[addr] = map[string]bool{}
		}
		out[addr][path] = true
	}
	for _, b := range p.Blocks {
		for _, c := range b.Plugins {
			switch c := c.(type) {
			case *corefile.Health:
				add(c.Address, "/health")
			case *corefile.Ready:
				add(c.Address, "/ready")
			case *corefile.Prometheus:
				add(c.Address, "/metrics")
			}
		}
	}
	return out
}

// page is the server of one address.
type page struct {
	*http.Server
	at net.Listener
}

// use opens the addresses of a plan, and closes the others.
func (w *web) use(p *corefile.Plan) error {
	wanted := paths(p)
	w.mu.Lock()
	defer w.mu.Unlock()
	opened := map[string]net.Listener{}
	for addr := range wanted {
		if w.on[addr] != nil {
			continue
		}
		l, err := w.open(addr, wanted)
		if err != nil {
			for _, o := range opened {
				o.Close()
			}
			return err
		}
		opened[addr] = l
	}
	for addr, l := range opened {
		server := &page{&http.Server{Handler: w.handler(addr), ReadHeaderTimeout: 10 * time.Second}, l}
		w.on[addr] = server
		w.wg.Go(func() {
			if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				w.s.o.Log.Error("cannot serve HTTP", "address", addr, "err", err)
			}
		})
	}
	for addr, server := range w.on {
		if wanted[addr] == nil {
			server.Close()
			delete(w.on, addr)
		}
	}
	return nil
}

// open opens an address. It may have the port of one that is not wanted any more.
func (w *web) open(addr string, wanted map[string]map[string]bool) (net.Listener, error) {
	_, port, _ := net.SplitHostPort(addr)
	shared := false
	for other, known := range w.on {
		if _, p, _ := net.SplitHostPort(other); p == port && wanted[other] == nil {
			if err := socket.Share(known.at); err != nil {
				return nil, err
			}
			shared = true
		}
	}
	lc := socket.ListenConfig(netip.AddrPort{}, socket.Options{Shared: shared})
	return lc.Listen(context.Background(), "tcp", addr)
}

// handler serves the paths of an address.
func (w *web) handler(addr string) http.Handler {
	return http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		in := w.s.current.Load()
		if in == nil || !paths(in.plan)[addr][strings.TrimSuffix(r.URL.Path, "/")] {
			http.NotFound(out, r)
			return
		}
		w.mux.ServeHTTP(out, r)
	})
}

func (w *web) close() {
	w.mu.Lock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, s := range w.on {
		if s.Shutdown(ctx) != nil {
			s.Close()
		}
	}
	w.mu.Unlock()
	w.wg.Wait()
}
