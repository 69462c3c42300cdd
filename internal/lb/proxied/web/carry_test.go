package web

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// recorder is a Pod that notes what it is asked, and gives one answer to everything.
type recorder struct {
	at     netip.AddrPort
	mu     sync.Mutex
	asked  []string
	answer string
}

func (r *rig) recorder() *recorder {
	p := &recorder{}
	p.at = r.Pod(func(c net.Conn) {
		in := bufio.NewReader(c)
		for {
			q, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			if q.Header.Get("Expect") != "" {
				_, _ = io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n")
			}
			body, err := io.ReadAll(q.Body)
			if err != nil {
				return
			}
			p.mu.Lock()
			p.asked = append(p.asked, fmt.Sprintf("%s %s %s %v %d %q %s %s", q.Method, q.RequestURI, q.Host, q.TransferEncoding, q.ContentLength,
				body, sorted(q.Header), sorted(q.Trailer)))
			answer := p.answer
			p.mu.Unlock()
			if final := strings.LastIndex(answer, "HTTP/1."); q.Method == http.MethodHead {
				head, _, _ := strings.Cut(answer[final:], "\r\n\r\n")
				answer = answer[:final] + head + "\r\n\r\n"
			}
			if _, err := io.WriteString(c, answer); err != nil || strings.Contains(answer, "Connection: close") {
				return
			}
		}
	})
	return p
}

func (p *recorder) take() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.asked
	p.asked = nil
	return out
}

func sorted(h http.Header) string {
	var lines []string
	for name, values := range h {
		lines = append(lines, name+": "+strings.Join(values, " | "))
	}
	slices.Sort(lines)
	return strings.Join(lines, "; ")
}

// ways are two listeners before one Pod: requests of HTTP/1.1 are carried by a session, and by net/http.
type ways struct {
	*recorder
	rigs [2]*rig
}

func newWays(t *testing.T) *ways {
	w := &ways{}
	for i := range w.rigs {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		if i == 0 {
			w.recorder = r.recorder()
		}
		r.headerTimeout = 5 * time.Second
		r.set(w.at)
		r.engine.onlyNetHTTP = i == 1
		w.rigs[i] = r
	}
	return w
}

// ask sends bytes both ways. It returns what the Pod was asked, and the answer to the client.
func (w *ways) ask(text string, patience time.Duration) (asked [2][]string, answered [2]string) {
	for i, r := range w.rigs {
		c := r.Dial()
		r.Must(c.SetDeadline(time.Now().Add(lbtest.Patience)))
		_, _ = io.WriteString(c, text)
		in := bufio.NewReader(c)
		method, _, _ := strings.Cut(text, " ")
		for {
			a, err := http.ReadResponse(in, &http.Request{Method: method})
			if err != nil {
				answered[i] = "closed"
				break
			}
			body, err := io.ReadAll(a.Body)
			if a.StatusCode < 200 && a.StatusCode != http.StatusSwitchingProtocols {
				interim := fmt.Sprint(a.StatusCode, " ")
				if a.StatusCode != http.StatusContinue || answered[i] != interim { // net/http passes on the Pod's, and may have sent its own
					answered[i] += interim
				}
				continue
			}
			a.Header.Del("Date")
			a.Header.Del("Connection") // a.Close is what it is for
			a.Header.Del("Trailer")    // without trailers
			if a.StatusCode >= 400 && a.StatusCode != http.StatusNotFound {
				body = nil // the load balancer's own text
				a.ContentLength = 0
				a.Header.Del("Content-Length")
				a.Header.Del("Content-Type")
			}
			answered[i] += fmt.Sprintf("%s %d %v %d close=%t %q %v %s %s", a.Proto, a.StatusCode, a.TransferEncoding, a.ContentLength, a.Close, body,
				err != nil, sorted(a.Header), sorted(a.Trailer))
			break
		}
		_ = c.Close()
		listener := fmt.Sprintf("X-Forwarded-Port: %d;", r.At.Port()) // X-Forwarded-Proto follows
		for _, q := range w.take() {
			if own := strings.ReplaceAll(q, listener, "X-Forwarded-Port: own;"); own != q { // not a late one that the other way has sent
				asked[i] = append(asked[i], own)
			}
		}
	}
	return asked, answered
}

// sameRequests are read and passed on as net/http does it.
var sameRequests = []string{
	"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET /a%2Fb//c/../d?q=%zz&x=;y HTTP/1.1\r\nHost: a:80\r\nAccept: */*\r\nAccept: b\r\n\r\n",
	"GET http://b.example:81/c?d HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET /\"<>\x80|^` HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n",
	"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
	"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET / HTTP/1.0\r\nHost: a\r\n\r\n",
	"GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a\r\nConnection: x-hop, close\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nProxy-Authorization: b\r\nProxy-Connection: c\r\n" +
		"X-Real-IP: 1\r\nForwarded: for=1\r\nX-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Host: b\r\nX-Forwarded-Port: 1\r\n" +
		"X-Forwarded-Proto: gopher\r\nx-forwarded-for: 192.0.2.2\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a\r\nTE: trailers, deflate\r\nCookie: a=b\r\nUser-Agent: b\r\nX-Empty:\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: a\r\n\r\n",
	"DELETE / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\nA\r\n0123456789\r\n1\r\na\r\n0\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n1\r\na\r\n0\r\nX-T: 1\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-T: 1\r\n\r\n",
	"PUT / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na",
	"PUT / HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\nContent-Length: 1\r\n\r\na",
	"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n",
	"CONNECT b:1 HTTP/1.1\r\nHost: b:1\r\n\r\n",
	"GET / HTTP/1.1\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
	"GET a HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n",
	"PRI * HTTP/1.1\r\nHost: a\r\n\r\n",
	"G(T / HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", 100<<10) + "\r\n\r\n",
}

// sameAnswers reach a client as by net/http.
var sameAnswers = []string{
	"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Length: 2\r\nX-A: 1\r\nX-A: 2\r\n\r\nok",
	"HTTP/1.1 404 Not Found\r\nContent-Type: a/b\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
	"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n",
	"HTTP/1.1 204 No Content\r\nContent-Type: a/b\r\n\r\n",
	"HTTP/1.1 304 Not Modified\r\nEtag: b\r\n\r\n",
	"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nConnection: close\r\n\r\nok",
	"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nConnection: x-hop\r\nX-Hop: 1\r\nKeep-Alive: 1\r\nContent-Length: 2\r\n\r\nok",
	"HTTP/1.0 200 OK\r\nContent-Type: a/b\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
	"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Length: 0\r\n\r\n",
	"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok",
	"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok",
	"HTTP/1.1 abc\r\nConnection: close\r\n\r\n",
}

// A session carries requests and answers as net/http and its ReverseProxy do, which carried all before.
func TestCarriesAsNetHTTP(t *testing.T) {
	w := newWays(t)
	try := func(text, answer string) {
		w.mu.Lock()
		w.answer = answer
		w.mu.Unlock()
		asked, answered := w.ask(text, lbtest.Patience)
		if !slices.Equal(asked[0], asked[1]) {
			t.Errorf("%.200q: the Pod is asked\n%.800q, and by net/http\n%.800q", text, asked[0], asked[1])
		}
		if answered[0] != answered[1] {
			t.Errorf("%.200q, %q: the client has\n%s, and by net/http\n%s", text, answer, answered[0], answered[1])
		}
	}
	for _, text := range sameRequests {
		try(text, sameAnswers[0])
	}
	for _, answer := range sameAnswers {
		for _, text := range []string{
			"GET / HTTP/1.1\r\nHost: a\r\nTE: trailers\r\n\r\n", "GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n",
			"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n",
		} {
			if strings.Contains(text, "HTTP/1.0") && strings.Contains(answer, " 103 ") {
				continue // net/http passes on to a client of HTTP/1.0 what such a client does not know
			}
			try(text, answer)
		}
	}
}

// What a session passes on net/http passes on, too, and alike.
func FuzzCarriesAsNetHTTP(f *testing.F) {
	for _, text := range append(sameRequests, "GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n") {
		if len(text) < 1000 {
			f.Add([]byte(text))
		}
	}
	for _, text := range rejected {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if bytes.HasPrefix(b, []byte("PRI ")) || bytes.Contains(bytes.ToLower(b), []byte("upgrade")) {
			return
		}
		w := newWays(t)
		w.answer = sameAnswers[0]
		limit := lbtest.Patience
		if fuzzing := flag.Lookup("test.fuzz"); fuzzing.Value.String() != "" { // what is not whole ends soon
			limit = 2 * time.Second
			for _, r := range w.rigs {
				r.engine.headerTimeout = 100 * time.Millisecond
				r.service.Spec.IdleTimeout = dialect.Duration(100 * time.Millisecond)
				r.service.Spec.RequestTimeout = r.service.Spec.IdleTimeout
				r.set(w.at)
			}
		}
		asked, answered := w.ask(string(b), limit)
		whole := 0
		for in := bufio.NewReader(bytes.NewReader(b)); ; whole++ {
			q, err := http.ReadRequest(in)
			if err != nil {
				break
			}
			if _, err := io.Copy(io.Discard, q.Body); err != nil {
				break
			}
		}
		if len(asked[0]) > whole {
			t.Fatalf("%q: the Pod is asked %q, answers %q; net/http reads %d requests", b, asked[0], answered, whole)
		}
		for i := range min(len(asked[0]), len(asked[1])) { // net/http drops the first ones when there is garbage behind them
			if asked[0][i] != asked[1][i] && !strings.Contains(asked[1][i], w.at.String()) {
				t.Fatalf("%q: the Pod is asked %q, and by net/http %q", b, asked[0][i], asked[1][i])
			}
		}
	})
}

// A Pod that answers what is no answer costs its request alone: 502, and no other request has that connection.
func TestHostilePods(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	const good = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	for what, c := range map[string]struct {
		answer string
		want   string
	}{
		"both lengths":           {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "502"},
		"two lengths":            {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 20\r\n\r\nok", "502"},
		"another coding":         {"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok", "502"},
		"a folded line":          {"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\nok", "502"},
		"a NUL":                  {"HTTP/1.1 200 OK\r\nA: \x00\r\nContent-Length: 2\r\n\r\nok", "502"},
		"a head without an end":  {"HTTP/1.1 200 OK\r\nA: " + strings.Repeat("x", maxAnswerHeader+1), "502"},
		"a protocol unasked for": {"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "502"},
		"interim ones for ever":  {strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 2*maxInterim), "502"},
		"a bad chunk":            {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\naXX", "502"},
		"a bad trailer":          {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nContent-Length: 1\r\n\r\n", "502"},
		"an answer ahead":        {good + "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong", "200 ok"},
		"a body after HEAD's":    {"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong", "204 "},
	} {
		first := true
		var mu sync.Mutex
		r.set(r.Pod(func(p net.Conn) {
			in := bufio.NewReader(p)
			for {
				if _, err := http.ReadRequest(in); err != nil {
					return
				}
				mu.Lock()
				answer := good
				if first {
					answer = c.answer
				}
				first = false
				mu.Unlock()
				_, _ = io.WriteString(p, answer)
			}
		}))
		for _, want := range []string{c.want, "200 ok"} {
			conn := r.Dial()
			_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
			r.Must(err)
			got, in := "", bufio.NewReader(conn)
			for {
				answer, err := http.ReadResponse(in, nil)
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if answer.StatusCode == http.StatusEarlyHints {
					continue
				}
				body, err := io.ReadAll(answer.Body)
				if got = fmt.Sprint(answer.StatusCode); answer.StatusCode != http.StatusBadGateway {
					got += " " + string(body)
				}
				if err != nil {
					got += " cut"
				}
				break
			}
			if got != want {
				t.Errorf("%s: %q, want %q", what, got, want)
			}
			_ = conn.Close()
		}
	}
}
