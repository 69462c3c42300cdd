// Command backend is a small HTTP server for examples: it answers with its host
// name and the address it was asked from, and can be told to be unready. With
// -udp it answers every datagram on that address in the same way. It finishes the
// requests it has at SIGTERM, with -abrupt none: it is gone at once.
//
//	GET  /         "my-pod-1 10.244.0.7"
//	GET  /healthz  200 while ready, 503 after POST /unready
//	POST /unready, POST /ready
//	POST /die      ends by SIGKILL, without an answer
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	listen := flag.String("listen", ":9376", "address to listen on")
	udp := flag.String("udp", "", "address to answer datagrams on; empty for none")
	abrupt := flag.Bool("abrupt", false, "end at once at SIGTERM")
	flag.Parse()
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if *abrupt {
		signals = signals[:1]
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	defer stop()
	if err := serve(ctx, *listen, *udp); err != nil {
		fmt.Fprintln(os.Stderr, "backend:", err)
		os.Exit(1)
	}
}

func serve(ctx context.Context, listen, udp string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	if udp != "" {
		conn, err := net.ListenPacket("udp", udp)
		if err != nil {
			return err
		}
		defer conn.Close()
		go answer(conn, name)
	}
	var unready atomic.Bool
	mux := http.NewServeMux()
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		client, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintln(w, name, client)
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		if unready.Load() {
			http.Error(w, "unready on request", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("POST /unready", func(w http.ResponseWriter, r *http.Request) { unready.Store(true) })
	mux.HandleFunc("POST /ready", func(w http.ResponseWriter, r *http.Request) { unready.Store(false) })
	mux.HandleFunc("POST /die", func(w http.ResponseWriter, r *http.Request) {
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})

	server := &http.Server{Addr: listen, Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	done := make(chan error, 1)
	go func() { done <- server.ListenAndServe() }()
	fmt.Println("listening on", listen)
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		graceful, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		return server.Shutdown(graceful)
	}
}

// answer replies to datagrams until conn is closed.
func answer(conn net.PacketConn, name string) {
	buf := make([]byte, 1500)
	for {
		_, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		client, _, _ := net.SplitHostPort(from.String())
		if _, err := conn.WriteTo([]byte(name+" "+client+"\n"), from); err != nil {
			fmt.Fprintln(os.Stderr, "backend: answer:", err)
		}
	}
}
