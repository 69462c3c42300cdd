package web

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
)

// Nothing reads a client's connection beside the upload of a request: a Pod cannot make it a WebSocket before the body is there.
func TestWebSocketWithBody(t *testing.T) {
	for what, body := range map[string]string{
		"sized":   "Content-Length: 100000\r\n\r\n",
		"chunked": "Transfer-Encoding: chunked\r\n\r\n",
		"awaited": "Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
	} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		r.set(r.Pod(func(c net.Conn) {
			_, _ = http.ReadRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
			_, _ = io.Copy(io.Discard, c)
		}))
		c := r.Dial()
		_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+body)
		r.Must(err)
		in := bufio.NewReader(c)
		answer, err := http.ReadResponse(in, nil)
		if err != nil || answer.StatusCode != http.StatusBadGateway {
			t.Fatalf("%s: %v, %v", what, answer, err)
		}
		_, _ = io.WriteString(c, "x")
	}
}

// A client that stalls in the middle of its upload keeps nothing waiting: it has the Pod's early answer and the end of the
// connection, and 502 if the Pod dies.
func TestStalledUploads(t *testing.T) {
	for what, c := range map[string]struct {
		head   string
		answer string
		want   int
	}{
		"answered, short":   {"Content-Length: 10000\r\n\r\n", "HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n", 413},
		"answered, long":    {"Content-Length: 1000000\r\n\r\n", "HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n", 413},
		"answered, chunked": {"Transfer-Encoding: chunked\r\n\r\n1\r\n", "HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n", 413},
		"dead, short":       {"Content-Length: 10000\r\n\r\n", "", 502},
		"dead, long":        {"Content-Length: 1000000\r\n\r\n", "", 502},
	} {
		r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-idle-timeout": "3600"})
		r.set(r.Pod(func(pod net.Conn) {
			_, _ = http.ReadRequest(bufio.NewReader(pod))
			_, _ = io.WriteString(pod, c.answer)
			if c.answer != "" {
				_, _ = io.Copy(io.Discard, pod)
			}
		}))
		conn := r.Dial()
		_, err := io.WriteString(conn, "POST / HTTP/1.1\r\nHost: a\r\n"+c.head)
		r.Must(err)
		in := bufio.NewReader(conn)
		answer, err := http.ReadResponse(in, nil)
		if err != nil || answer.StatusCode != c.want {
			t.Fatalf("%s: %v, %v", what, answer, err)
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
			t.Fatalf("%s: the connection has not ended: %v", what, err)
		}
	}
}

// A client that cuts off its upload, or withholds the rest, does not cause the ejection of the Pod that waits for it. A Pod that closes
// the connection before it answers a whole request is ejected.
func TestUploadsDoNotEject(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-eject": "errors=1", "fairlead.dev/lb-request-timeout": "1"})
	asked := make(chan struct{}, 10)
	pod := func(c net.Conn) {
		q, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		asked <- struct{}{}
		_, _ = io.Copy(io.Discard, q.Body) // nothing for a GET
	}
	at := []netip.AddrPort{r.Pod(pod), r.Pod(pod)}
	r.set(at...)
	const of = `namespace="default",service="web"`
	var conns []net.Conn
	for range 6 {
		c := r.Dial()
		_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nx")
		r.Must(err)
		testbed.Receive(t, "the request at a Pod", asked)
		conns = append(conns, c)
	}
	for _, c := range conns[:3] {
		_ = c.Close()
	}
	r.shows("fairlead_lb_request_duration_seconds_count{" + of + "} 6")
	ejected := func() (out []string) {
		text := r.metrics()
		for _, a := range at {
			if !strings.Contains(text, fmt.Sprintf("fairlead_lb_endpoint_ejections_total{endpoint=%q,%s} 0\n", a, of)) {
				out = append(out, a.String())
			}
		}
		return out
	}
	if list := ejected(); len(list) > 0 {
		t.Errorf("%v were ejected", list)
	}
	c := r.Dial()
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	r.Must(err)
	testbed.Until(t, "an ejection", func() error {
		if list := ejected(); len(list) != 1 {
			return fmt.Errorf("ejected are %v", list)
		}
		return nil
	})
}
