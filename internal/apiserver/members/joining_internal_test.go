package members

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	etcderrors "go.etcd.io/etcd/server/v3/etcdserver/errors"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/fairlead/fairlead/internal/testbed"
)

func anyToken(context.Context, string) error { return nil }

// joinServer serves what servers ask that join, with bodies that have to come within timeout. stall sends
// a request without its body, status is that of one with a body that is no request.
func joinServer(t *testing.T, timeout time.Duration, log *slog.Logger) (g *gate, stall func() net.Conn, status func() int) {
	t.Helper()
	a := &API{Options: Options{Log: log}, gate: newGate(timeout), recognise: anyToken}
	s := httptest.NewServer(a.Joining(http.NotFoundHandler()))
	t.Cleanup(s.Close)
	stall = func() net.Conn {
		c, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		fmt.Fprintf(c, "POST %sbundle HTTP/1.1\r\nHost: server\r\nAuthorization: Bearer a\r\nContent-Length: 9\r\n\r\n", JoinPath)
		return c
	}
	status = func() int {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+JoinPath+"bundle", strings.NewReader("no JSON"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer a")
		resp, err := s.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	return a.gate, stall, status
}

// Few who ask to join are served at a time, the others are sent away.
func TestJoiningIsBounded(t *testing.T) {
	g, stall, status := joinServer(t, time.Hour, slog.New(slog.DiscardHandler))
	served := func(n int) {
		t.Helper()
		testbed.Until(t, fmt.Sprintf("%d who are served", n), func() error {
			if len(g.places) != n {
				return fmt.Errorf("%d are", len(g.places))
			}
			return nil
		})
	}
	if got := status(); got != http.StatusBadRequest {
		t.Fatalf("before: %d", got)
	}
	served(0)
	var stalled []net.Conn
	for n := range maxJoining {
		stalled = append(stalled, stall())
		served(n + 1)
	}
	if got := status(); got != http.StatusTooManyRequests {
		t.Errorf("a request too many: %d", got)
	}
	for _, c := range stalled {
		c.Close()
	}
	served(0)
	if got := status(); got != http.StatusBadRequest {
		t.Errorf("after: %d", got)
	}
}

// A body that does not come ends the request; rejections are logged with their address, one a second.
func TestJoiningEndsAndIsLogged(t *testing.T) {
	var lines bytes.Buffer
	_, stall, _ := joinServer(t, 100*time.Millisecond, slog.New(slog.NewTextHandler(&lines, nil)))
	c := stall()
	if err := c.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatalf("a request without its body is not answered: %v", err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest {
		t.Errorf("it is answered with %s", resp.Status)
	}
	if text := lines.String(); !strings.Contains(text, "from="+c.LocalAddr().String()) {
		t.Errorf("the log has %q", text)
	}
	g, now := newGate(time.Second), time.Now()
	for i, x := range []struct {
		after    time.Duration
		unlogged int
		ok       bool
	}{{0, 0, true}, {time.Millisecond, 0, false}, {time.Millisecond, 0, false}, {rejectionLogged, 2, true}, {2 * rejectionLogged, 0, true}} {
		if unlogged, ok := g.mayLog(now.Add(x.after)); unlogged != x.unlogged || ok != x.ok {
			t.Errorf("rejection %d: %d, %v", i, unlogged, ok)
		}
	}
}

// A body that is too long is rejected once that is known.
func TestJoiningBodyIsBounded(t *testing.T) {
	var lines bytes.Buffer
	a := &API{Options: Options{Log: slog.New(slog.NewTextHandler(&lines, nil))}, gate: newGate(time.Minute), recognise: anyToken}
	s := httptest.NewServer(a.Joining(http.NotFoundHandler()))
	t.Cleanup(s.Close)
	for _, step := range []string{"bundle", "add"} {
		ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
		defer cancel()
		body := `{"name":"` + strings.Repeat("a", maxBody) + `"}`
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+JoinPath+step, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer a")
		resp, err := s.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(text), "too large") {
			t.Errorf("%s: %s, %s, %v", step, resp.Status, text, err)
		}
	}
}

// A server that joins is told what it waits for, not etcd's words.
func TestCannotAdd(t *testing.T) {
	for err, want := range map[error]string{
		membership.ErrTooManyLearners: "another server is joining",
		etcderrors.ErrUnhealthy:       "reached each other for 5s",
	} {
		if got := cannotAdd(err); !apierrors.IsServiceUnavailable(got) || !strings.Contains(got.Error(), want) {
			t.Errorf("%v: %v", err, got)
		}
	}
}
