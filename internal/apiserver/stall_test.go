package apiserver_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// Sizes of the test of clients that do not read.
const (
	stallWatches = 60
	stallObjects = 12
	stallSize    = 1_000_000 // bytes of an object
	// stallBound is how much more memory the server may have in use at the end. One
	// watch that is blocked holds 2 MB or more.
	stallBound = 60 << 20
)

// stalled returns the server's count of responses that no client read.
func stalled(t *testing.T, c *kubernetes.Clientset) (n int) {
	t.Helper()
	text, err := c.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if _, err := fmt.Sscanf(line, "fairlead_apiserver_stalled_responses_total %d", &n); err == nil {
			return n
		}
	}
	t.Fatal("no metric of stalled responses")
	return 0
}

// heap returns the memory in use, in bytes.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC() // what the library's pools keep is free after two
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Clients that watch and do not read cost the server no memory for long, and those that
// read are served meanwhile. It measures the memory of the process, in which no other test runs beside it.
func TestStalledWatchesEnd(t *testing.T) {
	cfg := apiservertest.Start(t, func(o *apiserver.Options) { o.StallTimeout = 2 * time.Second })
	c := kubernetes.NewForConfigOrDie(cfg)
	for i := range stallObjects {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("big-", i)},
			Data: map[string]string{"x": strings.Repeat("x", stallSize)}}
		if _, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), m, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	w, err := c.CoreV1().ConfigMaps("kube-public").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	u, err := url.Parse(cfg.Host)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(cfg.CAData)
	before, ended := heap(), stalled(t, c)
	for range stallWatches {
		conn, err := tls.Dial("tcp", u.Host, &tls.Config{RootCAs: roots, ServerName: cfg.ServerName})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "GET /api/v1/namespaces/default/configmaps?watch=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n",
			cfg.BearerToken)
	}
	eventually(t, "all watches are ended", func() bool { return stalled(t, c) >= ended+stallWatches })
	eventually(t, "their memory is free", func() bool { return heap() < before+stallBound })

	if _, err := c.CoreV1().ConfigMaps("kube-public").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "seen"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok {
				t.Fatal("the watch that reads has ended")
			}
			if m, ok := e.Object.(*corev1.ConfigMap); ok && m.Name == "seen" {
				return
			}
		case <-time.After(waitTimeout):
			t.Fatal("the watch that reads sees nothing")
		}
	}
}

// gatedConn is a connection from which nothing is read while the gate is closed.
type gatedConn struct {
	net.Conn
	gate *sync.RWMutex
}

// Read reads when the gate is open.
func (c gatedConn) Read(p []byte) (int, error) {
	c.gate.RLock()
	defer c.gate.RUnlock()
	return c.Conn.Read(p)
}

// The same with HTTP/2, where a stream is ended alone if only that is not read, and with
// the connection if nothing is.
func TestStalledStreamsEnd(t *testing.T) {
	t.Parallel()
	var log logBuffer // of this server; the metric is of the process
	cfg := apiservertest.Start(t, func(o *apiserver.Options) {
		o.StallTimeout, o.Log = 2*time.Second, slog.New(slog.NewTextHandler(&log, nil))
	})
	stalled := func() int { return strings.Count(log.String(), "a client does not read") }
	c := kubernetes.NewForConfigOrDie(cfg)
	for i := range stallObjects {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("big-", i)},
			Data: map[string]string{"x": strings.Repeat("x", stallSize)}}
		if _, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), m, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for name, closed := range map[string]bool{"stream": false, "connection": true} {
		t.Run(name, func(t *testing.T) {
			var gate sync.RWMutex
			own := rest.CopyConfig(cfg)
			own.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
				return gatedConn{conn, &gate}, err
			}
			client, err := rest.HTTPClientFor(own)
			if err != nil {
				t.Fatal(err)
			}
			defer client.CloseIdleConnections()
			ended := stalled()
			r, err := client.Get(cfg.Host + "/api/v1/namespaces/default/configmaps?watch=1")
			if err != nil {
				t.Fatal(err)
			}
			defer r.Body.Close()
			if r.ProtoMajor != 2 || r.StatusCode != http.StatusOK {
				t.Fatalf("%s %s", r.Proto, r.Status)
			}
			if closed {
				gate.Lock()
			}
			eventually(t, "the watch is ended", func() bool { return stalled() > ended })
			eventually(t, "nothing waits to be sent", func() bool {
				var all strings.Builder
				_ = pprof.Lookup("goroutine").WriteTo(&all, 1)
				return !strings.Contains(all.String(), "writeDataFromHandler")
			})
			if closed {
				gate.Unlock()
			}
			done := make(chan error, 1)
			go func() {
				_, err := io.Copy(io.Discard, r.Body)
				done <- err
			}()
			select {
			case err := <-done:
				if err == nil {
					t.Error("the watch ended without an error")
				}
			case <-time.After(waitTimeout):
				t.Error("the watch goes on")
			}
		})
	}
}
