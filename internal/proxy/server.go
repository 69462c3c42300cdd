package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"time"
)

// server is an HTTP server with its open listener.
type server struct {
	http     *http.Server
	listener net.Listener
}

func newServer(listener net.Listener, h http.Handler) *server {
	return &server{listener: listener, http: &http.Server{
		Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}}
}

// run serves until ctx ends, or the listener fails.
func (s *server) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() { _ = s.http.Close() })
	defer stop()
	_ = s.http.Serve(s.listener)
}

// listenRetry is the time between attempts to open an address.
const listenRetry = time.Second

// serve serves h on addr until ctx ends, nothing if addr is empty. Services are
// more than metrics: an address that cannot be opened, or no longer accepts
// connections, is retried for as long as it takes, unless Options.ListenOrFail is set. what and reason are for the log
// and the Event of the Node.
func (p *Proxy) serve(ctx context.Context, what, reason, addr string, h http.Handler) error {
	if addr == "" {
		return nil
	}
	retry := time.NewTicker(listenRetry)
	defer retry.Stop()
	for failed := false; ; {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = l.Close()
			}
			return nil
		case err == nil:
			if failed {
				p.log.Info("serving "+what, "address", addr)
			}
			failed = false
			newServer(l, h).run(ctx)
		case !failed:
			failed = true
			err = fmt.Errorf("cannot serve %s on %s: %w", what, addr, err)
			p.events.node(reason, err.Error())
			if p.opts.ListenOrFail {
				return err
			}
			p.log.Warn("cannot serve "+what+"; retrying", "address", addr, "err", err, "period", listenRetry)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-retry.C:
		}
	}
}

// serveHealth serves /healthz and /livez until ctx ends. The reason of the Event
// is kube-proxy's.
func (p *Proxy) serveHealth(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", p.serveHealthz)
	mux.HandleFunc("/livez", p.serveLivez)
	return p.serve(ctx, "health checks", "FailedToStartProxierHealthcheck", p.opts.HealthzAddress, mux)
}

// kubeProxyName is a mode as kube-proxy names it, for programs that ask one.
func kubeProxyName(mode string) string {
	if mode == "nft" {
		return "nftables"
	}
	return mode
}

// serveMetrics serves /metrics and what goes with it until ctx ends.
func (p *Proxy) serveMetrics(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("/metrics", p.Metrics())
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok")) })
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(kubeProxyName(p.opts.Mode))) })
	mux.HandleFunc("/status", func(w http.ResponseWriter, _ *http.Request) { // for 'fairlead status' on this machine
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(p.Status())
	})
	for path, h := range p.opts.Handlers {
		mux.Handle(path, h)
	}
	return p.serve(ctx, "metrics", "FailedToServeMetrics", p.opts.MetricsAddress, mux)
}
