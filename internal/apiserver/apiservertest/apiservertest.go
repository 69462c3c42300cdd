// Package apiservertest starts a real API server, with its etcd, for the tests
// of other rooms. Only test files may import it.
package apiservertest

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/fairlead/fairlead/internal/apiserver"
)

// startTimeout bounds the start; it takes about half a second on an idle
// machine.
const startTimeout = 60 * time.Second

// manyNodes is how many nodes may join a test's server by its own token, as tests join one for each thing they try.
const manyNodes = 100

// Start runs a server on a free port of loopback until the test ends and
// returns the configuration of an all-powerful client. Its data lies in a
// temporary directory and is not synced to disk. Each of change may alter the
// options before the start.
func Start(t testing.TB, change ...func(*apiserver.Options)) *rest.Config {
	t.Helper()
	cfg := StartServer(t, change...).LoopbackConfig()
	if err := rest.LoadTLSFiles(cfg); err != nil { // for processes that do not read the server's files
		t.Fatal(err)
	}
	return cfg
}

// StartServer is Start for tests that need the server itself.
func StartServer(t testing.TB, change ...func(*apiserver.Options)) *apiserver.Server {
	t.Helper()
	s, stop := StartStoppable(t, change...)
	t.Cleanup(stop)
	return s
}

// StartStoppable is StartServer for tests that stop the server themselves.
// stop may be called more than once.
func StartStoppable(t testing.TB, change ...func(*apiserver.Options)) (s *apiserver.Server, stop func()) {
	t.Helper()
	quiet()
	o := apiserver.Options{
		DataDir:       t.TempDir(),
		BindAddresses: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
		UnsafeNoFsync: true, NodeTokenNodes: manyNodes,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	}
	for _, f := range change {
		f(&o)
	}
	s, err := apiserver.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the API server failed: %v", err)
		}
	}
	select {
	case <-s.Ready():
	case err := <-done:
		cancel()
		t.Fatalf("the API server did not start: %v", err)
	case <-time.After(startTimeout):
		cancel()
		err := <-done
		t.Fatalf("the API server was not ready after %s; it ended with %v", startTimeout, err)
	}
	return s, stop
}

// quiet keeps the libraries' messages out of a test's output. Their logger
// belongs to the process and may be set only once while it is used.
var quiet = sync.OnceFunc(func() { klog.SetSlogLogger(slog.New(slog.DiscardHandler)) })
