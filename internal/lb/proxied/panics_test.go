package proxied

import (
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
)

// badSigner is a key with which a handshake panics.
type badSigner struct{ crypto.Signer }

func (badSigner) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) { panic("of the key") }

// badStream panics where a text has been read.
type badStream struct {
	*net.TCPConn
	at string
}

func (b badStream) Read(p []byte) (int, error) {
	n, err := b.TCPConn.Read(p)
	if strings.Contains(string(p[:n]), b.at) {
		panic("of the stream")
	}
	return n, err
}

// inUseBy returns how many connections and requests count, and how many Pods have.
func (r *rig) inUseBy() (clients, requests, pods int) {
	s := r.server
	s.mu.Lock()
	defer s.mu.Unlock()
	s.openMu.Lock()
	defer s.openMu.Unlock()
	clients = len(s.open)
	for _, u := range s.usages {
		clients += u.active
		requests += int(u.requests.Load())
	}
	for _, p := range s.pools {
		p.mu.Lock()
		for _, m := range p.members {
			pods += len(m.conns)
		}
		p.mu.Unlock()
	}
	return clients, requests + int(s.requests.Load()), pods
}

// broken makes the listener have a configuration with which requests panic, after they have got a Pod.
func (r *rig) broken() (mend func()) {
	r.server.mu.Lock()
	defer r.server.mu.Unlock()
	l := r.server.listeners[r.at]
	good := l.config.Load()
	bad := *good
	bad.transport = nil
	l.config.Store(&bad)
	return func() { l.config.Store(good) }
}

// A panic costs what was served: the process goes on, others are served, and nothing stays occupied.
func TestPanics(t *testing.T) {
	for name, attack := range map[string]func(*rig){
		"TLS": func(r *rig) {
			good := r.service.Certificates[0]
			bad := good
			bad.PrivateKey = badSigner{good.PrivateKey.(crypto.Signer)}
			r.service.Certificates = []tls.Certificate{bad}
			r.server.Set(nil) // with the same certificate nothing would change
			r.set(r.service.Backends[r.at.Port()]...)
			c := tls.Client(r.dial(), &tls.Config{InsecureSkipVerify: true})
			if err := c.Handshake(); err == nil {
				r.Error("the handshake succeeds")
			}
			r.service.Certificates = []tls.Certificate{good}
			r.server.Set(nil)
			r.set(r.service.Backends[r.at.Port()]...)
		},
		"HTTP/1.1": func(r *rig) {
			defer r.broken()()
			c := tls.Client(r.dial(), &tls.Config{InsecureSkipVerify: true})
			_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: web\r\n\r\n")
			_, _ = io.ReadAll(c)
		},
		"HTTP/2": func(r *rig) {
			defer r.broken()()
			t := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
			defer t.CloseIdleConnections()
			q, _ := http.NewRequest(http.MethodGet, "https://"+r.at.String(), nil)
			if _, err := t.RoundTrip(q); err == nil {
				r.Error("a request is answered")
			}
		},
		"body": func(r *rig) {
			r.serveBad("body", func(s *Server, conn stream, l *listener, c *config) {
				s.web.serve(conn, l, c, r.at, r.at)
			}, "POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 100000\r\n\r\n", "the body")
		},
		"relay": func(r *rig) {
			pod, err := net.Dial("tcp", r.pod(named("pod")).String())
			r.must(err)
			r.serveBad("nothing", func(s *Server, conn stream, _ *listener, c *config) {
				s.join(c.service, conn, badStream{pod.(*net.TCPConn), "pod"}, time.Minute)
			}, "hello\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, map[string]string{lbProtocol: "https", dialect.LBTLSSecrets: "a"})
			cert, _, _ := certificate(t, "a.example.com")
			r.service.Certificates = append(r.service.Certificates, cert)
			r.set(r.web(tell))
			attack(r)
			r.panicked()
			c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
			answer, err := c.Get("https://" + r.at.String())
			if err != nil || answer.StatusCode != http.StatusOK {
				t.Fatalf("another client: %v, %v", answer, err)
			}
			_ = answer.Body.Close()
		})
	}
}

// serveBad serves a connection that panics when text at is read, without TLS, as its goroutine does.
func (r *rig) serveBad(at string, serve func(*Server, stream, *listener, *config), texts ...string) {
	r.Helper()
	in := r.listener()
	defer in.Close()
	client, err := net.Dial("tcp", in.Addr().String())
	r.must(err)
	defer client.Close()
	conn, err := in.Accept()
	r.must(err)
	s := r.server
	s.mu.Lock()
	l := s.listeners[r.at]
	s.mu.Unlock()
	c := *l.config.Load()
	c.tls = nil
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer s.panics.recover(c.service)
		serve(s, badStream{conn.(*net.TCPConn), at}, l, &c)
	}()
	for _, text := range texts {
		_, err := io.WriteString(client, text)
		r.must(err)
	}
	r.must(client.SetReadDeadline(time.Now().Add(patience)))
	if _, err := io.ReadAll(client); err != nil && !errors.Is(err, errReset) {
		r.Errorf("the client's connection: %v", err)
	}
	select {
	case <-done:
	case <-time.After(patience):
		r.Error("the connection goes on")
	}
}

// panicked waits until a panic has been counted and nothing is occupied.
func (r *rig) panicked() {
	r.Helper()
	for deadline := time.Now().Add(patience); ; {
		clients, requests, pods := r.inUseBy()
		if r.server.Panics() == 1 && clients+requests+pods == 0 {
			break
		}
		if time.Now().After(deadline) {
			r.Fatalf("%d panics; %d connections, %d requests, %d at Pods are left", r.server.Panics(), clients, requests, pods)
		}
		<-time.After(time.Millisecond)
	}
	if log := r.log.String(); strings.Count(log, "stack=") != 1 || !strings.Contains(log, "panics_test.go") &&
		!strings.Contains(log, "carry.go") && !strings.Contains(log, "http.go") {
		r.Errorf("the log has no stack: %s", log)
	}
}

// A datagram that leads to a panic is dropped, and the session of one whose answer does; the next one is served.
func TestPanicOfDatagrams(t *testing.T) {
	r := newRig(t, nil)
	r.datagrams(map[string]string{"fairlead.dev/lb-connection-limit": "100"}, r.echo("a"))
	r.set()
	r.server.mu.Lock()
	l := r.server.udp[r.at]
	r.server.mu.Unlock()
	good := l.config.Load()
	bad := *good
	bad.pool = nil
	l.config.Store(&bad)
	c := r.udp()
	for deadline := time.Now().Add(patience); r.server.Panics() == 0; {
		_, _ = c.Write([]byte("x"))
		if time.Now().After(deadline) {
			t.Fatal("no panic")
		}
		<-time.After(time.Millisecond)
	}
	l.config.Store(good)
	if got := r.asks(c, "x"); got != "a x" {
		t.Errorf("%q after a panic", got)
	}
	client := r.at
	before, _, _ := r.inUseBy()
	u := l.begin(good, client)
	u.config = &bad
	was := r.server.Panics()
	l.answer(u, client, client)
	if after, _, _ := r.inUseBy(); r.server.Panics() != was+1 || after != before {
		t.Errorf("%d panics, %d connections count, %d did before", r.server.Panics()-was, after, before)
	}
}

// A check that panics has failed.
func TestPanicOfCheck(t *testing.T) {
	r := newRig(t, nil)
	r.set(r.pod(named("a")))
	p := r.server.pools[poolKey{service: r.service.Name, port: r.at.Port()}]
	var none context.Context
	if err := p.probe(none, p.members[0], p.o.checks); err == nil || r.server.Panics() != 1 {
		t.Errorf("%v, %d panics", err, r.server.Panics())
	}
}

// What reads for package net/http, on its goroutines, passes nothing on after a panic.
func TestPanicOfReaders(t *testing.T) {
	r := newRig(t, nil)
	r.set(r.pod(named("a")))
	for i, read := range []func(*webConn) io.Reader{
		func(c *webConn) io.Reader { return &frames{Conn: c, web: c, preface: len(wholePreface)} },
		func(c *webConn) io.Reader {
			return &guard{Conn: c, web: c, requests: requests{state: inPreface, left: 1000}}
		},
	} {
		client, server := net.Pipe()
		c := &webConn{Conn: server, config: r.server.listeners[r.at].config.Load(), server: r.server, close: server.Close}
		go func() { _, _ = io.WriteString(client, "GET") }()
		if n, err := read(c).Read(make([]byte, 10)); n != 0 || !errors.Is(err, errPanic) {
			t.Errorf("%d: %d bytes, %v", i, n, err)
		}
		if _, err := client.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("%d: the connection goes on: %v", i, err)
		}
	}
	if n := r.server.Panics(); n != 2 {
		t.Errorf("%d panics", n)
	}
}
