package web

import (
	"crypto"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// broken makes the listener have a configuration with which requests panic.
func (r *rig) broken() (mend func()) {
	pods := r.service.Backends[r.At.Port()]
	r.breaks = true
	r.set(pods...)
	return func() {
		r.breaks = false
		r.set(pods...)
	}
}

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
		"HTTP/1.1": func(r *rig) {
			defer r.broken()()
			c := tls.Client(r.Dial(), &tls.Config{InsecureSkipVerify: true})
			_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: web\r\n\r\n")
			_, _ = io.ReadAll(c)
		},
		"HTTP/2": func(r *rig) {
			defer r.broken()()
			t := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
			defer t.CloseIdleConnections()
			q, _ := http.NewRequest(http.MethodGet, "https://"+r.At.String(), nil)
			if _, err := t.RoundTrip(q); err == nil {
				r.Error("a request is answered")
			}
		},
		"body": func(r *rig) {
			text := "body"
			r.panicAt.Store(&text)
			defer r.panicAt.Store(nil)
			client := r.Dial()
			for _, text := range []string{"POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 100000\r\n\r\n", "the body"} {
				_, err := io.WriteString(client, text)
				r.Must(err)
			}
			if _, err := io.ReadAll(client); err != nil && !errors.Is(err, lbtest.ErrReset) {
				r.Errorf("the client's connection: %v", err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, map[string]string{lbProtocol: "https", dialect.LBTLSSecrets: "a"})
			cert, _, _ := lbtest.Certificate(t, "a.example.com")
			r.service.Certificates = append(r.service.Certificates, cert)
			r.set(r.Web(lbtest.Tell))
			attack(r)
			r.panicked()
			c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
			answer, err := c.Get("https://" + r.At.String())
			if err != nil || answer.StatusCode != http.StatusOK {
				t.Fatalf("another client: %v, %v", answer, err)
			}
			_ = answer.Body.Close()
		})
	}
}

// panicked waits until a panic has been counted and nothing is occupied.
func (r *rig) panicked() {
	r.Helper()
	for deadline := time.Now().Add(lbtest.Patience); ; {
		u := r.server.Usage()
		if r.server.Panics() == 1 && u == (proxied.Usage{}) {
			break
		}
		if time.Now().After(deadline) {
			r.Fatalf("%d panics; %+v is left", r.server.Panics(), u)
		}
		<-time.After(time.Millisecond)
	}
	if log := r.Logged.String(); strings.Count(log, "stack=") != 1 || !strings.Contains(log, "rig_test.go") &&
		!strings.Contains(log, "bad.go") && !strings.Contains(log, "carry.go") && !strings.Contains(log, "http.go") {
		r.Errorf("the log has no stack: %s", log)
	}
}

// A panic of what reads a connection of HTTP/2 costs that connection, with all its streams.
func TestPanicOfReaders(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.set(r.Web(lbtest.Tell))
	text := "panic now"
	r.panicAt.Store(&text)
	a := r.attacker()
	r.Must(a.ask("POST", false))
	r.Must(a.WriteData(1, false, []byte(text)))
	r.ends("a panic", a)
	r.panicAt.Store(nil)
	r.panicked()
	r.served("afterwards")
}
