package web

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// What was sent on a kept connection that the Pod closes without an answer is sent again if that does no harm.
func TestStaleConnections(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.set(r.Pod(func(c net.Conn) { // each connection has one answer
		in := bufio.NewReader(c)
		if _, err := http.ReadRequest(in); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
			_, _ = http.ReadRequest(in)
		}
	}))
	c := r.Dial()
	in := bufio.NewReader(c)
	for _, q := range []struct {
		text string
		want int
	}{
		{"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 200}, {"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 200},
		{"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\na", 502}, {"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\na", 200},
	} {
		_, err := io.WriteString(c, q.text)
		r.Must(err)
		if q.want == 502 { // the connection ends, as the body may not have been read
			answer, err := http.ReadResponse(in, nil)
			if err != nil || answer.StatusCode != q.want {
				t.Fatalf("%q: %v, %v", q.text, answer, err)
			}
			c = r.Dial()
			in = bufio.NewReader(c)
			continue
		}
		answer, err := http.ReadResponse(in, nil)
		if err != nil || answer.StatusCode != q.want {
			t.Fatalf("%q: %v, %v", q.text, answer, err)
		}
	}
}

// The Pod's connection ends with that of a client that does not wait for the answer, whether its request has a body or
// not, and no other one has the request.
func TestClientLeaves(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.service.Spec.Health.Interval = dialect.Duration(10 * time.Millisecond) // checks are no requests
	asked, ended := make(chan string, 10), make(chan error, 10)
	r.set(r.Pod(func(c net.Conn) {
		in := bufio.NewReader(c)
		q, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		n, err := io.Copy(io.Discard, q.Body)
		asked <- fmt.Sprint(q.Method, " ", n, " ", err)
		_, err = in.ReadByte()
		ended <- err
	}))
	for want, text := range map[string]string{
		"GET 0 <nil>":      "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
		"POST 50000 <nil>": "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 50000\r\n\r\n" + strings.Repeat("x", 50000),
	} {
		c := r.Dial()
		_, err := io.WriteString(c, text)
		r.Must(err)
		if got := <-asked; got != want {
			t.Errorf("the Pod is asked %s, want %s", got, want)
		}
		r.Must(c.Close())
		select {
		case err := <-ended:
			if !errors.Is(err, io.EOF) && !errors.Is(err, lbtest.ErrReset) {
				t.Error(err)
			}
		case <-time.After(lbtest.Patience):
			t.Fatalf("%s: the Pod's connection is still open", want)
		}
	}
	if len(asked) > 0 {
		t.Errorf("the Pod is asked again: %s", <-asked)
	}
}

// A client that has sent the end after its requests has all answers, as long as they come.
func TestHalfClosedClients(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.set(r.Web(lbtest.Tell))
	long := strings.Repeat("x", 50000)
	c := r.Dial()
	_, err := io.WriteString(c, "GET /a HTTP/1.1\r\nHost: a\r\n\r\nPOST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 50000\r\n\r\n"+long+
		"PUT /c HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\ny")
	r.Must(err)
	r.Must(c.(*net.TCPConn).CloseWrite())
	in := bufio.NewReader(c)
	for _, want := range []string{" /a ", "body=" + long, "body=y"} {
		answer, err := http.ReadResponse(in, nil)
		r.Must(err)
		if got, err := io.ReadAll(answer.Body); err != nil || answer.StatusCode != http.StatusOK || !strings.Contains(string(got), want) {
			t.Errorf("%d, %.100q, %v", answer.StatusCode, got, err)
		}
	}
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("afterwards: %v", err)
	}
}

// What reads a body leaves alone what another goroutine is about to write.
func TestFillLeavesOutput(t *testing.T) {
	r := newRig(t, nil)
	r.set(r.Pod(lbtest.Named("pod")))
	w := newWire(r.Dial().(*net.TCPConn))
	w.smallFirst = true
	w.put([]byte("a\nb\n"))
	r.Must(w.flush(lbtest.Patience))
	r.Must(w.fill(lbtest.Patience, maxHeader))
	w.take(len(w.buffered()))
	w.put(nil)
	_, err := w.conn.Write([]byte("c\n"))
	r.Must(err)
	if err := w.fill(lbtest.Patience, 0); err != nil || w.out == nil {
		t.Errorf("%v; the buffer for the answer was given back: %t", err, w.out == nil)
	}
}

// Long bodies arrive whole both ways, of known length and not, with TLS and without.
func TestLongBodies(t *testing.T) {
	long := bytes.Repeat([]byte("0123456789abcdef"), 300<<10)
	sum := sha256.Sum256(long)
	for _, protocol := range []string{"http", "https"} {
		r := newRig(t, map[string]string{dialect.LBTLSSecrets: "a", lbProtocol: protocol, lbBackend: "http"})
		cert, _, _ := lbtest.Certificate(t, "a.example.com")
		r.service.Certificates = []tls.Certificate{cert}
		r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
			body, err := io.ReadAll(q.Body)
			if err != nil || sha256.Sum256(body) != sum {
				t.Errorf("%s: the Pod has %d bytes, %v", protocol, len(body), err)
			}
			if q.ContentLength > 0 {
				w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			}
			_, _ = w.Write(body)
		}))
		client := r.Client()
		client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
		for _, body := range []io.Reader{bytes.NewReader(long), io.MultiReader(bytes.NewReader(long))} {
			answer, err := client.Post(protocol+"://web/", "a/b", body)
			r.Must(err)
			got, err := io.ReadAll(answer.Body)
			if err != nil || sha256.Sum256(got) != sum || len(answer.TransferEncoding) == 0 != (answer.ContentLength > 0) {
				t.Errorf("%s: the client has %d bytes, %v", protocol, len(got), err)
			}
			_ = answer.Body.Close()
		}
	}
}
