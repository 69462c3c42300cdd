package web

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/textproto"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// curl speaks HTTP/1.0, 1.1 and 2 to the listener; a Pod gets the address of the client, and by which protocol and port it asks
// (behaviours 116 to 118).
func TestHTTPWithCurl(t *testing.T) {
	for _, scheme := range []string{"http", "https"} {
		r := newRig(t, map[string]string{dialect.LBTLSSecrets: "a", lbProtocol: scheme})
		cert, certPEM, _ := lbtest.Certificate(t, "a.example.com")
		ca := filepath.Join(t.TempDir(), "ca")
		r.Must(os.WriteFile(ca, certPEM, 0o600))
		r.service.Certificates = []tls.Certificate{cert}
		r.set(r.Web(lbtest.Tell))
		port := fmt.Sprint(r.At.Port())
		for args, version := range map[string]string{"--http1.0": "1", "--http1.1": "1.1", "--http2": "2"} {
			hop := ""
			if version == "2" { // which has no Connection
				hop = "1"
			}
			if scheme == "http" && args == "--http2" {
				args = "--http2-prior-knowledge"
			}
			cmd := exec.CommandContext(t.Context(), "curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "30", "--cacert", ca,
				args, "--connect-to", "a.example.com:"+port+":"+r.At.String(), "--data", "x=1",
				"-H", "X-Forwarded-For: 192.0.2.9", "-H", "X-Forwarded-Proto: gopher", "-H", "Forwarded: for=192.0.2.9",
				"-H", "Connection: x-hop", "-H", "X-Hop: 1", "--write-out", " %{http_version} %{http_code}",
				scheme+"://a.example.com:"+port+"/a%2fb?q=1;2&c=%zz")
			out, err := cmd.CombinedOutput()
			want := fmt.Sprintf("POST a.example.com:%s /a%%2fb?q=1;2&c=%%zz for=192.0.2.9, 127.0.0.1 "+
				"proto=%s port=%s forwarded=%q hop=%q body=x=1 %s 200", port, scheme, port, "", hop, version)
			if err != nil || string(out) != want {
				t.Errorf("%s %s: %v\n%s\nwant\n%s", scheme, args, err, out, want)
			}
		}
	}
}

// Bodies are not held back, either way; trailers, Early Hints and 100 Continue pass.
func TestHTTPStreams(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.Header().Set("Link", "</a.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Set("Trailer", "X-Sum")
		in := bufio.NewScanner(q.Body)
		for in.Scan() {
			_, _ = fmt.Fprintf(w, "<%s>\n", in.Text())
			_ = http.NewResponseController(w).Flush()
		}
		w.Header().Set("X-Sum", "all of "+q.Trailer.Get("X-Sent"))
	}))
	body, feed := io.Pipe()
	hints := 0
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
		if code == http.StatusEarlyHints {
			hints++
		}
		return nil
	}})
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://web/", body)
	r.Must(err)
	q.Trailer = http.Header{"X-Sent": nil}
	go func() { _, _ = io.WriteString(feed, "one\n") }()
	answer, err := r.Client().Do(q)
	r.Must(err)
	defer answer.Body.Close()
	in := bufio.NewReader(answer.Body)
	for _, next := range []string{"two", "three", ""} {
		line, err := in.ReadString('\n')
		if err != nil || line == "" || line[0] != '<' {
			t.Fatalf("%q, %v", line, err)
		}
		if next != "" {
			_, err = io.WriteString(feed, next+"\n")
			r.Must(err)
		}
	}
	q.Trailer.Set("X-Sent", "three")
	r.Must(feed.Close())
	if _, err := io.ReadAll(in); err != nil || answer.Trailer.Get("X-Sum") != "all of three" || hints != 1 {
		t.Errorf("%v, trailers %v, %d hints", err, answer.Trailer, hints)
	}
	c := r.Dial()
	_, err = io.WriteString(c, "POST / HTTP/1.1\r\nHost: web\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
	r.Must(err)
	lines := bufio.NewReader(c)
	for line := ""; !strings.HasPrefix(line, "HTTP/1.1 100"); {
		if line, err = lines.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	_, err = io.WriteString(c, "four")
	r.Must(err)
	for line := ""; !strings.HasPrefix(line, "<four>"); {
		if line, err = lines.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
}

// A WebSocket goes through; a request for another protocol does not, and what follows one that a Pod
// refuses is not taken for a request.
func TestUpgrade(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	asked := make(chan string, 10)
	r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
		asked <- q.RequestURI + " " + q.Header.Get("Upgrade")
		if q.Header.Get("Upgrade") == "" || q.URL.Path == "/refused" {
			_, _ = io.WriteString(w, "no")
			return
		}
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		lbtest.Named("pod")(c)
	}))
	ask := func(path, protocol string) (net.Conn, *bufio.Reader, *http.Response) {
		t.Helper()
		c := r.Dial()
		_, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: web\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", path, protocol)
		r.Must(err)
		in := bufio.NewReader(c)
		answer, err := http.ReadResponse(in, nil)
		r.Must(err)
		return c, in, answer
	}
	c, in, answer := ask("/", "websocket")
	if answer.StatusCode != http.StatusSwitchingProtocols || <-asked != "/ websocket" {
		t.Fatalf("%v", answer)
	}
	for _, s := range []string{"\x00\x01", "GET / HTTP/1.1", "x"} { // anything goes
		_, err := io.WriteString(c, s+"\n")
		r.Must(err)
		if got, err := in.ReadString('\n'); got != "pod "+s+"\n" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	}
	for path, protocol := range map[string]string{"/refused": "websocket", "/h2c": "h2c"} {
		c, in, answer = ask(path, protocol)
		if answer.StatusCode != http.StatusOK || !answer.Close {
			t.Errorf("%s: %v", path, answer)
		}
		if got := <-asked; got != path+" "+map[string]string{"/refused": "websocket"}[path] {
			t.Errorf("asked for %s", got)
		}
		_, _ = io.WriteString(c, "GET /smuggled HTTP/1.1\r\nHost: web\r\n\r\n")
		if rest, _ := io.ReadAll(in); string(rest) != "no" {
			t.Errorf("%s: %q", path, rest)
		}
	}
	if len(asked) > 0 {
		t.Errorf("the Pod was asked for %s", <-asked)
	}
}

// A gRPC client reaches gRPC servers by HTTP/2 on both sides, with TLS and without.
func TestGRPC(t *testing.T) {
	for _, protocol := range []string{"http", "https"} {
		r := newRig(t, map[string]string{dialect.LBTLSSecrets: "a", lbProtocol: protocol, lbBackend: "h2c"})
		cert, _, _ := lbtest.Certificate(t, "a.example.com")
		r.service.Certificates = []tls.Certificate{cert}
		l := r.Listener()
		server, service := grpc.NewServer(), health.NewServer()
		grpc_health_v1.RegisterHealthServer(server, service)
		go func() { _ = server.Serve(l) }()
		t.Cleanup(server.Stop)
		r.set(netip.MustParseAddrPort(l.Addr().String()))
		security := insecure.NewCredentials()
		if protocol == "https" {
			security = credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
		}
		conn, err := grpc.NewClient("passthrough:///"+r.At.String(), grpc.WithTransportCredentials(security), grpc.WithNoProxy())
		r.Must(err)
		t.Cleanup(func() { _ = conn.Close() })
		client := grpc_health_v1.NewHealthClient(conn)
		ctx, cancel := context.WithTimeout(t.Context(), lbtest.Patience)
		t.Cleanup(cancel)
		got, err := client.Check(ctx, &grpc_health_v1.HealthCheckRequest{})
		if err != nil || got.Status != grpc_health_v1.HealthCheckResponse_SERVING {
			t.Errorf("%s: %v, %v", protocol, got, err)
		}
		if _, err := client.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: "x"}); !strings.Contains(fmt.Sprint(err), "NotFound") {
			t.Errorf("%s: the status in trailers is lost: %v", protocol, err) //nolint:misspell // it is
		}
		stream, err := client.Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
		r.Must(err)
		for _, want := range []grpc_health_v1.HealthCheckResponse_ServingStatus{1, 2} {
			if got, err := stream.Recv(); err != nil || got.Status != want {
				t.Fatalf("%s: %v, %v", protocol, got, err)
			}
			service.SetServingStatus("", 2)
		}
	}
}

// What fails has a clear status, and the next request goes on.
func TestHTTPFailures(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	status := func(method, path string, header http.Header) int {
		t.Helper()
		q, err := http.NewRequestWithContext(t.Context(), method, "http://web"+path, nil)
		r.Must(err)
		q.Header = header
		answer, err := r.Client().Do(q)
		if err != nil {
			t.Errorf("%s %s: %v", method, path, err)
			return 0
		}
		_ = answer.Body.Close()
		return answer.StatusCode
	}
	want := func(what string, got, want int) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %d, want %d", what, got, want)
		}
	}
	r.set()
	want("no Pod", status("GET", "/", nil), 503)
	dead := r.Free()
	r.set(dead)
	want("a dead Pod", status("GET", "/", nil), 502)
	var served atomic.Int32
	alive := r.Web(func(w http.ResponseWriter, q *http.Request) { served.Add(1); lbtest.Tell(w, q) })
	r.set(dead, alive)
	for range 6 {
		want("a dead Pod beside another one", status("POST", "/", nil), 200)
	}
	want("requests served once each", int(served.Load()), 6)
	usual := r.service.Spec.RequestTimeout
	r.service.Spec.RequestTimeout = dialect.Duration(time.Second)
	r.set(r.Pod(func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }))
	want("a silent Pod", status("GET", "/", nil), 504)
	r.service.Spec.RequestTimeout = usual
	r.set(r.Pod(func(c net.Conn) { _, _ = io.WriteString(c, "HTTP/1.1 abc\r\n\r\n") }))
	want("a Pod that speaks something else", status("GET", "/", nil), 502)
	r.set(alive)
	want("a bomb of fields", status("GET", "/", http.Header{"X": {strings.Repeat("x", 2*maxHeader)}}), 431)
	want("a bomb of a path", status("GET", "/"+strings.Repeat("x", 2*maxHeader), nil), 431)
	c := r.Dial()
	_, err := io.WriteString(c, "CONNECT 192.0.2.1:22 HTTP/1.1\r\nHost: web\r\n\r\n")
	r.Must(err)
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	r.Must(err)
	want("CONNECT", answer.StatusCode, 405)
	want("at the end", status("GET", "/", nil), 200)
	leaving := func(gone bool) { // for a moment a Pod is chosen that has left: no call can hold a Pool there
		member := reflect.ValueOf(r.config.Pool).Elem().FieldByName("members").Index(0).Elem()
		*(*bool)(member.FieldByName("gone").Addr().UnsafePointer()) = gone
	}
	leaving(true)
	want("a Pod that leaves as it is chosen", status("GET", "/", nil), 503)
	leaving(false)
}

// A kept connection has no more rights than a new one: the ranges of now count, and it does not pass on to
// the Service that has the address next.
func TestKeptConnectionsAreChecked(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	var asked atomic.Int32
	pod := r.Web(func(http.ResponseWriter, *http.Request) { asked.Add(1) })
	for _, c := range []struct {
		change func()
		status int
	}{
		{func() { r.service.Spec.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")} }, http.StatusForbidden},
		{func() { r.service.Name.Name = "other" }, http.StatusMisdirectedRequest},
		{func() { r.service.Name.Name = "tcp"; r.ask(nil) }, http.StatusMisdirectedRequest},
	} {
		r.ask(map[string]string{lbProtocol: "http"})
		r.set(pod)
		conn := r.Dial()
		in := bufio.NewReader(conn)
		for _, want := range []int{http.StatusOK, c.status} {
			_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: web\r\n\r\n")
			r.Must(err)
			answer, err := http.ReadResponse(in, nil)
			r.Must(err)
			_, _ = io.Copy(io.Discard, answer.Body)
			if answer.StatusCode != want || answer.Close != (want != http.StatusOK) {
				t.Errorf("%d, closed: %t; want %d", answer.StatusCode, answer.Close, want)
			}
			c.change()
			r.set(pod)
		}
		if n := asked.Swap(0); n != 1 {
			t.Errorf("%d requests reach a Pod, want 1", n)
		}
	}
}

// A client that sends its header byte by byte, or nothing at all, is not waited for; others are served.
func TestSlowClients(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-idle-timeout": "3600"})
	r.headerTimeout = 300 * time.Millisecond
	r.set(r.Web(lbtest.Tell))
	slow, silent := r.Dial(), r.Dial()
	ended := make(chan error, 2)
	go func() {
		for {
			if _, err := io.WriteString(slow, "G"); err != nil {
				ended <- err
				return
			}
			<-time.After(10 * time.Millisecond)
		}
	}()
	go func() {
		_, err := io.ReadAll(silent)
		ended <- err
	}()
	for deadline := time.Now().Add(lbtest.Patience); ; { // the machine may be slower than the limit
		answer, err := r.Client().Get("http://web/")
		if err == nil {
			_ = answer.Body.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := <-ended; errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("a slow client is waited for")
		}
	}
}

// A head that does not end in time is answered 408, also that of a later request; a connection without a byte just ends.
func TestUnfinishedHeads(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.headerTimeout = time.Second
	r.set(r.Web(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	const whole = "GET / HTTP/1.1\r\nHost: web\r\n\r\n"
	wants := map[string][]string{"": nil, "GET / HTTP/1.1\r\nHost: ": {"408"}, whole + "GET /": {"204", "408"}}
	conns := map[string]net.Conn{}
	for text := range wants { // all of them at once: each takes the time-out
		conns[text] = r.Dial()
		_, err := io.WriteString(conns[text], text)
		r.Must(err)
	}
	for text, want := range wants {
		all, err := io.ReadAll(conns[text])
		var got []string
		for line := range strings.Lines(string(all)) {
			if strings.HasPrefix(line, "HTTP/1.") {
				got = append(got, strings.Fields(line)[1])
			}
		}
		if !slices.Equal(got, want) || err != nil {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

// Requests go on during changes, those in flight at a Pod that leaves for the time-out, and those of a kept
// connection go to the Pods of now (behaviours 126, 127).
func TestHTTPDraining(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-drain-timeout": "600"})
	release, begun := make(chan struct{}), make(chan struct{})
	a := r.Web(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/slow" {
			close(begun)
			<-release
		}
		_, _ = io.WriteString(w, "a")
	})
	b := r.Web(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "b") })
	r.set(a)
	client := r.Client()
	get := func(path string) string {
		answer, err := client.Get("http://web" + path)
		if err != nil {
			return err.Error()
		}
		defer answer.Body.Close()
		text, _ := io.ReadAll(answer.Body)
		return string(text)
	}
	slow := make(chan string)
	go func() { slow <- get("/slow") }()
	<-begun
	if got := get("/"); got != "a" {
		t.Errorf("before: %q", got)
	}
	r.set(b)
	for range 3 {
		if got := get("/"); got != "b" {
			t.Errorf("afterwards: %q", got)
		}
	}
	close(release)
	if got := <-slow; got != "a" {
		t.Errorf("the request in flight: %q", got)
	}
	// The end waits for requests, and not for connections.
	begun, release = make(chan struct{}), make(chan struct{})
	r.set(a)
	go func() { slow <- get("/slow") }()
	<-begun
	done := make(chan struct{})
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), lbtest.Patience)
		defer cancel()
		r.server.Close(ctx)
		close(done)
	}()
	for len(r.server.Listening()) > 0 {
		<-time.After(time.Millisecond)
	}
	close(release)
	if got := <-slow; got != "a" {
		t.Errorf("the request in flight at the end: %q", got)
	}
	<-done
}
