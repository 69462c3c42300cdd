package lb

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/nszone"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// pebble is Let's Encrypt's authority for tests, which asks a DNS server of the test for addresses, and connects to port 443.
type pebble struct {
	directory  string
	roots      *x509.CertPool // of its own certificate
	issuer     *x509.CertPool // of those that it issues
	management string
	out        log
	zone       *nszone.Server // of the names
}

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

// suggest has pebble want a certificate to be renewed within the hour before now.
func (p *pebble) suggest(t *testing.T, cert []byte) {
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

func (p *pebble) client() *http.Client {
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.roots}, DisableKeepAlives: true}
	return &http.Client{Timeout: testbed.Patience, Transport: transport}
}

// binding is the account that pebble knows by other means, and binding64 its key.
const binding64 = "zWNDZM6eQGHWpSRTPal5eIUYFTu7EajVIoguysqZ9wG44nMEtx3MUAsUDkMTQ12W"

var binding = acme.Binding{KeyID: "kid-1", Key: must64(binding64)}

func must64(text string) []byte {
	key, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return key
}

func startPebble(t *testing.T, hosts map[string]netip.Addr) *pebble {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	program := process.Build(t, "test/pebble", "github.com/letsencrypt/pebble/v2/cmd/pebble")
	p := &pebble{zone: nszone.Start(t, "shop.example", nszone.Secret, hosts)}
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
		"externalAccountBindingRequired": true, "externalAccountMACKeys": map[string]string{binding.KeyID: binding64},
		"httpPort": 80, "tlsPort": 443, "retryAfter": map[string]int{"authz": 1, "order": 1},
		"profiles": map[string]any{"default": map[string]any{"description": "default", "validityPeriod": 7776000}},
	}})
	must(err)
	must(os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600))
	cmd := exec.CommandContext(t.Context(), program, "-config", filepath.Join(dir, "config.json"), "-strict",
		"-dnsserver", p.zone.Addr)
	cmd.Env = append(os.Environ(), "PEBBLE_VA_NOSLEEP=1", "PEBBLE_AUTHZREUSE=0")
	*p = pebble{zone: p.zone, directory: "https://localhost:" + port + "/dir", management: "https://localhost:" + management,
		roots: x509.NewCertPool(), issuer: x509.NewCertPool()}
	cmd.Stdout, cmd.Stderr = &p.out, &p.out
	must(cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(p.out.String())
		}
	})
	p.roots.AddCert(a.Cert)
	p.await(t, p.management+"/roots/0")
	return p
}

// await waits until pebble runs, and reads its root.
func (p *pebble) await(t *testing.T, root string) {
	t.Helper()
	client := p.client()
	testbed.Until(t, "pebble", func() error {
		answer, err := client.Get(root)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err == nil && !p.issuer.AppendCertsFromPEM(text) {
			err = fmt.Errorf("%q", text)
		}
		return err
	})
}
