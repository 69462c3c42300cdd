package chain

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/testbed"
)

// lockedBuffer may be read while the server logs.
type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestMain runs the tests in a network namespace that only has loopback: no other program takes a free port there.
func TestMain(m *testing.M) { testbed.Main(m) }

// ports are the ports that freePort returned. They are beside the ports that the kernel gives to connections
// (net.ipv4.ip_local_port_range), so that no connection takes one before its server does.
var ports atomic.Int32

// freePort returns a port that is free for UDP and TCP, and each port once.
func freePort(t *testing.T) int {
	t.Helper()
	if port := 10000 + int(ports.Add(1)); port < 30000 {
		return port
	}
	t.Fatal("no free port")
	return 0
}

// upstream is a resolver that answers A with 203.0.113.7 and counts the questions for each name.
// Names below "nx." do not exist, names below "fail." are SERVFAIL, names below "silent." get no answer.
type upstream struct {
	addr  string
	asked sync.Map // name → *atomic.Int32
	tcp   atomic.Int32
}

func (u *upstream) count(name string) int32 {
	v, _ := u.asked.LoadOrStore(strings.ToLower(name), new(atomic.Int32))
	return v.(*atomic.Int32).Load()
}

func startUpstream(t *testing.T) *upstream {
	t.Helper()
	u := &upstream{addr: fmt.Sprintf("127.0.0.1:%d", freePort(t))}
	handler := mdns.HandlerFunc(func(w mdns.ResponseWriter, q *mdns.Msg) {
		m := new(mdns.Msg).SetReply(q)
		m.RecursionAvailable = true
		name := q.Question[0].Name
		v, _ := u.asked.LoadOrStore(strings.ToLower(name), new(atomic.Int32))
		v.(*atomic.Int32).Add(1)
		if w.RemoteAddr().Network() == "tcp" {
			u.tcp.Add(1)
		}
		soa, _ := mdns.NewRR("example. 60 IN SOA ns.example. h.example. 1 2 3 4 60")
		switch lower := strings.ToLower(name); {
		case strings.Contains(lower, "silent."):
			return
		case strings.Contains(lower, "nx."):
			m.Rcode, m.Ns = mdns.RcodeNameError, []mdns.RR{soa}
		case strings.Contains(lower, "fail."):
			m.Rcode = mdns.RcodeServerFailure
		case q.Question[0].Qtype == mdns.TypeA:
			rr, _ := mdns.NewRR(name + " 300 IN A 203.0.113.7")
			m.Answer = []mdns.RR{rr}
		default:
			m.Ns = []mdns.RR{soa}
		}
		_ = w.WriteMsg(m)
	})
	for _, network := range []string{"udp", "tcp"} {
		started := make(chan struct{})
		s := &mdns.Server{Addr: u.addr, Net: network, Handler: handler, NotifyStartedFunc: func() { close(started) }}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := s.ListenAndServe(); err != nil {
				t.Error(err)
			}
		}()
		select {
		case <-started:
		case <-time.After(10 * time.Second):
			t.Fatal("the resolver did not start")
		}
		t.Cleanup(func() {
			if err := s.Shutdown(); err != nil {
				t.Error(err)
			}
			<-ended
		})
	}
	return u
}

// objects are a small cluster.
func objects() []runtime.Object {
	port, ready := int32(80), true
	name, protocol := "http", corev1.ProtocolTCP
	meta := func(n string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "default", Name: n} }
	return []runtime.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
		&corev1.Service{ObjectMeta: meta("web"), Spec: corev1.ServiceSpec{
			ClusterIP: "10.96.0.5", ClusterIPs: []string{"10.96.0.5"}, Ports: []corev1.ServicePort{{Name: name, Port: port, Protocol: protocol}},
		}},
		&corev1.Service{ObjectMeta: meta("ext"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "www.example.com"}},
		&corev1.Service{ObjectMeta: meta("gone"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "nx.example.com"}},
		&discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.9"}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
			Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
		},
		&corev1.Pod{ObjectMeta: meta("client"), Status: corev1.PodStatus{PodIP: "127.0.0.1", Phase: corev1.PodRunning}},
	}
}

// running is a server under test.
type running struct {
	t    *testing.T
	s    *Server
	dns  string
	web  string
	file string
	log  *lockedBuffer
	end  func() error
	// ended holds the error of the server that has ended.
	ended chan error
	// blocked has further lists of the API server fail.
	blocked atomic.Bool
}

// start serves a Corefile, with PORT, WEB and UP replaced.
func start(t *testing.T, text string, up *upstream) *running {
	t.Helper()
	return startWith(t, text, up, nil)
}

// startWith is start with a channel that has the file read again.
func startWith(t *testing.T, text string, up *upstream, again <-chan os.Signal) *running {
	t.Helper()
	r := &running{t: t, log: &lockedBuffer{}, file: filepath.Join(t.TempDir(), "Corefile")}
	port, web := freePort(t), freePort(t)
	r.dns, r.web = fmt.Sprintf("127.0.0.1:%d", port), fmt.Sprintf("127.0.0.1:%d", web)
	r.write(r.fill(text, up))
	plan, err := corefile.Load(r.file)
	if err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset(objects()...)
	client.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		return r.blocked.Load(), nil, errors.New("blocked by the test")
	})
	client.PrependWatchReactor("*", func(clienttesting.Action) (bool, watch.Interface, error) {
		return r.blocked.Load(), nil, errors.New("blocked by the test")
	})
	r.s, err = New(Options{
		Plan: plan, File: r.file, Reload: again, Version: "test", Log: slog.New(slog.NewTextHandler(r.log, nil)),
		Client: func(string, string) (kubernetes.Interface, error) { return client, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	r.s.syncFor = 3 * time.Second
	ctx, cancel := context.WithCancel(context.Background())
	r.ended = make(chan error, 1)
	go func() { r.ended <- r.s.Run(ctx) }()
	r.end = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-r.ended:
			return err
		case <-time.After(20 * time.Second):
			return fmt.Errorf("the server does not end")
		}
	})
	t.Cleanup(func() { _ = r.end() })
	r.eventually("ready", r.s.Ready)
	return r
}

func (r *running) fill(text string, up *upstream) string {
	_, port, _ := net.SplitHostPort(r.dns)
	out := strings.NewReplacer("PORT", port, "WEB", r.web).Replace(text)
	if up != nil {
		out = strings.ReplaceAll(out, "UP", up.addr)
	}
	return out
}

func (r *running) write(text string) {
	r.t.Helper()
	if err := os.WriteFile(r.file, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func (r *running) eventually(what string, ok func() bool) {
	r.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); <-tick.C {
		if ok() {
			return
		}
		select {
		case err := <-r.ended:
			r.ended <- err
			if ok() {
				return
			}
			r.t.Fatalf("the server ended before %s: %v\n%s", what, err, r.log)
		default:
		}
	}
	r.t.Fatalf("not in twenty seconds: %s\n%s", what, r.log)
}

// ask asks over TCP and returns the answer.
func (r *running) ask(name string, typ uint16) *mdns.Msg {
	r.t.Helper()
	m, _, err := (&mdns.Client{Net: "tcp", Timeout: 10 * time.Second}).Exchange(new(mdns.Msg).SetQuestion(name, typ), r.dns)
	if err != nil {
		r.t.Fatalf("%s: %v\n%s", name, err, r.log)
	}
	return m
}

// line returns an answer in one line: the code, and the records without class.
func line(m *mdns.Msg) string {
	out := []string{mdns.RcodeToString[m.Rcode]}
	for _, rrs := range [][]mdns.RR{m.Answer, m.Ns} {
		for _, rr := range rrs {
			text := strings.Join(strings.Fields(rr.String()), " ")
			if rr.Header().Rrtype == mdns.TypeSOA {
				text = regexp.MustCompile(` SOA .*`).ReplaceAllString(text, " SOA")
			}
			out = append(out, strings.Replace(text, " IN ", " ", 1))
		}
	}
	return strings.Join(out, "; ")
}

func (r *running) want(name string, typ uint16, want string) {
	r.t.Helper()
	if got := line(r.ask(name, typ)); got != want {
		r.t.Errorf("%s %s: %s\nwant %s\n%s", name, mdns.Type(typ), got, want, r.log)
	}
}

func (r *running) get(path string) (int, string) {
	r.t.Helper()
	resp, err := (&http.Client{Timeout: 10 * time.Second}).Get("http://" + r.web + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text)
}

const kubeadm = `.:PORT {
    errors
    health WEB {
       lameduck 0s
    }
    ready WEB
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus WEB
    forward . UP {
       max_concurrent 1000
    }
    cache 30 {
       disable success cluster.local
       disable denial cluster.local
    }
    loop
    reload 2s 0s
    loadbalance
}
`
