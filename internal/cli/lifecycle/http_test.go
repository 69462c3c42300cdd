package lifecycle

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// firstWrite passes on the first of what is written.
type firstWrite chan string

func (f firstWrite) Write(p []byte) (int, error) {
	select {
	case f <- string(p):
	default:
	}
	return len(p), nil
}

// A metrics port that is in use ends nothing: it is served once the port is free.
func TestOptionalHTTP(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	logged := make(firstWrite, 1)
	c := OptionalHTTP(slog.New(slog.NewTextHandler(logged, nil)), "metrics", taken.Addr().String(), http.NotFoundHandler())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	select {
	case line := <-logged:
		if !strings.Contains(line, "in use") || !strings.Contains(line, "retrying") {
			t.Errorf("logged %q", line)
		}
	case err := <-done:
		t.Fatalf("ended: %v", err)
	}
	taken.Close()
	var got error
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); <-tick.C {
		var r *http.Response
		if r, got = http.Get("http://" + taken.Addr().String()); got == nil {
			r.Body.Close()
			break
		}
	}
	cancel()
	if err := <-done; err != nil || got != nil {
		t.Errorf("run: %v, get: %v", err, got)
	}
}
