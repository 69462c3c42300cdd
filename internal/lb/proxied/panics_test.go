package proxied

import (
	"crypto"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// A panic costs what was served: the process goes on, others are served, and nothing stays occupied.
func TestPanics(t *testing.T) {
	for name, attack := range map[string]func(*rig){
		"TLS": func(r *rig) {
			good := r.service.Certificates[0]
			bad := good
			bad.PrivateKey = lbtest.BadSigner{Signer: good.PrivateKey.(crypto.Signer)}
			r.service.Certificates = []tls.Certificate{bad}
			r.server.Set(nil) // with the same certificate nothing would change
			r.set(r.service.Backends[r.At.Port()]...)
			c := tls.Client(r.Dial(), &tls.Config{InsecureSkipVerify: true})
			if err := c.Handshake(); err == nil {
				r.Error("the handshake succeeds")
			}
			r.service.Certificates = []tls.Certificate{good}
			r.server.Set(nil)
			r.set(r.service.Backends[r.At.Port()]...)
		},
		"relay": func(r *rig) {
			pod, err := net.Dial("tcp", r.Pod(lbtest.Named("pod")).String())
			r.Must(err)
			r.serveBad("nothing", func(s *Server, conn stream.Conn, c *Config) {
				stream.Join(s.panics, c.Service, conn, lbtest.BadStream{TCPConn: pod.(*net.TCPConn), At: "pod"}, time.Minute)
			}, "hello\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, map[string]string{"fairlead.dev/lb-protocol": "tls", dialect.LBTLSSecrets: "a"})
			cert, _, _ := lbtest.Certificate(t, "a.example.com")
			r.service.Certificates = append(r.service.Certificates, cert)
			r.set(r.Pod(lbtest.Named("pod")))
			attack(r)
			r.panicked()
			c := tls.Client(r.Dial(), &tls.Config{InsecureSkipVerify: true})
			if got, err := lbtest.Say(c, "x"); got != "pod x\n" || err != nil {
				t.Fatalf("another client: %q, %v", got, err)
			}
		})
	}
}

// serveBad serves a connection that panics when text at is read, without TLS, as its goroutine does.
func (r *rig) serveBad(at string, serve func(*Server, stream.Conn, *Config), texts ...string) {
	r.Helper()
	in := r.Listener()
	defer in.Close()
	client, err := net.Dial("tcp", in.Addr().String())
	r.Must(err)
	defer client.Close()
	conn, err := in.Accept()
	r.Must(err)
	s := r.server
	s.mu.Lock()
	l := s.listeners[r.At]
	s.mu.Unlock()
	c := *l.config.Load()
	c.TLS = nil
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer s.panics.Recover(c.Service)
		serve(s, lbtest.BadStream{TCPConn: conn.(*net.TCPConn), At: at}, &c)
	}()
	for _, text := range texts {
		_, err := io.WriteString(client, text)
		r.Must(err)
	}
	r.Must(client.SetReadDeadline(time.Now().Add(lbtest.Patience)))
	if _, err := io.ReadAll(client); err != nil && !errors.Is(err, lbtest.ErrReset) {
		r.Errorf("the client's connection: %v", err)
	}
	select {
	case <-done:
	case <-time.After(lbtest.Patience):
		r.Error("the connection goes on")
	}
}

// panicked waits until a panic has been counted and nothing is occupied.
func (r *rig) panicked() {
	r.Helper()
	for deadline := time.Now().Add(lbtest.Patience); ; {
		u := r.server.Usage()
		if r.server.Panics() == 1 && u == (Usage{}) {
			break
		}
		if time.Now().After(deadline) {
			r.Fatalf("%d panics; %+v is left", r.server.Panics(), u)
		}
		<-time.After(time.Millisecond)
	}
	if log := r.Logged.String(); strings.Count(log, "stack=") != 1 || !strings.Contains(log, "proxied.(*Server)") &&
		!strings.Contains(log, "stream.Join") {
		r.Errorf("the log has no stack: %s", log)
	}
}

// A datagram that leads to a panic is dropped, and the session of one whose answer does; the next one is served.
func TestPanicOfDatagrams(t *testing.T) {
	r := newRig(t, nil)
	r.datagrams(map[string]string{"fairlead.dev/lb-connection-limit": "100"}, r.Echo("a"))
	r.set()
	r.server.mu.Lock()
	l := r.server.udp[r.At]
	r.server.mu.Unlock()
	good := l.config.Load()
	bad := *good
	bad.Pool = nil
	l.config.Store(&bad)
	c := r.udp()
	for deadline := time.Now().Add(lbtest.Patience); r.server.Panics() == 0; {
		_, _ = c.Write([]byte("x"))
		if time.Now().After(deadline) {
			t.Fatal("no panic")
		}
		<-time.After(time.Millisecond)
	}
	l.config.Store(good)
	if got := r.Asks(c, "x"); got != "a x" {
		t.Errorf("%q after a panic", got)
	}
	client := r.At
	before := r.server.Usage()
	u := l.begin(good, client)
	u.config, u.pool = &bad, nil
	was := r.server.Panics()
	l.answer(u, client, client)
	if after := r.server.Usage(); r.server.Panics() != was+1 || after != before {
		t.Errorf("%d panics, %+v is in use, %+v was before", r.server.Panics()-was, after, before)
	}
}
