package probe

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/testbed"
)

// most is what a probe may allocate, whatever the server does, and longest the text of its
// error.
const most, longest = 4 << 20, 2 << 10

// endless yields one piece of text forever.
type endless string

func (e endless) WriteTo(w io.Writer) (int64, error) {
	text := []byte(e)
	for n := int64(0); ; n += int64(len(text)) {
		if _, err := w.Write(text); err != nil {
			return n, err
		}
	}
}

// What the server in a Pod does costs the agent the time of the probe at most, and little
// memory.
func TestHostileServers(t *testing.T) {
	line := strings.Repeat("x", 4000)
	then := func(begin, text string) func(net.Conn, *bufio.Reader) {
		return func(c net.Conn, _ *bufio.Reader) {
			write(c, begin)
			_, _ = endless(text).WriteTo(c)
		}
	}
	silent := func(begin string) func(net.Conn, *bufio.Reader) {
		return func(c net.Conn, r *bufio.Reader) {
			write(c, begin)
			_, _ = r.ReadByte()
		}
	}
	for name, c := range map[string]struct {
		serve func(c net.Conn, r *bufio.Reader)
		ok    bool
	}{
		"endless body":        {then("HTTP/1.1 200 OK\r\n\r\n", line), true},
		"endless failure":     {then("HTTP/1.1 500 No\r\n\r\n", line), false},
		"endless chunk":       {then("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "0"), false},
		"endless header":      {then("HTTP/1.1 200 OK\r\nX: ", line), false},
		"endless headers":     {then("HTTP/1.1 200 OK\r\n", "X: "+line+"\r\n"), false},
		"endless 103":         {then("", "HTTP/1.1 103 Early\r\nX: y\r\n\r\n"), false},
		"endless status line": {then("HTTP/1.1 500 ", line), false},
		"endless redirects": {func(c net.Conn, _ *bufio.Reader) {
			write(c, fmt.Sprintf("HTTP/1.1 302 On\r\nLocation: http://%s/on\r\nContent-Length: 0\r\n\r\n", c.LocalAddr()))
		}, false},
		"garbage":        {then("", "\x00\xff\n"), false},
		"nothing":        {silent(""), false},
		"half a header":  {silent("HTTP/1.1 200 OK\r\nX: "), false},
		"half a body":    {silent("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"), false},
		"closes at once": {func(net.Conn, *bufio.Reader) {}, false},
	} {
		t.Run(name, func(t *testing.T) {
			port := listen(t, func(conn net.Conn) {
				r := bufio.NewReader(conn)
				if _, err := http.ReadRequest(r); err == nil {
					c.serve(conn, r)
				}
			})
			bounded(t, c.ok, corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(port)}})
		})
	}
	for name, serve := range map[string]func(net.Conn){
		"garbage":                func(c net.Conn) { _, _ = endless("\x00\xff").WriteTo(c) },
		"settings and no answer": func(c net.Conn) { write(c, "\x00\x00\x00\x04\x00\x00\x00\x00\x00"); _, _ = io.Copy(io.Discard, c) },
	} {
		t.Run("gRPC: "+name, func(t *testing.T) {
			bounded(t, false, corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: listen(t, serve)}})
		})
	}
	t.Run("gRPC: a long reason", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		grpc_health_v1.RegisterHealthServer(s, unkind{reason: strings.Repeat("no ", 50<<10)})
		go func() { _ = s.Serve(l) }() // ends with Stop
		defer s.Stop()
		bounded(t, false, corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: int32(l.Addr().(*net.TCPAddr).Port)}})
	})
}

func write(c net.Conn, text string) { _, _ = io.WriteString(c, text) }

// listen serves connections until the end of the test.
func listen(t *testing.T, serve func(net.Conn)) int32 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	testbed.Serve(t, l, serve)
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// bounded probes with a time-out of a fifth of a second.
func bounded(t *testing.T, ok bool, h corev1.ProbeHandler) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if ok { // it is not the time that ends it
		ctx = t.Context()
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := Target{IP: netip.MustParseAddr("127.0.0.1")}.Once(ctx, h)
	runtime.ReadMemStats(&after)
	if (err == nil) != ok {
		t.Errorf("%v, want yes: %v", err, ok)
	}
	if err != nil && len(err.Error()) > longest {
		t.Errorf("an error of %d bytes", len(err.Error()))
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > most {
		t.Errorf("the probe took %d KB of memory", n>>10)
	}
}

// unkind answers with too much.
type unkind struct {
	grpc_health_v1.UnimplementedHealthServer
	reason string
}

func (u unkind) Check(context.Context, *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	return nil, status.Error(codes.Unavailable, u.reason)
}
