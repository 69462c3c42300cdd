package apiserver_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	forward "k8s.io/cri-streaming/pkg/streaming/portforward"
	remote "k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/svc"
)

// agent stands in for a node's agent: it answers on a kubelet's paths, and
// only a client with the server's certificate.
type agent struct {
	*httptest.Server
	node      *corev1.Node
	measured  atomic.Pointer[types.UID] // the Pod in its summaries
	summaries atomic.Int32              // how many were asked for
}

func startAgent(t *testing.T, s *apiserver.Server, name string) *agent {
	t.Helper()
	a := &agent{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /containerLogs/{ns}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "log of %s/%s/%s %s\n", r.PathValue("ns"), r.PathValue("pod"), r.PathValue("container"), r.URL.RawQuery)
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "agent status") })
	mux.HandleFunc("GET /stats/summary", a.summary)
	mux.HandleFunc("/exec/{ns}/{pod}/{container}", echo{}.exec)
	mux.HandleFunc("/portForward/{ns}/{pod}", echo{}.forward)
	a.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if got := r.TLS.PeerCertificates[0].Subject.CommonName; got != svc.ServerUser {
			http.Error(w, "wrong client "+got, http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	cert, hash := selfSigned(t)
	a.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots(t, s)}
	a.Config.ErrorLog = log.New(io.Discard, "", 0)
	a.StartTLS()
	t.Cleanup(a.Close)
	at := netip.MustParseAddrPort(a.Listener.Addr().String())
	a.node = &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"fairlead.dev/serving-cert-sha256": hash}},
		Status: corev1.NodeStatus{
			Addresses:       []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: at.Addr().String()}},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: int32(at.Port())}},
		},
	}
	return a
}

func selfSigned(t *testing.T) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, hex.EncodeToString(sum[:])
}

func TestStreams(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	c := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	a := startAgent(t, s, "n1")
	liar := startAgent(t, s, "liar")
	liar.node.Annotations["fairlead.dev/serving-cert-sha256"] = a.node.Annotations["fairlead.dev/serving-cert-sha256"]
	bare := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "bare"}}
	for _, n := range []*corev1.Node{a.node, liar.node, bare} {
		if _, err := c.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.CoreV1().Pods("default").Create(t.Context(), podNamed("on-"+n.Name, onNode(n.Name)), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.CoreV1().Pods("default").Create(t.Context(), podNamed("two", onNode("n1"), func(p *corev1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Image: "host"})
	}), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Run("log", func(t *testing.T) { testLog(t, c) })
	t.Run("exec", func(t *testing.T) { testExec(t, s, c) })
	t.Run("port forward", func(t *testing.T) { testPortForward(t, s, c) })
	t.Run("node proxy", func(t *testing.T) {
		raw, err := c.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes/n1/proxy/status").DoRaw(t.Context())
		if err != nil || string(raw) != "agent status" {
			t.Errorf("got %q, %v", raw, err)
		}
	})
}

func testLog(t *testing.T, c *kubernetes.Clientset) {
	for _, l := range []struct {
		pod, want, wantErr string
		o                  corev1.PodLogOptions
	}{
		{pod: "on-n1", want: "log of default/on-n1/c \n"},
		{pod: "on-n1", o: corev1.PodLogOptions{Follow: true, TailLines: new(int64(5)), Timestamps: true},
			want: "log of default/on-n1/c follow=true&tailLines=5&timestamps=true\n"},
		{pod: "two", o: corev1.PodLogOptions{Container: "d"}, want: "log of default/two/d \n"},
		{pod: "two", wantErr: "choose one of: [c d]"},
		{pod: "two", o: corev1.PodLogOptions{Container: "x"}, wantErr: "container x is not valid for pod two"},
		{pod: "on-n1", o: corev1.PodLogOptions{TailLines: new(int64(-1))}, wantErr: "tailLines"},
		{pod: "on-liar", wantErr: "the agent's certificate has hash"},
		{pod: "on-bare", wantErr: "has no InternalIP"},
		{pod: "missing", wantErr: "not found"},
	} {
		var raw []byte
		stream, err := c.CoreV1().Pods("default").GetLogs(l.pod, &l.o).Stream(t.Context())
		if err == nil {
			raw, err = io.ReadAll(stream)
			stream.Close()
		}
		if l.wantErr != "" {
			if err == nil || !strings.Contains(err.Error(), l.wantErr) {
				t.Errorf("%s: got %v, want %q", l.pod, err, l.wantErr)
			}
		} else if err != nil || string(raw) != l.want {
			t.Errorf("%s: got %q, %v, want %q", l.pod, raw, err, l.want)
		}
	}
}

// testExec runs a command over both protocols that clients speak.
func testExec(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	u := c.CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name("on-n1").SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Command: []string{"cat", "-"}, Stdin: true, Stdout: true, Stderr: true},
			scheme.ParameterCodec).URL()
	spdyExec, err := remotecommand.NewSPDYExecutor(s.LoopbackConfig(), "POST", u)
	if err != nil {
		t.Fatal(err)
	}
	wsExec, err := remotecommand.NewWebSocketExecutor(s.LoopbackConfig(), "GET", u.String())
	if err != nil {
		t.Fatal(err)
	}
	for name, e := range map[string]remotecommand.Executor{"SPDY": spdyExec, "WebSocket": wsExec} {
		var out, errOut bytes.Buffer
		err := e.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdin: strings.NewReader("hello"), Stdout: &out, Stderr: &errOut})
		if err == nil || !strings.Contains(err.Error(), "exit code 3") {
			t.Errorf("%s: got %v, want exit code 3", name, err)
		}
		if out.String() != "[cat -] hello" || errOut.String() != "to stderr" {
			t.Errorf("%s: out %q, err %q", name, out.String(), errOut.String())
		}
	}
}

func testPortForward(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	u := c.CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name("on-n1").SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	tunnel, err := portforward.NewSPDYOverWebsocketDialer(u, s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	for _, dialer := range []struct {
		name string
		dial func() (*portforward.PortForwarder, chan struct{}, error)
	}{
		{"SPDY", func() (*portforward.PortForwarder, chan struct{}, error) {
			stop := make(chan struct{})
			f, err := portforward.New(spdy.NewDialer(upgrader, &http.Client{Transport: transport}, "POST", u), []string{"0:8080"}, stop,
				make(chan struct{}), io.Discard, io.Discard)
			return f, stop, err
		}},
		{"WebSocket", func() (*portforward.PortForwarder, chan struct{}, error) {
			stop := make(chan struct{})
			f, err := portforward.New(tunnel, []string{"0:8080"}, stop, make(chan struct{}), io.Discard, io.Discard)
			return f, stop, err
		}},
	} {
		f, stop, err := dialer.dial()
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- f.ForwardPorts() }()
		select {
		case <-f.Ready:
		case err := <-done:
			t.Fatalf("%s: %v", dialer.name, err)
		}
		ports, err := f.GetPorts()
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", ports[0].Local))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, "ping")
		conn.(*net.TCPConn).CloseWrite()
		got, err := io.ReadAll(conn)
		if err != nil || string(got) != "8080:ping" {
			t.Errorf("%s: got %q, %v", dialer.name, got, err)
		}
		conn.Close()
		close(stop)
		<-done
	}
}

// echo is a container in which every command prints itself and its input, and
// every port answers with its number and what it got.
type echo struct{}

func (echo) ExecInContainer(_ context.Context, _, _, _ string, cmd []string, in io.Reader, out, errOut io.WriteCloser, _ bool,
	_ <-chan remote.TerminalSize, _ time.Duration) error {
	text, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%v %s", cmd, text)
	fmt.Fprint(errOut, "to stderr")
	return utilexec.CodeExitError{Err: errors.New("exit"), Code: 3}
}

func (echo) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	text, err := io.ReadAll(stream)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stream, "%d:%s", port, text)
	return err
}

func (e echo) exec(w http.ResponseWriter, r *http.Request) {
	o, err := remote.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	remote.ServeExec(w, r, e, r.PathValue("pod"), "", r.PathValue("container"), r.URL.Query()["command"], o,
		time.Minute, time.Minute, remote.SupportedStreamingProtocols)
}

func (e echo) forward(w http.ResponseWriter, r *http.Request) {
	o, err := forward.NewV4Options(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	forward.ServePortForward(w, r, e, r.PathValue("pod"), "", o, time.Minute, time.Minute, forward.SupportedProtocols)
}
