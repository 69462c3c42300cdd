package offline

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// laggard lets nothing of the first watch of Services pass until it is closed.
type laggard struct {
	next http.RoundTripper
	has  *atomic.Bool
}

func (l laggard) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := l.next.RoundTrip(req)
	if err == nil && strings.HasSuffix(req.URL.Path, "/services") && req.URL.Query().Get("watch") != "" && l.has.CompareAndSwap(false, true) {
		ctx, cancel := context.WithCancel(req.Context())
		resp.Body = held{resp.Body, ctx, cancel}
	}
	return resp, err
}

// held is a body of which nothing can be read.
type held struct {
	io.ReadCloser
	ctx    context.Context //nolint:containedctx // of the request
	cancel func()
}

func (h held) Read([]byte) (int, error) { <-h.ctx.Done(); return 0, io.EOF }

func (h held) Close() error { h.cancel(); return h.ReadCloser.Close() }

// awaits waits until it is true.
func awaits(t *testing.T, what string, it *atomic.Bool) {
	t.Helper()
	testbed.Until(t, what, func() error {
		if !it.Load() {
			return errors.New("there is none")
		}
		return nil
	})
}

// keeps checks that a node that starts without the server has what the server has, from dir.
func keeps(t *testing.T, cfg *rest.Config, dir string) {
	t.Helper()
	var cut atomic.Bool
	cut.Store(true)
	startNode(t, cfg, dir, &cut, slog.New(slog.DiscardHandler)).knows(t, kubernetes.NewForConfigOrDie(cfg))
}

// Of several clients that watch the same on a node one may lag behind: the disk has what any of them knows.
func TestStateOfSeveralWatches(t *testing.T) {
	t.Parallel()
	cfg := process.API(t)
	server := kubernetes.NewForConfigOrDie(cfg)
	dir := filepath.Join(t.TempDir(), "known")
	var cut, lags atomic.Bool
	slow := rest.CopyConfig(cfg)
	slow.Wrap(func(next http.RoundTripper) http.RoundTripper { return laggard{next, &lags} })
	first := startNode(t, slow, dir, &cut, slog.New(slog.DiscardHandler))
	first.knows(t, server)
	awaits(t, "a watch that lags", &lags)
	change(t, server, 1)
	first.knows(t, server)
	first.stop()
	keeps(t, cfg, dir)
}

// direct is connect without reflectors.
func direct(t *testing.T, cfg *rest.Config, dir string, way func(http.RoundTripper) http.RoundTripper) *kubernetes.Clientset {
	t.Helper()
	return connect(t, cfg, dir, slog.New(slog.DiscardHandler), way, func(*Store) {})
}

// follow watches Services from a list on, and returns a function that reads until a version has come.
func follow(t *testing.T, list *corev1.ServiceList, client kubernetes.Interface) func(version string) {
	t.Helper()
	w, err := client.CoreV1().Services("").Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
	return func(version string) {
		t.Helper()
		for deadline := time.After(time.Minute); ; {
			select {
			case e := <-w.ResultChan():
				if s, ok := e.Object.(*corev1.Service); ok && s.ResourceVersion == version {
					return
				}
			case <-deadline:
				t.Fatalf("no event of version %s", version)
			}
		}
	}
}

func listed(t *testing.T, client kubernetes.Interface) *corev1.ServiceList {
	t.Helper()
	list, err := client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// last returns the version of the Service that was changed last.
func last(t *testing.T, list *corev1.ServiceList) string {
	t.Helper()
	return slices.MaxFunc(list.Items, func(a, b corev1.Service) int {
		n, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}).ResourceVersion
}

// A client that lists later than another one has begun to watch may be ahead of it: the disk has what the second knows.
func TestStateOfLaterList(t *testing.T) {
	t.Parallel()
	cfg := process.API(t)
	server := kubernetes.NewForConfigOrDie(cfg)
	dir := filepath.Join(t.TempDir(), "known")
	var lags atomic.Bool
	client := direct(t, cfg, dir, func(next http.RoundTripper) http.RoundTripper { return laggard{next, &lags} })
	follow(t, listed(t, client), client)
	change(t, server, 1)
	reaches := follow(t, listed(t, client), client)
	change(t, server, 2)
	reaches(last(t, listed(t, server)))
	keeps(t, cfg, dir)
}

// detained lets the answer of the first list pass only when free is closed.
type detained struct {
	next  http.RoundTripper
	first *atomic.Bool
	free  <-chan struct{}
}

func (d detained) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := d.next.RoundTrip(req)
	if req.URL.Query().Get("watch") == "" && d.first.CompareAndSwap(false, true) {
		<-d.free
	}
	return resp, err
}

// The answer of a list that comes after that of a newer one does not take its place.
func TestStateOfOlderList(t *testing.T) {
	t.Parallel()
	cfg := process.API(t)
	server := kubernetes.NewForConfigOrDie(cfg)
	dir := filepath.Join(t.TempDir(), "known")
	var first atomic.Bool
	free, older := make(chan struct{}), make(chan struct{})
	client := direct(t, cfg, dir, func(next http.RoundTripper) http.RoundTripper { return detained{next, &first, free} })
	go func() {
		defer close(older)
		if _, err := client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{}); err != nil {
			t.Error(err)
		}
	}()
	awaits(t, "an answer of the first list", &first)
	change(t, server, 1)
	newer := listed(t, client)
	close(free)
	<-older
	reaches := follow(t, newer, client)
	change(t, server, 2)
	reaches(last(t, listed(t, server)))
	keeps(t, cfg, dir)
}
