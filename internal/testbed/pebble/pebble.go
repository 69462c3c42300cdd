// Package pebble runs the authority of ACME that Let's Encrypt has for tests.
package pebble

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/nszone"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Authority is an authority that asks a DNS server of the test for addresses, and connects to their ports 80 and 443.
type Authority struct {
	// Directory is where the test reaches it, and Within where programs in its host do.
	Directory, Within string
	// Roots has signed the certificate of its server, and Issuer the ones that it issues, which PEM has in that form.
	Roots, Issuer *x509.CertPool
	PEM           []byte
	// CA has Roots in that form.
	CA []byte
	// Zone has the names.
	Zone       *nszone.Server
	management string
	out        log
}

// Output returns what it has printed.
func (p *Authority) Output() string { return p.out.String() }

// log is what a program prints.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Suggest has it want a certificate to be renewed within the hour before now.
func (p *Authority) Suggest(t *testing.T, cert []byte) {
	t.Helper()
	window, err := json.Marshal(map[string]any{"suggestedWindow": map[string]time.Time{
		"start": time.Now().Add(-time.Hour), "end": time.Now().Add(-time.Second)}})
	if err != nil {
		t.Fatal(err)
	}
	body, err := json.Marshal(map[string]string{"Certificate": string(cert), "ARIResponse": string(window)})
	if err != nil {
		t.Fatal(err)
	}
	answer, err := p.client().Post(p.management+"/set-renewal-info/", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Fatal(answer.Status)
	}
}

func (p *Authority) client() *http.Client {
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.Roots}, DisableKeepAlives: true}
	return &http.Client{Timeout: testbed.Patience, Transport: transport}
}

// The account that it knows by other means: the name, and its key in base64url, which Key has.
const (
	KeyID     = "kid-1"
	binding64 = "zWNDZM6eQGHWpSRTPal5eIUYFTu7EajVIoguysqZ9wG44nMEtx3MUAsUDkMTQ12W"
)

// Key returns the key of the account KeyID.
func Key() []byte {
	key, err := base64.RawURLEncoding.DecodeString(binding64)
	if err != nil {
		panic(err)
	}
	return key
}

// Start starts an authority, with a zone that has the addresses of hosts: in a host of a test's network, or beside the test if in is
// nil. It is reached at Directory in either case.
func Start(t *testing.T, zone string, hosts map[string]netip.Addr, in *testbed.Host) *Authority {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	program := process.Build(t, "test/pebble", "github.com/letsencrypt/pebble/v2/cmd/pebble")
	names := &nszone.Server{}
	within(in, func() { names = nszone.Start(t, zone, nszone.Secret, hosts) })
	a := testbed.NewAuthority(t)
	leaf, key := a.Issue("localhost", 2, false)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	must(err)
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		must(os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	// Beside the ports that the kernel gives to connections (net.ipv4.ip_local_port_range): no connection takes one before pebble does.
	const port, management = "14000", "15000"
	config, err := json.Marshal(map[string]any{"pebble": map[string]any{
		"listenAddress": "127.0.0.1:" + port, "managementListenAddress": "127.0.0.1:" + management,
		"certificate": write("cert.pem", "CERTIFICATE", leaf.Raw), "privateKey": write("key.pem", "PRIVATE KEY", keyDER),
		"externalAccountBindingRequired": true, "externalAccountMACKeys": map[string]string{KeyID: binding64},
		"httpPort": 80, "tlsPort": 443, "retryAfter": map[string]int{"authz": 1, "order": 1},
		"profiles": map[string]any{"default": map[string]any{"description": "default", "validityPeriod": 7776000}},
	}})
	must(err)
	must(os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600))
	cmd := exec.CommandContext(t.Context(), program, "-config", filepath.Join(dir, "config.json"), "-strict", "-dnsserver", names.Addr)
	reached, managed := port, management
	if in != nil {
		cmd = in.Command(t.Context(), program, cmd.Args[1:]...)
		reached, managed = relay(t, in, port), relay(t, in, management)
	}
	cmd.Env = append(os.Environ(), "PEBBLE_VA_NOSLEEP=1", "PEBBLE_AUTHZREUSE=0")
	p := &Authority{Zone: names, Directory: "https://localhost:" + reached + "/dir", Within: "https://localhost:" + port + "/dir",
		CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Cert.Raw}), management: "https://localhost:" + managed,
		Roots: x509.NewCertPool(), Issuer: x509.NewCertPool()}
	cmd.Stdout, cmd.Stderr = &p.out, &p.out
	must(cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(p.out.String())
		}
	})
	p.Roots.AddCert(a.Cert)
	p.await(t, p.management+"/roots/0")
	return p
}

// await waits until pebble runs, and reads its root.
func (p *Authority) await(t *testing.T, root string) {
	t.Helper()
	client := p.client()
	testbed.Until(t, "pebble", func() error {
		answer, err := client.Get(root)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err == nil && !p.Issuer.AppendCertsFromPEM(text) {
			err = fmt.Errorf("%q", text)
		}
		p.PEM = text
		return err
	})
}

func within(in *testbed.Host, do func()) {
	if in == nil {
		do()
		return
	}
	in.Do(do)
}

// relay carries connections from a port beside the test to a port of a host's loopback.
func relay(t *testing.T, to *testbed.Host, port string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	testbed.Serve(t, l, func(c net.Conn) {
		out, err := to.Dial(t.Context(), svc.TCP, netip.MustParseAddrPort("127.0.0.1:"+port))
		if err != nil {
			return
		}
		defer out.Close()
		var both sync.WaitGroup
		both.Go(func() { _, _ = io.Copy(out, c); _ = out.Close() })
		_, _ = io.Copy(c, out)
		_ = c.Close()
		both.Wait()
	})
	_, out, _ := net.SplitHostPort(l.Addr().String())
	return out
}
