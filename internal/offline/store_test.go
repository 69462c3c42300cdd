package offline

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// line is a way to the server that can be cut.
type line struct {
	next http.RoundTripper
	cut  *atomic.Bool
}

func (l line) RoundTrip(req *http.Request) (*http.Response, error) {
	if l.cut.Load() {
		return nil, syscall.ECONNREFUSED
	}
	return l.next.RoundTrip(req)
}

// connect returns a client whose answers are kept in dir, and each request of which passes through way.
func connect(
	t *testing.T, cfg *rest.Config, dir string, log *slog.Logger, way func(http.RoundTripper) http.RoundTripper, set func(*Store),
) *kubernetes.Clientset {
	t.Helper()
	store, err := Open(dir, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	set(store)
	own := rest.CopyConfig(cfg)
	own.ContentType, own.AcceptContentTypes = protobuf, protobuf
	own.Wrap(way)
	store.Use(own)
	return kubernetes.NewForConfigOrDie(own)
}

// node is what a process on a node knows of Services.
type node struct {
	client   kubernetes.Interface
	stop     func()
	mu       sync.Mutex
	services map[string]string // by name, the version
	replaced int
}

// startNode starts a process whose last known state is in dir.
func startNode(t *testing.T, cfg *rest.Config, dir string, cut *atomic.Bool, log *slog.Logger) *node {
	t.Helper()
	client := connect(t, cfg, dir, log, func(next http.RoundTripper) http.RoundTripper { return line{next, cut} },
		func(s *Store) { s.compact = 4 << 10 })
	n := &node{client: client, services: map[string]string{}}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	n.stop = func() { cancel(); running.Wait() }
	t.Cleanup(n.stop)
	set := func(s *corev1.Service) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.services[s.Name] = s.ResourceVersion
	}
	sink := reflector.Sink[*corev1.Service]{
		Set: set,
		Replace: func(list []*corev1.Service) {
			n.mu.Lock()
			n.services = map[string]string{}
			n.replaced++
			n.mu.Unlock()
			for _, s := range list {
				set(s)
			}
		},
		Delete: func(s *corev1.Service) {
			n.mu.Lock()
			defer n.mu.Unlock()
			delete(n.services, s.Name)
		},
	}
	all := metav1.ListOptions{}
	for range 2 { // as the parts of an agent
		running.Go(func() {
			reflector.Run(reflector.Quiet(ctx), "test", reflector.From(n.client.CoreV1().Services(""), all), sink)
		})
	}
	return n
}

// knows waits until the node knows what the server has.
func (n *node) knows(t *testing.T, server kubernetes.Interface) {
	t.Helper()
	testbed.Until(t, "the node to know what there is", func() error {
		list, err := server.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		want := map[string]string{}
		for _, s := range list.Items {
			want[s.Name] = s.ResourceVersion
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		if !maps.Equal(n.services, want) {
			return fmt.Errorf("%v, want %v", n.services, want)
		}
		return nil
	})
}

// change creates, updates and deletes Services.
func change(t *testing.T, server kubernetes.Interface, round int) {
	t.Helper()
	api := server.CoreV1().Services("default")
	for i := range 12 {
		s, err := api.Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("s%d-%d", round, i)},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
		}, metav1.CreateOptions{})
		if err == nil && i%2 == 0 {
			s.Annotations = map[string]string{"text": strings.Repeat("x", 100)}
			_, err = api.Update(t.Context(), s, metav1.UpdateOptions{})
		}
		if err == nil && i%3 == 0 {
			err = api.Delete(t.Context(), s.Name, metav1.DeleteOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A process that starts without a server has what the one before had last, and goes on from
// there when the server is back, without a new list. Secrets are not on the disk, a damaged
// end costs what it holds, and a damaged list the whole.
func TestLastKnownState(t *testing.T) {
	cfg := process.API(t)
	server := kubernetes.NewForConfigOrDie(cfg)
	dir := filepath.Join(t.TempDir(), "known")
	var cut atomic.Bool
	first := startNode(t, cfg, dir, &cut, slog.New(slog.DiscardHandler))
	change(t, server, 1)
	first.knows(t, server)
	change(t, server, 2)
	first.knows(t, server)
	readFiles(t, server, first.client)
	first.stop()
	cut.Store(true)

	second := startNode(t, cfg, dir, &cut, slog.New(slog.DiscardHandler))
	second.knows(t, server)
	if c, err := second.client.CoreV1().ConfigMaps("default").Get(t.Context(), "c", metav1.GetOptions{}); err != nil || c.Data["k"] != "v" {
		t.Errorf("the ConfigMap: %v, %v", c, err)
	}
	if _, err := second.client.CoreV1().Services("").List(t.Context(), metav1.ListOptions{}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a list of the latest version: %v", err)
	}
	change(t, server, 3)
	cut.Store(false)
	second.knows(t, server)
	second.mu.Lock()
	if second.replaced > 2 {
		t.Errorf("%d lists by two reflectors", second.replaced)
	}
	second.mu.Unlock()
	services := checkFiles(t, dir)
	for round := 4; records(t, services) < 3; round++ { // it was compacted just now
		change(t, server, round)
		second.knows(t, server)
	}
	second.stop()
	damage(t, services)
}

// secretText is in a Secret.
const secretText = "not-for-the-disk"

// readFiles creates a Secret and a ConfigMap and has the node read them as for volumes of files.
func readFiles(t *testing.T, server, node kubernetes.Interface) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": secretText}}
	_, err := server.CoreV1().Secrets("default").Create(t.Context(), secret, metav1.CreateOptions{})
	must(err)
	config := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Data: map[string]string{"k": "v"}}
	_, err = server.CoreV1().ConfigMaps("default").Create(t.Context(), config, metav1.CreateOptions{})
	must(err)
	_, err = node.CoreV1().Secrets("default").Get(t.Context(), "s", metav1.GetOptions{})
	must(err)
	_, err = node.CoreV1().Secrets("default").List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
	must(err)
	_, err = node.CoreV1().ConfigMaps("default").Get(t.Context(), "c", metav1.GetOptions{})
	must(err)
}

// noneOpen waits until no file of a directory is open.
func noneOpen(t *testing.T, dir string) {
	t.Helper()
	testbed.Until(t, "no file to be open", func() error {
		open, err := filepath.Glob("/proc/self/fd/*")
		for _, fd := range open {
			if to, gone := os.Readlink(fd); gone == nil && strings.HasPrefix(to, dir) {
				err = errors.Join(err, errors.New(to+" is open"))
			}
		}
		return err
	})
}

// Whoever may create ConfigMaps and Pods cannot fill the disk of a node, or use up its files: of single objects those
// are kept that were read last.
func TestSingleObjectsAreBounded(t *testing.T) {
	t.Parallel()
	const size, count, room = 10 << 10, 40, 100 << 10
	cfg := process.API(t)
	server := kubernetes.NewForConfigOrDie(cfg)
	dir := filepath.Join(t.TempDir(), "known")
	var cut atomic.Bool
	start := func() *kubernetes.Clientset {
		return connect(t, cfg, dir, slog.New(slog.DiscardHandler),
			func(next http.RoundTripper) http.RoundTripper { return line{next, &cut} }, func(s *Store) { s.room = room })
	}
	get := func(c kubernetes.Interface, i int) error {
		_, err := c.CoreV1().ConfigMaps("default").Get(t.Context(), fmt.Sprint("c", i), metav1.GetOptions{})
		return err
	}
	first := start()
	for i := range count {
		_, err := server.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("c", i)}, Data: map[string]string{"k": strings.Repeat("x", size)},
		}, metav1.CreateOptions{})
		if err = errors.Join(err, get(first, i)); err != nil {
			t.Fatal(err)
		}
		switch i {
		case room / size / 2: // none has been removed
			noneOpen(t, dir)
		case count / 2:
			first = start() // it counts what the one before has left
		}
		entries, err := os.ReadDir(dir)
		if n := len(entries); err != nil || n == 0 || n > room/size {
			t.Fatalf("%d files after %d objects: %v", n, i+1, err)
		}
	}
	cut.Store(true)
	second := start()
	if err := get(second, count-1); err != nil {
		t.Errorf("the last one: %v", err)
	}
	if err := get(second, 0); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the first one, long ago: %v", err)
	}
}

// checkFiles wants files for Services and ConfigMaps alone, that no other user can read, without the
// Secret, and returns the path of the one of Services.
func checkFiles(t *testing.T, dir string) (services string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 2 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil || bytes.Contains(text, []byte(secretText)) {
			t.Errorf("%s holds the Secret, or %v", f, err)
		}
		if bytes.Contains(text, []byte("/api/v1/services?")) {
			services = f
		}
		if info, err := os.Stat(f); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", f, info.Mode(), err)
		}
	}
	return services
}

// damage changes a byte of the last record of a file, then one of its list, and wants no more lost than that.
func damage(t *testing.T, path string) {
	t.Helper()
	flip := func(at func(size int) int) {
		t.Helper()
		text, err := os.ReadFile(path)
		if err == nil {
			text[at(len(text))] ^= 1
			err = os.WriteFile(path, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	_, whole, err := read(path, "/api/v1/services?")
	if err != nil {
		t.Fatal(err)
	}
	flip(func(n int) int { return n - 1 })
	if body, version, err := read(path, "/api/v1/services?"); body == nil || version == 0 || version >= whole || err == nil {
		t.Errorf("with a damaged end: %d bytes, version %d of %d, %v", len(body), version, whole, err)
	}
	flip(func(int) int { return 100 })
	if body, _, err := read(path, "/api/v1/services?"); body != nil || err == nil {
		t.Errorf("with a damaged list: %d bytes, %v", len(body), err)
	}
}

// records returns how many records a file has.
func records(t *testing.T, path string) (n int) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for {
		if _, err := next(f); err != nil {
			return n
		}
		n++
	}
}
