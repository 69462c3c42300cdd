package proxy

import (
	"context"
	"errors"
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

// run serves until ctx ends.
func (s *server) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() { _ = s.http.Close() })
	defer stop()
	_ = s.http.Serve(s.listener)
}

// listen opens the servers that the options ask for.
func (p *Proxy) listen(ctx context.Context) ([]*server, error) {
	var out []*server
	open := func(what, addr string, h http.Handler) error {
		if addr == "" {
			return nil
		}
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		if err != nil {
			return fmt.Errorf("listen for %s on %s: %w", what, addr, err)
		}
		out = append(out, newServer(l, h))
		return nil
	}
	health := http.NewServeMux()
	health.HandleFunc("/healthz", p.serveHealthz)
	health.HandleFunc("/livez", p.serveLivez)
	about := http.NewServeMux()
	about.Handle("/metrics", p.Metrics())
	about.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok")) })
	about.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(p.opts.Mode)) })
	err := errors.Join(open("health checks", p.opts.HealthzAddress, health), open("metrics", p.opts.MetricsAddress, about))
	if err != nil {
		for _, s := range out {
			_ = s.listener.Close()
		}
		return nil, err
	}
	return out, nil
}
