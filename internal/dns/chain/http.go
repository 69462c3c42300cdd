package chain

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/corefile"
)

// web is the HTTP servers of the plugins health, ready and prometheus, by address.
type web struct {
	s   *Server
	mu  sync.Mutex
	on  map[string]*http.Server
	wg  sync.WaitGroup
	mux http.Handler
	// wasReady: without "monitor continuously", ready stays ready.
	wasReady bool
}

func newWeb(s *Server) *web {
	reg := prometheus.NewRegistry()
	reg.MustRegister(s.metrics.fixed()...)
	reg.MustRegister(collector{s})
	w := &web{s: s, on: map[string]*http.Server{}}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
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

// use opens the addresses of a plan, and closes the others.
func (w *web) use(p *corefile.Plan) error {
	wanted := paths(p)
	w.mu.Lock()
	defer w.mu.Unlock()
	for addr := range wanted {
		if w.on[addr] != nil {
			continue
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		server := &http.Server{Handler: w.handler(addr), ReadHeaderTimeout: 10 * time.Second}
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
