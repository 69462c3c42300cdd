package apiserver_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// watcher begins watches that are not read, over connections of its own.
type watcher struct {
	*testing.T
	host, token string
	tls         *tls.Config
}

const watchPath = "/api/v1/namespaces/default/configmaps?watch=1"

// begin returns the status of a watch with further headers, over HTTP/1.1. The kernel takes what is not read.
func (w watcher) begin(headers map[string]string) int {
	w.Helper()
	conn, err := tls.Dial("tcp", w.host, w.tls)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n", watchPath, w.token)
	for k, v := range headers {
		fmt.Fprintf(conn, "%s: %s\r\n", k, v)
	}
	fmt.Fprint(conn, "\r\n")
	r, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), nil)
	if err != nil {
		w.Fatal(err)
	}
	return r.StatusCode
}

// streams begins watches as streams of one HTTP/2 connection, whose window is 64 KB: what is not read waits in the server.
// It goes on until one is not accepted, or there are enough, and returns how many were, the other status, and what ends the
// connection.
func (w watcher) streams(enough int, headers map[string]string) (begun int, status string, end func()) {
	w.Helper()
	cfg := w.tls.Clone()
	cfg.NextProtos = []string{"h2"}
	conn, err := tls.Dial("tcp", w.host, cfg)
	if err != nil {
		w.Fatal(err)
	}
	_, _ = io.WriteString(conn, http2.ClientPreface)
	f := http2.NewFramer(conn, conn)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	if err := f.WriteSettings(); err != nil {
		w.Fatal(err)
	}
	for ; begun < enough; begun++ {
		block.Reset()
		for _, h := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "x"}, {":path", watchPath},
			{"authorization", "Bearer " + w.token}} {
			_ = encoder.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
		}
		for k, v := range headers {
			_ = encoder.WriteField(hpack.HeaderField{Name: strings.ToLower(k), Value: v})
		}
		id := uint32(2*begun + 1)
		h := http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndStream: true, EndHeaders: true}
		if err := f.WriteHeaders(h); err != nil {
			w.Fatal(err)
		}
		if status = w.statusOf(f, id); status != "200" {
			break
		}
	}
	return begun, status, func() { conn.Close() }
}

// statusOf reads until a stream has its status.
func (w watcher) statusOf(f *http2.Framer, id uint32) string {
	w.Helper()
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			w.Fatal(err)
		}
		switch h := frame.(type) {
		case *http2.MetaHeadersFrame:
			if h.StreamID == id {
				return h.PseudoValue("status")
			}
		case *http2.SettingsFrame:
			if !h.IsAck() {
				_ = f.WriteSettingsAck()
			}
		}
	}
}

// A user whose watches are not read gets no further ones when 32 MiB wait, long before the time in which they end. The
// number of watches of a user is limited, too. Both are 429, and others watch on. It measures the memory of the process, in which no
// other test runs beside it.
func TestWatchesOfAUserAreBounded(t *testing.T) {
	const limit = 90
	cfg := apiservertest.Start(t, func(o *apiserver.Options) { o.MaxWatchesPerUser = limit })
	c := kubernetes.NewForConfigOrDie(cfg)
	_ = tenant(t, cfg)
	if _, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), large("big", 1), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(cfg.Host)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(cfg.CAData)
	w := watcher{t, u.Host, cfg.BearerToken, &tls.Config{RootCAs: roots, ServerName: cfg.ServerName}}
	asTenant := map[string]string{"Impersonate-User": "tenant", "Impersonate-Group": "system:authenticated"}
	before := heap()
	begun, status, end := w.streams(limit, asTenant)
	if grown := heap() - before; status != "429" || begun < 20 || grown > 200<<20 {
		t.Errorf("%d watches were begun, the last with status %s, with %d MiB", begun, status, grown>>20)
	} else {
		t.Logf("%d watches of 1 MB were begun, with %d MiB", begun, grown>>20)
	}
	others, err := c.CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Errorf("another user: %v", err)
	} else {
		others.Stop()
	}
	end()
	eventually(t, "a watch after the end of the others", func() bool { return w.begin(asTenant) == http.StatusOK })
	begun = 1
	for ; begun < 2*limit && w.begin(asTenant) == http.StatusOK; begun++ {
	}
	if begun > limit || begun < limit/2 {
		t.Errorf("%d watches were begun; want %d", begun, limit)
	}
	for i := range limit + 2 {
		if code := w.begin(nil); code != http.StatusOK {
			t.Fatalf("watch %d of the server's own user: %d", i, code)
		}
	}
}

// Selectors of more than 16 KB are rejected before they are parsed, also by watches and deletions; shorter ones are not.
func TestLongSelectors(t *testing.T) {
	t.Parallel()
	c := kubernetes.NewForConfigOrDie(apiservertest.Start(t))
	selector := func(bytes int) string { return "a in (" + strings.Repeat("x,", (bytes-8)/2) + "x)" }
	maps := c.CoreV1().ConfigMaps("default")
	long := metav1.ListOptions{LabelSelector: selector(20 << 10)}
	_, listErr := maps.List(t.Context(), long)
	_, watchErr := maps.Watch(t.Context(), long)
	_, fieldErr := maps.List(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + strings.Repeat("x", 20<<10)})
	for what, err := range map[string]error{
		"list": listErr, "watch": watchErr, "fields": fieldErr, "delete": maps.DeleteCollection(t.Context(), metav1.DeleteOptions{}, long),
	} {
		if !apierrors.IsRequestEntityTooLargeError(err) || !strings.Contains(err.Error(), "want at most 16384") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := maps.List(t.Context(), metav1.ListOptions{LabelSelector: selector(16 << 10)}); err != nil {
		t.Errorf("a selector of 16 KB: %v", err)
	}
}
