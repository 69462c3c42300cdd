// Command backend is a small HTTP server for examples. It answers with its host name and the client's address, and can be
// made unready. With -udp it answers every datagram on that address in the same way, with -tls it serves HTTPS on a second
// address. -text FILE is read for each request and stands before the answer. On SIGTERM it finishes its requests; with -abrupt
// it ends at once.
//
//	GET  /         "my-pod-1 10.244.0.7"
//	GET  /healthz  200 while ready, 503 after POST /unready
//	POST /unready, POST /ready
//	POST /die      ends by SIGKILL, without an answer
package main

import (
	"context"
	"errors"
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
	secure := flag.String("tls", "", "address to serve HTTPS on; empty for none")
	cert := flag.String("cert", "tls.crt", "file with the certificate of -tls")
	key := flag.String("key", "tls.key", "file with the key of -tls")
	text := flag.String("text", "", "file whose text stands before each answer; empty for none")
	abrupt := flag.Bool("abrupt", false, "end at once at SIGTERM")
	flag.Parse()
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if *abrupt {
		signals = signals[:1]
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	defer stop()
	o := options{listen: *listen, udp: *udp, tls: *secure, cert: *cert, key: *key, text: *text}
	if err := serve(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "backend:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct{ listen, udp, tls, cert, key, text string }

func serve(ctx context.Context, o options) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	if o.udp != "" {
		conn, err := net.ListenPacket("udp", o.udp)
		if err != nil {
			return err
		}
		defer conn.Close()
		go answer(conn, name)
	}
	var unready atomic.Bool
	mux := http.NewServeMux()
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		if o.text != "" {
			text, err := os.ReadFile(o.text)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			_, _ = w.Write(text)
		}
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

	plain := &http.Server{Addr: o.listen, Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	servers := []*http.Server{plain}
	done := make(chan error, 2)
	go func() { done <- plain.ListenAndServe() }()
	fmt.Println("listening on", o.listen)
	if o.tls != "" {
		secure := &http.Server{Addr: o.tls, Handler: mux, ReadHeaderTimeout: 5 * time.Second}
		servers = append(servers, secure)
		go func() { done <- secure.ListenAndServeTLS(o.cert, o.key) }()
		fmt.Println("listening on", o.tls, "with TLS")
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		graceful, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		var errs []error
		for _, s := range servers {
			errs = append(errs, s.Shutdown(graceful))
		}
		return errors.Join(errs...)
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
