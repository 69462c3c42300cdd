package proxied

import (
	"bufio"
	"bytes"
	"context"
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
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

type rig struct {
	*testing.T
	server  *Server
	at      netip.AddrPort
	service Service
	log     *syncBuffer
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func newRig(t *testing.T, annotations map[string]string) *rig {
	t.Helper()
	r := &rig{T: t, log: &syncBuffer{}}
	r.server = New(Options{
		Log:        slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		AccessLogs: filepath.Join(t.TempDir(), "logs"), Node: "n1",
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		r.server.Close(ctx)
	})
	r.at = r.free()
	r.service = Service{Name: svc.Name{Namespace: "default", Name: "web"}, Addrs: []netip.Addr{r.at.Addr()},
		Backends: map[uint16][]netip.AddrPort{}}
	r.ask(annotations)
	return r
}

func (r *rig) ask(annotations map[string]string) {
	r.service.Spec = dialect.Read(dialect.Service{
		Annotations: annotations, Ports: []dialect.Port{{Name: "web", Number: r.at.Port(), Protocol: "TCP"}},
	}).Spec
}

func (r *rig) set(pods ...netip.AddrPort) {
	r.Helper()
	r.service.Backends = map[uint16][]netip.AddrPort{r.at.Port(): pods}
	if failed := r.server.Set([]*Service{new(r.service)}); len(failed) > 0 {
		r.Fatal(failed)
	}
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) pod(serve func(net.Conn)) netip.AddrPort {
	r.Helper()
	return r.podAt(r.listener(), serve)
}

func (r *rig) listener() net.Listener {
	r.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	return l
}

var addresses atomic.Uint32

// free returns an address with a port that is free, and an IP that no other test uses, so that the port stays free.
func (r *rig) free() netip.AddrPort {
	r.Helper()
	n, pid := addresses.Add(1), os.Getpid()
	l, err := net.Listen("tcp", fmt.Sprintf("127.%d.%d.%d:0", 1+pid%250, 1+(pid/250+int(n)/250)%250, 1+n%250))
	r.must(err)
	r.must(l.Close())
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func (r *rig) podAt(l net.Listener, serve func(net.Conn)) netip.AddrPort {
	testbed.Serve(r, l, serve)
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func named(name string) func(net.Conn) {
	return func(c net.Conn) {
		in := bufio.NewScanner(c)
		for in.Scan() {
			if _, err := fmt.Fprintf(c, "%s %s\n", name, in.Text()); err != nil {
				return
			}
		}
	}
}

func (r *rig) dial() net.Conn {
	r.Helper()
	c, err := net.Dial("tcp", r.at.String())
	r.must(err)
	r.Cleanup(func() { _ = c.Close() })
	r.must(c.SetDeadline(time.Now().Add(patience)))
	return c
}

func say(c net.Conn, line string) (string, error) {
	if _, err := fmt.Fprintln(c, line); err != nil {
		return "", err
	}
	return bufio.NewReader(c).ReadString('\n')
}

func certificate(t testing.TB, name string) (c tls.Certificate, certPEM, keyPEM []byte) {
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

// engine returns what carries requests, once a listener of HTTP is set.
func (r *rig) engine() *webServer { return r.server.web.(*webServer) }
