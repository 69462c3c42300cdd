// Command client stands in for the image echo-advanced of the conformance tests of meshes, which is made of a project that is
// not published as a module. With flags it is the server: it answers requests of HTTP and calls of gRPC with the lines that the
// tests read. "client URL" sends a request and prints the answer, as the tests do in its Pod.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	run := serve
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		run = ask
	}
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serve listens on the ports of --port and --grpc. It does not serve the port of --tls: it has no certificate. No test asks for
// the port of --tcp.
func serve(args []string) error {
	var ports []string
	without := ""
	for _, a := range args {
		switch name, value, _ := strings.Cut(a, "="); name {
		case "--port", "--grpc":
			ports = append(ports, value)
		case "--tls":
			without = value
		}
	}
	// A Pod of the tests has no ports at all. Without the signal, the runtime sometimes finds that such a process can never
	// continue, and ends it.
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM)
	failed := make(chan error)
	for _, port := range slices.DeleteFunc(ports, func(p string) bool { return p == without }) {
		s := &http.Server{Addr: net.JoinHostPort("", port), Handler: http.HandlerFunc(answer), ReadHeaderTimeout: 10 * time.Second}
		s.Protocols = protocols(true)
		go func() { failed <- s.ListenAndServe() }()
	}
	select {
	case err := <-failed:
		return err
	case <-ended:
		return nil
	}
}

// protocols are HTTP/2 without TLS, and HTTP/1.1 if http1 is set.
func protocols(http1 bool) *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(http1)
	p.SetUnencryptedHTTP2(true)
	return p
}

// hostField is the field of an answer of gRPC that has the name of the Pod: its message is empty.
const hostField = "Echo-Hostname"

// emptyMessage is a message of gRPC without a field.
const emptyMessage = "\x00\x00\x00\x00\x00"

func answer(w http.ResponseWriter, r *http.Request) {
	name, err := os.Hostname()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Trailer", "Grpc-Status")
		w.Header().Set(hostField, name)
		_, _ = io.WriteString(w, emptyMessage)
		w.Header().Set("Grpc-Status", "0")
		return
	}
	line := func(field, value string) { _, _ = fmt.Fprintf(w, "%s=%s\n", field, value) }
	line("Hostname", name)
	line("Host", r.Host)
	line("Method", r.Method)
	line("URL", r.URL.String())
	line("Proto", r.Proto)
	for field, values := range r.Header {
		line("RequestHeader", field+":"+strings.Join(values, ","))
	}
}

// ask sends requests, each on a new connection: URL, --method=M, -H NAME:VALUE, --count=N.
func ask(args []string) error {
	args = slices.DeleteFunc(args, func(a string) bool { return a == "client" })
	count, method, header := 1, http.MethodGet, http.Header{}
	for i := 1; i < len(args); i++ {
		name, value, _ := strings.Cut(args[i], "=")
		switch {
		case name == "--method":
			method = value
		case name == "--count":
			n, err := strconv.Atoi(value)
			if err != nil {
				return fmt.Errorf("--count: %w", err)
			}
			count = n
		case name == "-H" && i+1 < len(args):
			i++
			field, value, _ := strings.Cut(args[i], ":")
			header.Add(field, strings.TrimSpace(value))
		default:
			return fmt.Errorf("unknown argument %q", args[i])
		}
	}
	to, err := url.Parse(args[0])
	if err != nil {
		return err
	}
	for range count {
		if err := askOnce(to, method, header); err != nil {
			return err
		}
	}
	return nil
}

func askOnce(to *url.URL, method string, header http.Header) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true}
	grpc, body := to.Scheme == "grpc", ""
	at := *to
	if grpc {
		transport.Protocols = protocols(false)
		at.Scheme, at.Path, method, body = "http", "/proto.EchoTestService/Echo", http.MethodPost, emptyMessage
	}
	r, err := http.NewRequestWithContext(ctx, method, at.String(), strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header = header.Clone()
	r.Host = cmp.Or(header.Get("Host"), r.Host)
	if grpc {
		r.Header.Set("Content-Type", "application/grpc")
		r.Header.Set("Te", "trailers")
	}
	client := http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	a, err := client.Do(r)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	if err != nil {
		return err
	}
	if grpc {
		if status := cmp.Or(a.Trailer.Get("Grpc-Status"), a.Header.Get("Grpc-Status")); a.StatusCode == http.StatusOK && status != "0" {
			return errors.New("the call has the status " + status)
		}
		text = []byte("Hostname=" + a.Header.Get(hostField) + "\n")
	}
	fmt.Printf("StatusCode=%d\n%s", a.StatusCode, text)
	for field, values := range a.Header {
		fmt.Printf("ResponseHeader=%s:%s\n", field, strings.Join(values, ","))
	}
	fmt.Println()
	return nil
}
