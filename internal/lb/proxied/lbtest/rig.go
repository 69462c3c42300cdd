// Package lbtest is the bench of tests of the proxied way: Pods that are listeners of this process, and clients. Tests put
// a proxied.Server between them.
package lbtest

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fairlead/fairlead/internal/testbed"
)

// Patience bounds every wait.
const Patience = 30 * time.Second

// ErrReset is how a connection ends of which bytes were not read.
const ErrReset = syscall.ECONNRESET

// Rig is a test with one Service at a loopback address.
type Rig struct {
	testing.TB
	// At is where clients connect to.
	At netip.AddrPort
	// Logged is for what a Server reports.
	Logged *Buffer
}

// New returns a Rig at an address where nothing listens.
func New(t testing.TB) *Rig {
	t.Helper()
	r := &Rig{TB: t, Logged: &Buffer{}}
	r.At = r.Free()
	return r
}

// Logger returns a logger to Logged.
func (r *Rig) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(r.Logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Buffer holds what is written to it, as a log; several goroutines may write.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write adds to it.
func (s *Buffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

// String returns all of it.
func (s *Buffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// Must ends the test on an error.
func (r *Rig) Must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// Pod is a Pod that calls serve for each connection.
func (r *Rig) Pod(serve func(net.Conn)) netip.AddrPort {
	r.Helper()
	return r.PodAt(r.Listener(), serve)
}

// Listener listens at a port of loopback.
func (r *Rig) Listener() net.Listener {
	r.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	r.Must(err)
	return l
}

var addresses atomic.Uint32

// Free returns an address with a port that is free, and an IP that no other test uses, so that the port stays free.
func (r *Rig) Free() netip.AddrPort {
	r.Helper()
	n, pid := addresses.Add(1), os.Getpid()
	l, err := net.Listen("tcp", fmt.Sprintf("127.%d.%d.%d:0", 1+pid%250, 1+(pid/250+int(n)/250)%250, 1+n%250))
	r.Must(err)
	r.Must(l.Close())
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// PodAt is a Pod at l.
func (r *Rig) PodAt(l net.Listener, serve func(net.Conn)) netip.AddrPort {
	testbed.Serve(r.TB, l, serve)
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// Named returns what answers each line with a name and the line.
func Named(name string) func(net.Conn) {
	return func(c net.Conn) {
		in := bufio.NewScanner(c)
		for in.Scan() {
			if _, err := fmt.Fprintf(c, "%s %s\n", name, in.Text()); err != nil {
				return
			}
		}
	}
}

// Dial connects to the listener.
func (r *Rig) Dial() net.Conn {
	r.Helper()
	c := r.Forever()
	r.Must(c.SetDeadline(time.Now().Add(Patience)))
	return c
}

// Forever is Dial without a deadline: for benchmarks.
func (r *Rig) Forever() net.Conn {
	r.Helper()
	c, err := net.Dial("tcp", r.At.String())
	r.Must(err)
	r.Cleanup(func() { _ = c.Close() })
	return c
}

// Say sends a line and returns the answer.
func Say(c net.Conn, line string) (string, error) {
	if _, err := fmt.Fprintln(c, line); err != nil {
		return "", err
	}
	return bufio.NewReader(c).ReadString('\n')
}

// Certificate makes a certificate for a name, and returns it as files' contents, too.
func Certificate(t testing.TB, name string) (c tls.Certificate, certPEM, keyPEM []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	text, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM = pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: text})
	c, err = tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	return c, certPEM, keyPEM
}

// Pool returns the certificates of a file's content.
func Pool(text []byte) *x509.CertPool {
	p := x509.NewCertPool()
	p.AppendCertsFromPEM(text)
	return p
}

// Metrics returns what a collector shows, as text. A series that is there twice fails the test, and a counter "x_total" beside a metric
// "x": in OpenMetrics both are x.
func Metrics(t testing.TB, c prometheus.Collector) string {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(c)
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if answer.Code != http.StatusOK {
		t.Fatal(answer.Body)
	}
	text := answer.Body.String()
	for line := range strings.Lines(text) {
		name, counter := strings.CutSuffix(strings.TrimPrefix(line, "# TYPE "), "_total counter\n")
		if counter && strings.Contains(text, "# TYPE "+name+" ") {
			t.Errorf("%s_total and %s have one name in OpenMetrics", name, name)
		}
	}
	return text
}

// Lines returns the lines of all files in a directory, in the order of their names.
func (r *Rig) Lines(dir string) (out []string) {
	r.Helper()
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			text, err := os.ReadFile(path)
			r.Must(err)
			for line := range strings.Lines(string(text)) {
				out = append(out, line)
			}
		}
		return nil
	})
	return out
}
