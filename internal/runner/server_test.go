package runner_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/client-go/util/exec"

	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/testbed"
)

// authority signs client certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t}
	a.cert, a.key = a.make("test-ca", true)
	return a
}

func (a *authority) make(name string, ca bool) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour),
		IsCA:     ca, BasicConstraintsValid: ca, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	parent, signer := template, key
	if !ca {
		parent, signer = a.cert, a.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert, key
}

// config is a client of the endpoint that calls itself name.
func (a *authority) config(host, name string) *rest.Config {
	a.t.Helper()
	cert, key := a.make(name, false)
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	return &rest.Config{Host: host, TLSClientConfig: rest.TLSClientConfig{
		Insecure: true,
		CertData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}),
		KeyData:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}),
	}}
}

// endpoint is a cluster whose node serves logs and exec.
type endpoint struct {
	*cluster
	ca   *authority
	url  string
	rest *rest.Config
}

func newEndpoint(t *testing.T) *endpoint {
	t.Helper()
	e := &endpoint{ca: newAuthority(t)}
	pool := x509.NewCertPool()
	pool.AddCert(e.ca.cert)
	e.cluster = newCluster(t, func(o *runner.Options) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		o.Listener, o.ClientCA = l, func() (*x509.CertPool, error) { return pool, nil }
		o.Status = func() any { return map[string]string{"mode": "nft"} }
		e.url = "https://" + l.Addr().String()
	})
	e.rest = e.ca.config(e.url, "fairlead-apiserver")
	return e
}

func (e *endpoint) get(path string) (int, string) {
	e.t.Helper()
	rt, err := rest.TransportFor(e.rest)
	if err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(e.t.Context(), testbed.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.url+path, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	res, err := rt.RoundTrip(req)
	if err != nil {
		e.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// exec runs a command by SPDY in the Pod default/web.
func (e *endpoint) exec(o remotecommand.StreamOptions, args ...string) error {
	e.t.Helper()
	return e.execAt(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}, o, args...)
}

// execAt runs a command by SPDY, as the API server does.
func (e *endpoint) execAt(p *corev1.Pod, o remotecommand.StreamOptions, args ...string) error {
	e.t.Helper()
	v := url.Values{"command": args}
	for name, on := range map[string]bool{"input": o.Stdin != nil, "output": o.Stdout != nil, "error": o.Stderr != nil, "tty": o.Tty} {
		if on {
			v.Set(name, "1")
		}
	}
	u, err := url.Parse(fmt.Sprintf("%s/exec/%s/%s/main?%s", e.url, p.Namespace, p.Name, v.Encode()))
	if err != nil {
		e.t.Fatal(err)
	}
	x, err := remotecommand.NewSPDYExecutor(e.rest, http.MethodPost, u)
	if err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(e.t.Context(), testbed.Patience)
	defer cancel()
	return x.StreamWithContext(ctx, o)
}

func TestEndpointAdmitsOnlyTheAPIServer(t *testing.T) {
	e := newEndpoint(t)
	if code, body := e.get("/healthz"); code != 200 || body != "ok" {
		t.Errorf("healthz: %d %q", code, body)
	}
	if code, body := e.get("/status"); code != 200 || body != "{\"mode\":\"nft\"}\n" {
		t.Errorf("status: %d %q", code, body)
	}
	other := newAuthority(t)
	for name, c := range map[string]*rest.Config{
		"no certificate": {Host: e.url, TLSClientConfig: rest.TLSClientConfig{Insecure: true}},
		"another name":   e.ca.config(e.url, "system:admin"),
		"another CA":     other.config(e.url, "fairlead-apiserver"),
	} {
		rt, err := rest.TransportFor(c)
		if err != nil {
			t.Fatal(err)
		}
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, e.url+"/healthz", nil)
		if res, err := rt.RoundTrip(req); err == nil {
			res.Body.Close()
			t.Errorf("%s: admitted with %d", name, res.StatusCode)
		}
	}
	// The fingerprint is that of what the endpoint shows.
	conn, err := tls.Dial("tcp", strings.TrimPrefix(e.url, "https://"), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	sum := sha256.Sum256(conn.ConnectionState().PeerCertificates[0].Raw)
	if got := hex.EncodeToString(sum[:]); got != e.r.Fingerprint() {
		t.Errorf("fingerprint %s, the endpoint shows %s", e.r.Fingerprint(), got)
	}
}

func TestLogs(t *testing.T) {
	e := newEndpoint(t)
	p := pod("web", `n=$(cat count 2>/dev/null || echo 0); echo $((n+1)) > count
		for i in 1 2 3; do echo "run $n line $i"; done; [ $n = 0 ] && exit 1; exec sleep 600`)
	p.Spec.Containers[0].WorkingDir = t.TempDir()
	e.create(p)
	e.until("web", "restarted", func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) == 1 && p.Status.ContainerStatuses[0].RestartCount == 1 && isReady(p)
	})
	path := "/containerLogs/default/web/main"
	await(t, "the second run's output", func() bool { _, b := e.get(path); return strings.Count(b, "\n") == 3 })
	for _, c := range []struct {
		query string
		code  int
		want  string
	}{
		{"", 200, "run 1 line 1\nrun 1 line 2\nrun 1 line 3\n"},
		{"?tailLines=1", 200, "run 1 line 3\n"},
		{"?limitBytes=5", 200, "run 1"},
		{"?previous=true&tailLines=2", 200, "run 0 line 2\nrun 0 line 3\n"},
		{"?stream=Stderr", 200, ""},
		{"?sinceSeconds=0", 200, ""},
		{"?tailLines=x", 400, "tailLines"},
		{"?sinceTime=yesterday", 400, "sinceTime"},
		{"?stream=Both", 400, "stream"},
		{"?follow=perhaps", 400, "follow"},
	} {
		code, body := e.get(path + c.query)
		if code != c.code || code == 200 && body != c.want || !strings.Contains(body, c.want) {
			t.Errorf("%s: %d %q; want %d %q", c.query, code, body, c.code, c.want)
		}
	}
	for _, missing := range []string{"/containerLogs/default/no/main", "/containerLogs/default/web/no"} {
		if code, _ := e.get(missing); code != 404 {
			t.Errorf("%s: %d, want 404", missing, code)
		}
	}
}

func TestFollowEndsWithTheContainer(t *testing.T) {
	e := newEndpoint(t)
	p := pod("web", `for i in 1 2 3; do echo line $i; sleep 0.1; done`)
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	e.create(p)
	e.until("web", "started", func(p *corev1.Pod) bool {
		return p.Status.Phase == corev1.PodRunning || p.Status.Phase == corev1.PodSucceeded
	})
	if code, body := e.get("/containerLogs/default/web/main?follow=true"); code != 200 || body != "line 1\nline 2\nline 3\n" {
		t.Errorf("%d %q", code, body)
	}
}

func TestExec(t *testing.T) {
	e := newEndpoint(t)
	e.create(pod("web", "exec sleep 600"))
	e.ready("web")
	var out, errOut bytes.Buffer
	err := e.exec(remotecommand.StreamOptions{Stdin: strings.NewReader("typed\n"), Stdout: &out, Stderr: &errOut}, "sh", "-c",
		"cat; hostname; echo bad >&2; exit 5")
	var code exec.CodeExitError
	if !errors.As(err, &code) || code.Code != 5 {
		t.Errorf("exit: %v, want code 5", err)
	}
	if out.String() != "typed\nweb\n" || errOut.String() != "bad\n" {
		t.Errorf("stdout %q, stderr %q", out.String(), errOut.String())
	}
	// Much output is not cut off by the end of the process.
	out.Reset()
	if err := e.exec(remotecommand.StreamOptions{Stdout: &out}, "sh", "-c", "head -c 3000000 /dev/zero"); err != nil || out.Len() != 3000000 {
		t.Errorf("%d bytes, %v; want 3000000", out.Len(), err)
	}
	// A child that keeps the pipe does not hold up the answer forever.
	out.Reset()
	if err := e.exec(remotecommand.StreamOptions{Stdout: &out}, "sh", "-c", "sleep 600 & echo done"); err != nil || out.String() != "done\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	if err := e.exec(remotecommand.StreamOptions{Stdout: &out}, "no-such-command"); err == nil ||
		!strings.Contains(err.Error(), "no-such-command") {
		t.Errorf("no such command: %v", err)
	}
}

// sizes is a queue of one window size.
type sizes struct {
	ch chan remotecommand.TerminalSize
}

func (s sizes) Next() *remotecommand.TerminalSize {
	size, ok := <-s.ch
	if !ok {
		return nil
	}
	return &size
}

func TestExecTerminal(t *testing.T) {
	e := newEndpoint(t)
	e.create(pod("web", "exec sleep 600"))
	e.ready("web")
	queue := sizes{make(chan remotecommand.TerminalSize, 1)}
	queue.ch <- remotecommand.TerminalSize{Width: 91, Height: 31}
	in, type_ := io.Pipe()
	out := &logWriter{}
	ended := make(chan error, 1)
	go func() {
		ended <- e.exec(remotecommand.StreamOptions{Stdin: in, Stdout: out, Tty: true, TerminalSizeQueue: queue}, "sh")
	}()
	says := func(what string) {
		t.Helper()
		await(t, what, func() bool {
			out.mu.Lock()
			defer out.mu.Unlock()
			return strings.Contains(out.b.String(), what)
		})
	}
	fmt.Fprint(type_, "until [ \"$(stty size)\" = '31 91' ]; do sleep 0.01; done; echo it is $((30+1)) high; tty\n")
	says("it is 31 high")
	says("/dev/pts/")
	fmt.Fprint(type_, "exit 3\n")
	var code exec.CodeExitError
	if err := <-ended; !errors.As(err, &code) || code.Code != 3 {
		t.Errorf("exit: %v, want code 3", err)
	}
	type_.Close()
	close(queue.ch)
}

func TestPortForward(t *testing.T) {
	e := newEndpoint(t)
	e.create(server("web"))
	e.ready("web")
	u, err := url.Parse(e.url + "/portForward/default/web")
	if err != nil {
		t.Fatal(err)
	}
	rt, upgrader, err := spdy.RoundTripperFor(e.rest)
	if err != nil {
		t.Fatal(err)
	}
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: rt}, http.MethodPost, u)
	stop, ready := make(chan struct{}), make(chan struct{})
	var errs logWriter
	fw, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{"0:8080", "0:9"}, stop, ready, io.Discard, &errs)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- fw.ForwardPorts() }()
	<-ready
	ports, err := fw.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for range 3 {
		var body []byte
		await(t, "an answer", func() bool {
			res, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/", ports[0].Local))
			if err != nil {
				return false
			}
			defer res.Body.Close()
			body, err = io.ReadAll(res.Body)
			return err == nil
		})
		if !strings.HasPrefix(string(body), "127.0.0.1:") {
			t.Errorf("the pod saw %q, want its own loopback address", body)
		}
	}
	if res, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/", ports[1].Local)); err == nil {
		res.Body.Close()
		t.Error("a port that nothing listens on answered")
	}
	close(stop)
	<-done // client-go gives the whole up after one refused connection
}

func TestAttach(t *testing.T) {
	e := newEndpoint(t)
	p := pod("web", "while read x; do echo got $x; done; echo end; sleep 600")
	p.Spec.Containers[0].Stdin, p.Spec.Containers[0].StdinOnce = true, true
	e.create(p)
	e.ready("web")
	u, err := url.Parse(e.url + "/attach/default/web/main?input=1&output=1")
	if err != nil {
		t.Fatal(err)
	}
	x, err := remotecommand.NewSPDYExecutor(e.rest, http.MethodPost, u)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &logWriter{}
	ended := make(chan error, 1)
	go func() {
		ended <- x.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: strings.NewReader("one\n"), Stdout: out})
	}()
	await(t, "the answer", func() bool {
		out.mu.Lock()
		defer out.mu.Unlock()
		return out.b.String() == "got one\nend\n"
	})
	cancel()
	<-ended
}
