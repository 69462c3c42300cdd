package web

import (
	"context"
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// nghttp2's h2load has all of its requests answered, by HTTP/2 with many streams at a time and by
// HTTP/1.1 over TLS, while backends and certificates are set again.
func TestH2Load(t *testing.T) {
	if _, err := exec.LookPath("h2load"); err != nil {
		t.Skipf("%v (Debian: nghttp2-client)", err)
	}
	r := newRig(t, map[string]string{"fairlead.dev/lb-protocol": "https", "fairlead.dev/lb-tls-secrets": "a"})
	cert, _, _ := lbtest.Certificate(t, "web.example.com")
	r.service.Certificates = []tls.Certificate{cert}
	pod := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 1000)) }))
	defer pod.Close()
	at := netip.MustParseAddrPort(pod.Listener.Addr().String())
	r.set(at)
	for _, protocol := range []string{"h2", "http/1.1"} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		cmd := exec.CommandContext(ctx, "h2load", "-n", "3000", "-c", "20", "-m", "20", "--npn-list", protocol, "https://"+r.At.String()+"/")
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		var err error
		for running := true; running; {
			select {
			case err = <-ended:
				running = false
			case <-time.After(50 * time.Millisecond):
				r.set(at)
			}
		}
		cancel()
		if err != nil || !strings.Contains(out.String(), "3000 succeeded, 0 failed, 0 errored, 0 timeout") ||
			!strings.Contains(out.String(), "Application protocol: "+protocol) {
			t.Errorf("%s: %v\n%s", protocol, err, out.String())
		}
	}
}
