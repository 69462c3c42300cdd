package web

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/mark"
	"github.com/fairlead/fairlead/internal/testbed"
)

const lbClientAuth = "fairlead.dev/lb-client-auth"

// subjects is a Pod that answers with what it is told about the client's certificate.
func (r *rig) subjects() func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, q *http.Request) {
		_, _ = io.Copy(io.Discard, q.Body) // the trailers follow it
		for _, fields := range []http.Header{q.Header, q.Trailer} {
			for name, values := range fields {
				if strings.Contains(strings.ToLower(name), "subject") && len(values) > 0 { // an announced trailer may not come
					fmt.Fprintf(w, "%s=%s ", name, values)
				}
			}
		}
	}
}

// Clients have the certificate that the Service asks for, by HTTP/1.1 and HTTP/2; a Pod gets the verified subject and nothing that
// a client says about it. When another authority counts, a kept connection does not go on.
func TestClientCertificates(t *testing.T) {
	server, _, _ := lbtest.Certificate(t, "web.example")
	good, goodPEM, _ := lbtest.Certificate(t, "alice")
	bad, badPEM, _ := lbtest.Certificate(t, "alice")
	for _, second := range []bool{false, true} {
		for _, auth := range []string{"require", "optional"} {
			started := func() (*rig, netip.AddrPort) {
				r := newRig(t, map[string]string{
					lbProtocol: "https", "fairlead.dev/lb-tls-secrets": "web", "fairlead.dev/lb-client-ca": "secret/ca", lbClientAuth: auth,
					"fairlead.dev/lb-underscore-headers": "keep",
				})
				r.service.Certificates, r.service.ClientRoots = []tls.Certificate{server}, lbtest.Pool(goodPEM)
				pod := r.Web(r.subjects())
				r.set(pod)
				return r, pod
			}
			r, pod := started()
			ask := func(r *rig, client *http.Client) string {
				body := struct{ io.Reader }{strings.NewReader("x")} // of no known length
				q, err := http.NewRequest(http.MethodPost, "https://"+r.At.String()+"/", body)
				r.Must(err)
				q.Header.Set("X-Client-Subject", "CN=admin")
				q.Header.Set("X_Client-Subject", "CN=admin")
				q.Trailer = http.Header{"X-Client-Subject": {"CN=admin"}, "X_client-Subject": {"CN=admin"}}
				answer, err := client.Do(q)
				if err != nil {
					return "none"
				}
				defer answer.Body.Close()
				if want := map[bool]int{false: 1, true: 2}[second]; answer.ProtoMajor != want {
					t.Errorf("the answer is of %s, want HTTP/%d", answer.Proto, want)
				}
				text, _ := io.ReadAll(answer.Body)
				return fmt.Sprintf("%d %s", answer.StatusCode, text)
			}
			with := func(r *rig, certs ...tls.Certificate) *http.Client {
				c := r.Client()
				c.Transport.(*http.Transport).ForceAttemptHTTP2 = second
				c.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true, //nolint:gosec // of this test
					GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
						if len(certs) == 0 {
							return &tls.Certificate{}, nil
						}
						return &certs[0], nil
					}}
				return c
			}
			none := map[string]string{"require": "none", "optional": "200 "}[auth]
			garbage := r.Dial() // no certificate is to blame for this failure
			_, err := io.WriteString(garbage, "GET / HTTP/1.1\r\n\r\n")
			r.Must(err)
			_, _ = io.Copy(io.Discard, garbage)
			const rejected = `fairlead_lb_rejected_total{namespace="default",reason="client-certificate",service="web"} `
			if text := r.metrics(); strings.Contains(text, rejected) { // 0 is not shown
				t.Errorf("HTTP/2 %t, %s: plain text counts as a missing certificate: %s", second, auth, text)
			}
			if none == "none" {
				ask(r, with(r))
				r.shows(rejected + "some")
			}
			kept := with(r, good)
			other, _ := started() // which has counted nothing
			for what, c := range map[string]struct{ got, want string }{
				"none": {ask(r, with(r)), none}, "right": {ask(r, kept), "200 X-Client-Subject=[CN=alice] "},
				"wrong": {ask(other, with(other, bad)), "none"},
			} {
				if c.got != c.want {
					t.Errorf("HTTP/2 %t, %s, %s: %q, want %q", second, auth, what, c.got, c.want)
				}
			}
			other.shows(rejected + "some")
			r.service.ClientRoots = lbtest.Pool(badPEM)
			r.set(pod)
			if got := ask(r, kept); !strings.HasPrefix(got, "421 ") && got != "none" {
				t.Errorf("HTTP/2 %t, %s: a kept connection goes on although another authority counts: %q", second, auth, got)
			}
		}
	}
}

// Without anything to verify clients by a Service that asks for it is not served.
func TestClientCertificatesFailClosed(t *testing.T) {
	server, _, _ := lbtest.Certificate(t, "web.example")
	r := newRig(t, map[string]string{lbProtocol: "https", "fairlead.dev/lb-tls-secrets": "web", "fairlead.dev/lb-client-ca": "secret/ca"})
	r.service.Certificates = []tls.Certificate{server}
	if failed := r.server.Set([]*proxied.Service{new(r.service)}); failed[r.service.Name] == nil || r.server.Serves(r.service.Name) {
		t.Errorf("%v", failed)
	}
}

// A subject cannot end the field that it stands in.
func TestSubjects(t *testing.T) {
	for name, want := range map[string]string{
		"a\r\nX-Admin: 1": `CN=a\0D\0AX-Admin: 1`, "é": `CN=\C3\A9`, "a,b": `CN=a\,b`, strings.Repeat("x", 2000): "too-long",
	} {
		cert := &x509.Certificate{Subject: pkix.Name{CommonName: name}}
		s := &tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}, VerifiedChains: [][]*x509.Certificate{{cert}}}
		if got := mark.Subject(s); got != want {
			t.Errorf("%.20q: %q, want %q", name, got, want)
		}
		if s.VerifiedChains = nil; mark.Subject(s) != "" {
			t.Error("a certificate that was not verified has a subject")
		}
	}
}

// A body that is longer than it may be gets 413, whether its length is told or not, and other requests go on. By a front, too.
func TestLimitOfBodies(t *testing.T) {
	for _, app := range []string{"", "kubernetes.io/h2c", "none"} {
		r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-request-body-limit": "20"})
		pod := &failing{}
		switch r.appProtocol = app; app {
		case "none":
			r.set(r.Web(pod.ServeHTTP))
		case "":
			r.retried("retry: {codes: [413], attempts: 3}", r.Web(pod.ServeHTTP))
		default:
			r.retried("retry: {codes: [413], attempts: 3}", r.h2cPod(pod.ServeHTTP))
		}
		for _, version := range []int{1, 2} {
			client := r.clientOf(version)
			for n, want := range map[int]string{20 << 10: "200 20480", 20<<10 + 1: "413 ", 100 << 10: "413 ", 10: "200 10"} {
				body := strings.Repeat("x", n)
				for _, from := range []io.Reader{strings.NewReader(body), unsized(body)} {
					if got := pod.ask(r, client, 0, "PUT", from); !strings.HasPrefix(got, want) {
						t.Errorf("%q, HTTP/%d: %d bytes: %s, want %s", app, version, n, got, want)
					}
				}
			}
		}
	}
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-request-body-limit": "1"})
	pod := &failing{}
	r.set(r.Web(pod.ServeHTTP))
	for _, version := range []int{1, 2} { // a body that goes out with its head
		if got := pod.ask(r, r.clientOf(version), 0, "POST", unsized(strings.Repeat("x", 1025))); !strings.HasPrefix(got, "413 ") {
			t.Errorf("HTTP/%d: %s", version, got)
		}
	}
}

// A client has as many connections and requests as the Service lets one have; others are not concerned.
func TestLimitsOfAClient(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-client-connections": "2", "fairlead.dev/lb-client-requests": "3"})
	r.set(r.Pod(lbtest.AnswerAll))
	from := func(ip string) net.Conn {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
		c, err := d.Dial("tcp", r.At.String())
		r.Must(err)
		r.Cleanup(func() { _ = c.Close() })
		r.Must(c.SetDeadline(time.Now().Add(lbtest.Patience)))
		return c
	}
	ask := func(c net.Conn) string {
		buf := make([]byte, 4<<10)
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
			return ""
		}
		n, _ := c.Read(buf)
		return string(buf[:n])
	}
	a, b := from("127.0.0.1"), from("127.0.0.1")
	for i, c := range []net.Conn{a, b, a} {
		if got := ask(c); !strings.HasPrefix(got, "HTTP/1.1 200 ") {
			t.Errorf("request %d: %q", i, got)
		}
	}
	limited := 0
	for range 30 { // as fast as they come: some are too many
		if got := ask(a); strings.HasPrefix(got, "HTTP/1.1 429 ") && strings.Contains(got, "Retry-After: 1\r\n") {
			limited++
		} else if !strings.HasPrefix(got, "HTTP/1.1 200 ") {
			t.Fatalf("%q", got)
		}
	}
	if limited == 0 {
		t.Error("no request is too many")
	}
	if got := ask(from("127.0.0.1")); got != "" {
		t.Errorf("a third connection is served: %q", got)
	}
	if got := ask(from("127.0.0.2")); !strings.HasPrefix(got, "HTTP/1.1 200 ") {
		t.Errorf("another client: %q", got)
	}
	r.shows(`fairlead_lb_rejected_total{namespace="default",reason="client-limit",service="web"} some`)
	_ = b.Close()
	testbed.Until(t, "the place of a connection that has ended", func() error {
		c := from("127.0.0.1")
		defer c.Close()
		if ask(c) == "" {
			return errors.New("it is taken")
		}
		return nil
	})
}

// A request has the identifiers that the Service asks for: the client's if they are well, else new ones. Names with _ stay if
// that is asked for.
func TestRequestMarks(t *testing.T) {
	const good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for _, c := range []struct {
		asks, name, value string
		kept              bool
	}{
		{"x-request-id", "X-Request-Id", "abc-1", true}, {"x-request-id", "X-Request-Id", "a b", false},
		{"x-request-id", "X-Request-Id", strings.Repeat("x", 129), false}, {"x-request-id", "X-Request-Id", "", false},
		{"traceparent", "Traceparent", good, true}, {"traceparent", "Traceparent", strings.ToUpper(good), false},
		{"traceparent", "Traceparent", good + "-x", false}, {"traceparent", "Traceparent", "cc" + good[2:] + "-x", true},
		{"traceparent", "Traceparent", "ff" + good[2:], false},
		{"traceparent", "Traceparent", "00-" + strings.Repeat("0", 32) + good[35:], false},
		{"x-request-id,traceparent", "X-Request-Id", "abc", true},
	} {
		r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-request-id": c.asks})
		r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
			fmt.Fprintf(w, "%q %q", q.Header.Values(c.name), q.Header["X_request_id"])
		}))
		q, err := http.NewRequest(http.MethodGet, "http://"+r.At.String()+"/", nil)
		r.Must(err)
		q.Header.Set(c.name, c.value)
		q.Header["X_request_id"] = []string{"forged"}
		answer, err := r.Client().Do(q)
		r.Must(err)
		text, _ := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		value, rest, _ := strings.Cut(strings.TrimPrefix(string(text), `["`), `"] `)
		made := map[string]int{"X-Request-Id": 32, "Traceparent": 55}[c.name]
		if rest != "[]" || (value == c.value) != c.kept || !c.kept && len(value) != made {
			t.Errorf("%s %.60q: %s", c.name, c.value, text)
		}
	}
}

// What a Pod does not acknowledge is given up after some seconds, but a Pod may take its time to read a body.
func TestUnacknowledged(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", dialect.LBIdleTimeout: "77"})
	reads, goOn := make(chan struct{}), make(chan struct{})
	r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
		if q.Method == http.MethodPost {
			_, _ = q.Body.Read(make([]byte, 1))
			close(reads)
			<-goOn
		}
		_, _ = io.Copy(io.Discard, q.Body)
	}))
	wants := func(when string) { // the connection of the last request is kept after the client has its answer
		t.Helper()
		testbed.Until(t, "a kept connection with its time-out "+when, func() error {
			r.engine.kept.mu.Lock()
			defer r.engine.kept.mu.Unlock()
			if r.engine.kept.newest == nil {
				return errors.New("none is kept")
			}
			d, err := socket.UserTimeout(r.engine.kept.newest.tcp)
			if err == nil && d != unacknowledged {
				err = fmt.Errorf("%v, want %v", d, unacknowledged)
			}
			return err
		})
	}
	client := r.Client()
	get := func() {
		answer, err := client.Get("http://" + r.At.String() + "/")
		r.Must(err)
		_ = answer.Body.Close()
	}
	get()
	wants("after a request")
	body, to := io.Pipe()
	done := make(chan error, 1)
	go func() {
		answer, err := client.Post("http://"+r.At.String()+"/", "text/plain", body)
		if err == nil {
			err = answer.Body.Close()
		}
		done <- err
	}()
	_, err := io.WriteString(to, "x")
	r.Must(err)
	<-reads
	r.engine.sessions.mu.Lock()
	uploads := 0
	for s := range r.engine.sessions.all {
		s.mu.Lock()
		if u, is := s.back.(*upstream); is {
			uploads++
			if d, err := socket.UserTimeout(u.tcp); d != 77*time.Second || err != nil {
				t.Errorf("during an upload: %v, %v", d, err)
			}
		}
		s.mu.Unlock()
	}
	r.engine.sessions.mu.Unlock()
	if uploads != 1 {
		t.Errorf("%d uploads", uploads)
	}
	close(goOn)
	r.Must(to.Close())
	r.Must(<-done)
	wants("after an upload")
}

// A port of http sends its clients to the one of https; no Pod has the request.
func TestRedirects(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.service.Spec.Listeners[0].Redirect = 8443
	r.set(r.Web(func(http.ResponseWriter, *http.Request) { t.Error("a Pod has the request") }))
	for ask, want := range map[string]string{
		"GET /a%20b?x=/../y HTTP/1.1\r\nHost: web.example:80\r\n\r\n": "https://web.example:8443/a%20b?x=/../y",
		"POST //evil.example/ HTTP/1.1\r\nHost: web.example\r\n\r\n":  "https://web.example:8443//evil.example/",
		"GET / HTTP/1.1\r\nHost: [2001:db8::1]:80\r\n\r\n":            "https://[2001:db8::1]:8443/",
		"GET / HTTP/1.0\r\n\r\n":                                      "https://" + r.At.Addr().String() + ":8443/",
		"OPTIONS * HTTP/1.1\r\nHost: web.example\r\n\r\n":             "",
	} {
		c := r.Dial()
		_, err := io.WriteString(c, ask)
		r.Must(err)
		answer, err := http.ReadResponse(bufio.NewReader(c), nil)
		r.Must(err)
		status := map[bool]int{true: http.StatusBadRequest, false: http.StatusPermanentRedirect}[want == ""]
		if answer.StatusCode != status || answer.Header.Get("Location") != want {
			t.Errorf("%q: %d to %q, want %q", ask, answer.StatusCode, answer.Header.Get("Location"), want)
		}
		_ = answer.Body.Close()
	}
}
