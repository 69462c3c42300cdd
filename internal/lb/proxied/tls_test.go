package proxied

import (
	"crypto/tls"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// openssl agrees on a protocol with the listener, which tells it to Pods that speak TLS, and resumes its
// session after backends have changed, but not with another certificate (behaviour 120).
func TestALPNAndResumption(t *testing.T) {
	r := newRig(t, map[string]string{
		dialect.LBTLSSecrets: "a", "fairlead.dev/lb-protocol": "tls", "fairlead.dev/lb-backend-protocol": "tls",
		"fairlead.dev/lb-alpn-policy": "HTTP2Preferred",
	})
	cert, _, _ := lbtest.Certificate(t, "a.example.com")
	r.service.Certificates = []tls.Certificate{cert}
	asked := make(chan string, 100)
	inner := tls.NewListener(r.Listener(), &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1", "h2"},
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			asked <- strings.Join(h.SupportedProtos, ",")
			return nil, nil
		}})
	pod := r.PodAt(inner, lbtest.Named("a"))
	r.set(pod)
	openssl := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "openssl", append([]string{"s_client", "-connect", r.At.String()}, args...)...)
		cmd.Stdin = strings.NewReader("Q\n")
		out, _ := cmd.CombinedOutput()
		return string(out)
	}
	for offer, want := range map[string]string{"http/1.1,h2": "h2", "http/1.1": "http/1.1"} {
		if out := openssl("-alpn", offer); !strings.Contains(out, "ALPN protocol: "+want+"\n") {
			t.Errorf("%s: %s", offer, out)
		}
		if got := <-asked; got != want {
			t.Errorf("the Pod is offered %q, want %q", got, want)
		}
	}
	session := filepath.Join(t.TempDir(), "session")
	openssl("-tls1_2", "-sess_out", session)
	if out := openssl("-tls1_2", "-sess_in", session); !strings.Contains(out, "Reused, TLSv1.2") {
		t.Errorf("openssl does not resume its session: %s", out)
	}
	for range 2 {
		<-asked
	}
	client := &tls.Config{InsecureSkipVerify: true, ClientSessionCache: tls.NewLRUClientSessionCache(8), ServerName: "a.example.com"}
	resumes := func() bool {
		t.Helper()
		c := tls.Client(r.Dial(), client)
		if got, err := lbtest.Say(c, "x"); err != nil || got != "a x\n" { // the ticket comes with the first answer
			t.Fatalf("%q, %v", got, err)
		}
		<-asked
		return c.ConnectionState().DidResume
	}
	resumes()
	if !resumes() {
		t.Error("a session is not resumed")
	}
	r.set(pod, r.Pod(lbtest.Named("b")))
	r.set(pod)
	if !resumes() {
		t.Error("a session is not resumed after backends have changed")
	}
	stapled := cert
	stapled.OCSPStaple = []byte("a response")
	r.service.Certificates = []tls.Certificate{stapled}
	r.set(pod)
	if !resumes() {
		t.Error("a session is not resumed after the OCSP response has changed")
	}
	fresh := tls.Client(r.Dial(), &tls.Config{InsecureSkipVerify: true})
	r.Must(fresh.Handshake())
	if <-asked; string(fresh.ConnectionState().OCSPResponse) != "a response" {
		t.Errorf("response %q", fresh.ConnectionState().OCSPResponse)
	}
	other, _, _ := lbtest.Certificate(t, "a.example.com")
	r.service.Certificates = []tls.Certificate{other}
	r.set(pod)
	if resumes() {
		t.Error("a session goes on with another certificate")
	}
}
