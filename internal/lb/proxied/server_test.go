package proxied

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/proxyproto"
)

// TCP is carried both ways, also after one end has finished (behaviours 118, 170).
func TestTCP(t *testing.T) {
	r := newRig(t, nil)
	r.set(r.Pod(func(c net.Conn) {
		all, _ := io.ReadAll(c)
		_, _ = fmt.Fprintf(c, "%d bytes", len(all))
	}))
	c := r.Dial().(*net.TCPConn)
	_, err := c.Write(make([]byte, 5<<20))
	r.Must(err)
	r.Must(c.CloseWrite())
	got, err := io.ReadAll(c)
	if string(got) != "5242880 bytes" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// curl and openssl s_client get the certificate of the name that they ask for (behaviours 115, 116).
func TestTLSByNames(t *testing.T) {
	r := newRig(t, map[string]string{dialect.LBTLSSecrets: "a,b", "fairlead.dev/lb-protocol": "tls"})
	a, aPEM, keyPEM := lbtest.Certificate(t, "a.example.com")
	b, bPEM, _ := lbtest.Certificate(t, "b.example.com")
	r.service.Certificates = []tls.Certificate{a, b}
	r.set(r.Pod(func(c net.Conn) {
		in := bufio.NewScanner(c)
		for in.Scan() && in.Text() != "" {
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
	}))
	dir := t.TempDir()
	for name, text := range map[string][]byte{"a.example.com": aPEM, "b.example.com": bPEM} {
		ca := filepath.Join(dir, name)
		r.Must(os.WriteFile(ca, text, 0o600))
		out, err := exec.Command("curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "30", "--cacert", ca, "--connect-to",
			name+":443:"+r.At.String(), "https://"+name+"/").CombinedOutput()
		if string(out) != "hello" || err != nil {
			t.Errorf("curl of %s: %s, %v", name, out, err)
		}
		cmd := exec.Command("openssl", "s_client", "-connect", r.At.String(), "-servername", name, "-CAfile", ca, "-verify_return_error")
		cmd.Stdin = strings.NewReader("GET / HTTP/1.1\r\n\r\n")
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "CN = "+name) && !strings.Contains(string(out),
			"CN="+name) {
			t.Errorf("openssl of %s: %v\n%s", name, err, out)
		}
	}
	key := strings.Split(string(keyPEM), "\n")[1]
	if strings.Contains(r.Logged.String(), key) || strings.Contains(r.Logged.String(), "PRIVATE") {
		t.Error("a private key is in the log")
	}
}

// Policies have the versions that their names say (behaviour 120), and the default has no old ones.
func TestTLSPolicies(t *testing.T) {
	cert, _, _ := lbtest.Certificate(t, "a.example.com")
	for policy, works := range map[string][]uint16{
		"":                                    {tls.VersionTLS12, tls.VersionTLS13},
		"ELBSecurityPolicy-TLS-1-2-2017-01":   {tls.VersionTLS12},
		"ELBSecurityPolicy-2016-08":           {tls.VersionTLS10, tls.VersionTLS11, tls.VersionTLS12},
		"ELBSecurityPolicy-TLS13-1-3-2021-06": {tls.VersionTLS13},
	} {
		r := newRig(t, map[string]string{dialect.LBTLSSecrets: "a", "fairlead.dev/lb-protocol": "tls", "fairlead.dev/lb-tls-policy": policy})
		r.service.Certificates = []tls.Certificate{cert}
		r.set(r.Pod(lbtest.Named("a")))
		for _, v := range []uint16{tls.VersionTLS10, tls.VersionTLS11, tls.VersionTLS12, tls.VersionTLS13} {
			c := tls.Client(r.Dial(), &tls.Config{InsecureSkipVerify: true, MinVersion: v, MaxVersion: v})
			if err := c.Handshake(); (err == nil) != slices.Contains(works, v) {
				t.Errorf("%q: %s: %v", policy, tls.VersionName(v), err)
			}
		}
	}
}

// Certificates, Pods and settings change under load, and no connection fails.
func TestReloadDropsNothing(t *testing.T) {
	r := newRig(t, map[string]string{dialect.LBTLSSecrets: "a", "fairlead.dev/lb-protocol": "tls"})
	a, _, _ := lbtest.Certificate(t, "a.example.com")
	b, _, _ := lbtest.Certificate(t, "a.example.com")
	pods := []netip.AddrPort{r.Pod(lbtest.Named("a")), r.Pod(lbtest.Named("b"))}
	r.service.Certificates = []tls.Certificate{a}
	r.set(pods...)
	long := tls.Client(r.Dial(), &tls.Config{InsecureSkipVerify: true})
	if _, err := lbtest.Say(long, "hello"); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				raw, err := net.Dial("tcp", r.At.String())
				if err != nil {
					t.Error(err)
					return
				}
				_ = raw.SetDeadline(time.Now().Add(lbtest.Patience))
				c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true})
				if _, err := lbtest.Say(c, "x"); err != nil {
					t.Error(err)
				}
				_ = c.Close()
			}
		})
	}
	for i := range 60 {
		r.service.Certificates = [][]tls.Certificate{{a}, {b}}[i%2]
		r.set(pods[i%2:]...)
	}
	close(stop)
	wg.Wait()
	if got, err := lbtest.Say(long, "still"); err != nil || !strings.HasSuffix(got, "still\n") {
		t.Errorf("the connection from before: %q, %v", got, err)
	}
}

// Pods get the client's address in either version (behaviours 121, 173).
func TestProxyProtocolToPods(t *testing.T) {
	for version, annotation := range map[int]string{1: "v1", 2: "v2"} {
		r := newRig(t, map[string]string{"fairlead.dev/lb-proxy-protocol": annotation})
		r.set(r.Pod(func(c net.Conn) {
			client, at, ok, err := proxyproto.Read(c)
			rest, _ := bufio.NewReader(c).ReadString('\n')
			_, _ = fmt.Fprintf(c, "%s %s %t %v %s", client, at, ok, err, rest)
		}))
		c := r.Dial()
		got, err := lbtest.Say(c, "data")
		if want := fmt.Sprintf("%s %s true <nil> data\n", c.LocalAddr(), r.At); got != want || err != nil {
			t.Errorf("v%d: %q, want %q; %v", version, got, want, err)
		}
	}
	// The example of the documents.
	got := proxyproto.Header(1, netip.MustParseAddrPort("192.0.2.202:12345"), netip.MustParseAddrPort("10.0.42.7:7"))
	if string(got) != "PROXY TCP4 192.0.2.202 10.0.42.7 12345 7\r\n" {
		t.Errorf("%q", got)
	}
}

// A trusted front names the client; from any other peer the bytes are the client's.
func TestProxyProtocolFromFronts(t *testing.T) {
	client := netip.MustParseAddrPort("198.51.100.7:4711")
	r := newRig(t, map[string]string{"fairlead.dev/lb-trusted-fronts": "127.0.0.0/8", "fairlead.dev/lb-proxy-protocol": "v1"})
	r.service.Spec.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	pod := r.Pod(lbtest.Named("pod"))
	r.set(pod)
	for version := 1; version <= 2; version++ {
		c := r.Dial()
		_, err := c.Write(proxyproto.Header(version, client, r.At))
		r.Must(err)
		want := fmt.Sprintf("pod PROXY TCP4 198.51.100.7 %s 4711 %d\n", r.At.Addr(), r.At.Port())
		if got, err := lbtest.Say(c, "x"); err != nil || got != want {
			t.Errorf("v%d: %q, %v", version, got, err)
		}
	}
	for what, bytes := range map[string][]byte{
		"another client":  proxyproto.Header(2, netip.MustParseAddrPort("203.0.113.1:1"), r.At),
		"no header":       []byte("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"),
		"an endless line": []byte("PROXY " + strings.Repeat("x", 200)),
	} {
		c := r.Dial()
		_, err := c.Write(bytes)
		r.Must(err)
		if got, err := io.ReadAll(c); len(got) > 0 || err != nil && !errors.Is(err, lbtest.ErrReset) {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
	r.ask(map[string]string{"fairlead.dev/lb-trusted-fronts": "203.0.113.0/24"})
	r.set(pod)
	if got, err := lbtest.Say(r.Dial(), "PROXY TCP4 198.51.100.7 127.0.0.1 4711 80\r"); err != nil || !strings.HasPrefix(got,
		"pod PROXY TCP4 198.51.100.7") {
		t.Errorf("an untrusted front: %q, %v", got, err)
	}
}

// Pods are spoken to in TLS again (behaviour 116).
func TestReencryption(t *testing.T) {
	cert, _, _ := lbtest.Certificate(t, "pod")
	r := newRig(t, map[string]string{"fairlead.dev/lb-backend-protocol": "tls"})
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	r.Must(err)
	r.set(r.PodAt(l, lbtest.Named("pod")))
	if got, err := lbtest.Say(r.Dial(), "x"); got != "pod x\n" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// A silent connection is closed, one that is used is not (behaviour 128).
func TestIdleTimeout(t *testing.T) {
	r := newRig(t, nil)
	r.service.Spec.IdleTimeout = dialect.Duration(2 * time.Second)
	r.set(r.Pod(lbtest.Named("pod")))
	begin := time.Now()
	silent, busy, last := r.Dial(), r.Dial(), begin
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		_, _ = io.ReadAll(silent)
	}()
	for done := false; !done; {
		select {
		case <-closed:
			done = true
		case <-time.After(100 * time.Millisecond):
			got, err := lbtest.Say(busy, "x")
			if pause := time.Since(last); err != nil && pause > time.Second { // the machine was stuck: it was silent, too
				busy = r.Dial()
			} else if got != "pod x\n" || err != nil {
				t.Fatalf("%q, %v", got, err)
			}
			last = time.Now()
		}
	}
	if took := time.Since(begin); took < 2*time.Second {
		t.Errorf("closed after %s", took)
	}
}

// A Pod that leaves has no new connections, and its old ones for the time-out (behaviours 126, 127).
func TestDraining(t *testing.T) {
	for _, c := range []struct {
		annotations map[string]string
		survives    bool
	}{
		{map[string]string{"fairlead.dev/lb-drain-timeout": "600"}, true},
		{map[string]string{"fairlead.dev/lb-drain-timeout": "1"}, false},
		{map[string]string{"fairlead.dev/lb-draining": "false"}, false},
	} {
		r := newRig(t, c.annotations)
		a, b := r.Pod(lbtest.Named("a")), r.Pod(lbtest.Named("b"))
		r.set(a)
		old := r.Dial()
		if got, err := lbtest.Say(old, "x"); got != "a x\n" || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
		r.set(b)
		for range 4 {
			if got, err := lbtest.Say(r.Dial(), "x"); got != "b x\n" || err != nil {
				t.Errorf("%v: a new connection: %q, %v", c.annotations, got, err)
			}
		}
		if !c.survives {
			if got, err := io.ReadAll(old); len(got) > 0 || err != nil && !errors.Is(err, lbtest.ErrReset) {
				t.Errorf("%v: %q, %v", c.annotations, got, err)
			}
			continue
		}
		if got, err := lbtest.Say(old, "x"); got != "a x\n" || err != nil {
			t.Errorf("%v: the old connection: %q, %v", c.annotations, got, err)
		}
	}
}

// A Pod that fails its checks is out, and comes back; when all fail, all count (behaviours 131 to 134, 180).
func TestHealthChecks(t *testing.T) {
	r := newRig(t, nil)
	h := &r.service.Spec.Health
	h.Interval, h.Timeout, h.Healthy, h.Unhealthy = dialect.Duration(100*time.Millisecond), dialect.Duration(90*time.Millisecond), 2, 2
	sick := r.Free()
	well := r.Pod(lbtest.Named("well"))
	r.set(sick, well)
	isBad := func(want bool) {
		t.Helper()
		for deadline := time.Now().Add(lbtest.Patience); ; {
			log := r.Logged.String()
			about := fmt.Sprintf("endpoint=%s healthy=", sick)
			i := strings.LastIndex(log, about)
			bad := i >= 0 && strings.HasPrefix(log[i+len(about):], "false")
			if bad == want {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("bad is still %t", bad)
			}
			<-time.After(10 * time.Millisecond)
		}
	}
	if got, err := lbtest.Say(r.Dial(), "x"); got != "well x\n" || err != nil { // another one is tried
		t.Errorf("before the checks: %q, %v", got, err)
	}
	isBad(true)
	r.set(sick)
	if got, err := io.ReadAll(r.Dial()); len(got) > 0 || err != nil && !errors.Is(err, lbtest.ErrReset) {
		t.Errorf("%q, %v", got, err)
	}
	back, err := net.Listen("tcp", sick.String())
	r.Must(err)
	r.PodAt(back, lbtest.Named("sick"))
	if got, err := lbtest.Say(r.Dial(), "x"); got != "sick x\n" || err != nil { // fails open until the checks pass
		t.Errorf("%q, %v", got, err)
	}
	isBad(false)
}

// A client whose Pod leaves while it is being connected to has another one.
func TestPodLeavesDuringConnect(t *testing.T) {
	cert, _, _ := lbtest.Certificate(t, "pod")
	secure := &tls.Config{Certificates: []tls.Certificate{cert}}
	r := newRig(t, map[string]string{"fairlead.dev/lb-backend-protocol": "tls"})
	begun, release := make(chan struct{}, 100), make(chan struct{})
	slow := r.Pod(func(c net.Conn) {
		begun <- struct{}{}
		<-release
		lbtest.Named("slow")(tls.Server(c, secure))
	})
	r.set(slow)
	answered := make(chan string, 1)
	c := r.Dial()
	go func() {
		got, err := lbtest.Say(c, "x")
		answered <- fmt.Sprint(got, err)
	}()
	<-begun
	r.set(r.PodAt(tls.NewListener(r.Listener(), secure), lbtest.Named("next")))
	close(release)
	if got := <-answered; got != "next x\n<nil>" {
		t.Errorf("%q", got)
	}
	r.Must(c.Close()) // the Pod waits for its end
}

// What is no longer wanted is not listened at, and what cannot be done is reported.
func TestSet(t *testing.T) {
	r := newRig(t, nil)
	r.set(r.Pod(lbtest.Named("pod")))
	if got := r.server.Listening(); len(got) != 1 || got[0] != r.At {
		t.Errorf("%v", got)
	}
	r.ask(map[string]string{dialect.LBTLSSecrets: "a", "fairlead.dev/lb-protocol": "tls"})
	if failed := r.server.Set([]*Service{new(r.service)}); failed[r.service.Name] == nil || len(r.server.Listening()) != 0 {
		t.Errorf("TLS without a certificate: %v, %v", failed, r.server.Listening())
	}
	r.ask(nil)
	r.set()
	if got, err := io.ReadAll(r.Dial()); len(got) > 0 || err != nil && !errors.Is(err, lbtest.ErrReset) {
		t.Errorf("without Pods: %q, %v", got, err)
	}
	r.server.Set(nil)
	if c, err := net.Dial("tcp", r.At.String()); err == nil {
		_ = c.Close()
		t.Error("still listens")
	}
}

// A port that another program has concerns no other port of the Service, where sockets are bound to its addresses, and is
// served once it is free.
func TestOnePortFails(t *testing.T) {
	r := newRig(t, nil)
	taken := r.Listener().(*net.TCPListener)
	other := addrPort(taken.Addr())
	r.service.Addrs = []netip.Addr{other.Addr()}
	r.At = netip.AddrPortFrom(other.Addr(), r.At.Port())
	r.service.Spec.Listeners = append(r.service.Spec.Listeners,
		dialect.Listener{Port: other.Port(), Protocol: dialect.TCP, Backend: dialect.TCP})
	pod := r.Pod(lbtest.Named("pod"))
	r.service.Backends = map[uint16][]netip.AddrPort{r.At.Port(): {pod}, other.Port(): {pod}}
	failed := r.server.Set([]*Service{new(r.service)})
	if err := failed[r.service.Name]; err == nil || !strings.Contains(err.Error(), fmt.Sprintf("port %d is not served", other.Port())) {
		t.Errorf("%v", failed)
	}
	if got := r.server.Doors(); len(got) != 1 || got[0] != (Door{At: r.At}) || !r.server.Serves(r.service.Name) {
		t.Errorf("doors are %v", got)
	}
	if got, err := lbtest.Say(r.Dial(), "x"); err != nil || got != "pod x\n" {
		t.Errorf("the other port: %q, %v", got, err)
	}
	r.Must(taken.Close())
	if failed := r.server.Set([]*Service{new(r.service)}); len(failed) > 0 || len(r.server.Doors()) != 2 {
		t.Errorf("%v, %v", failed, r.server.Doors())
	}
}
