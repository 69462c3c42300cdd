package asking

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/cri-streaming/pkg/streaming/portforward"

	"github.com/fairlead/fairlead/internal/runner/api"
)

// forwarder joins streams to the loopback device, as a kubelet does for a Pod of the node's network.
type forwarder struct{}

func (forwarder) PortForward(ctx context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	defer stream.Close()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	defer conn.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(conn, stream)
	}()
	_, err = io.Copy(stream, conn)
	_ = stream.Close()
	_ = conn.Close()
	<-done
	return err
}

// A node without an agent is asked by the Pod of its proxy, if the user may forward ports to it. If not, the error names the
// missing right.
func TestGetByProxy(t *testing.T) {
	proxy := httptest.NewServer(handler(map[string]api.View{"explain": func(_ context.Context, q url.Values) (any, error) {
		return "proxy of " + q.Get("service"), nil
	}}))
	defer proxy.Close()
	_, port, _ := net.SplitHostPort(proxy.Listener.Addr().String())
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, nothing, _ := net.SplitHostPort(closed.Addr().String())
	closed.Close()
	refuse := func(w http.ResponseWriter, code int, reason metav1.StatusReason) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status: metav1.StatusFailure, Reason: reason, Code: int32(code)})
	}
	otherNode := func(p *corev1.Pod) { p.Spec.NodeName = "other" }
	for name, test := range map[string]struct {
		node      string // what the API server answers for it; empty for no agent
		forbidden string // a part of the paths that are
		port      string
		pod       func(*corev1.Pod)
		want, why string
		there     bool
	}{
		"an agent":                 {node: "agent", want: "agent"},
		"a proxy":                  {want: `"proxy of shop/web"`},
		"no right to nodes":        {forbidden: "/nodes/", want: `"proxy of shop/web"`},
		"no right to forward":      {forbidden: "/portforward", why: "create pods/portforward in kube-system to ask its proxy, Pod", there: true},
		"no right to list":         {forbidden: "/pods", why: "the rights to list pods and create pods/portforward in kube-system", there: true},
		"no right at all":          {forbidden: "/", why: "get nodes/proxy to ask it, or, where only fairlead proxy runs", there: true},
		"nothing listens":          {port: nothing, why: "its proxy, Pod kube-system/p, does not answer: ", there: true},
		"no Pod":                   {pod: otherNode, why: "has no ready Pod of fairlead proxy"},
		"not the node's Pod":       {pod: func(p *corev1.Pod) { p.Spec.HostNetwork = false }, why: "kube-system has no ready Pod"},
		"a Pod that has not begun": {pod: func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }, why: "kube-system has no ready Pod"},
	} {
		t.Run(name, func(t *testing.T) {
			p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "p"},
				Spec: corev1.PodSpec{NodeName: "n1", HostNetwork: true, Containers: []corev1.Container{{
					Args: []string{"proxy", "--metrics-bind-address=127.0.0.1:" + port}}}},
				Status: corev1.PodStatus{Phase: corev1.PodRunning}}
			if test.port != "" {
				p.Spec.Containers[0].Args = []string{"--metrics-bind-address", "127.0.0.1:" + test.port}
			}
			if test.pod != nil {
				test.pod(&p)
			}
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch {
				case test.forbidden != "" && strings.Contains(r.URL.Path, test.forbidden):
					refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden)
				case r.URL.Path == "/api/v1/nodes/n1/proxy/explain" && test.node != "":
					_, _ = io.WriteString(w, test.node)
				case r.URL.Path == "/api/v1/namespaces/kube-system/pods" && r.URL.Query().Get("labelSelector") == labels:
					w.Header().Set("Content-Type", "application/json")
					_ = json.NewEncoder(w).Encode(corev1.PodList{Items: []corev1.Pod{p}})
				case r.URL.Path == "/api/v1/namespaces/kube-system/pods/p/portforward":
					o, err := portforward.NewV4Options(r)
					if err != nil {
						t.Error(err)
					}
					portforward.ServePortForward(w, r, forwarder{}, "p", "", o, time.Minute, time.Minute, portforward.SupportedProtocols)
				default:
					refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
				}
			}))
			defer server.Close()
			cfg := &rest.Config{Host: server.URL}
			got, err := For(kubernetes.NewForConfigOrDie(cfg), cfg).Get(t.Context(), "n1", "explain", url.Values{"service": {"shop/web"}})
			if test.why == "" {
				if err != nil || strings.TrimSpace(string(got)) != test.want {
					t.Errorf("%q, %v", got, err)
				}
				return
			}
			if err == nil {
				t.Fatalf("an answer: %q", got)
			}
			if why := WhyNot(err); !strings.Contains(why, test.why) || ThereItself(err) != test.there {
				t.Errorf("%q, there itself: %t", why, ThereItself(err))
			}
		})
	}
}

// On the node itself the proxy answers on loopback, if it is that node's.
func TestGetHere(t *testing.T) {
	views := handler(map[string]api.View{"explain": func(context.Context, url.Values) (any, error) { return "here", nil }})
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/status" {
			_, _ = io.WriteString(w, `{"node":"n1"}`)
			return
		}
		views.ServeHTTP(w, r)
	}))
	defer proxy.Close()
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	cfg := &rest.Config{Host: server.URL}
	client := kubernetes.NewForConfigOrDie(cfg)
	for node, want := range map[string]bool{"n1": true, "n2": false} {
		n := FromHere(client, cfg)
		if _, port, _ := net.SplitHostPort(n.here); port != strconv.Itoa(defaultPort) {
			t.Errorf("asks %s", n.here)
		}
		n.here = proxy.Listener.Addr().String()
		got, err := n.Get(t.Context(), node, "explain", nil)
		if (err == nil) != want || want && strings.TrimSpace(string(got)) != `"here"` {
			t.Errorf("%s: %q, %v", node, got, err)
		}
	}
	if _, err := For(client, cfg).Get(t.Context(), "n1", "explain", nil); err == nil {
		t.Error("a server has asked its own machine for a user")
	}
}

func handler(views map[string]api.View) http.Handler {
	mux := http.NewServeMux()
	for path, h := range api.OnLoopback(views) {
		mux.Handle(path, h)
	}
	return mux
}

// A server, or a proxy on the way to it, that takes a connection and says nothing ends no question late.
func TestSilence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var taking sync.WaitGroup
	taking.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			taking.Go(func() { _, _ = io.Copy(io.Discard, conn); _ = conn.Close() })
		}
	})
	defer taking.Wait()
	defer l.Close()
	silent := "http://" + l.Addr().String()
	for name, cfg := range map[string]*rest.Config{
		"server": {Host: silent},
		"proxy":  {Host: "http://198.51.100.1", Proxy: func(*http.Request) (*url.URL, error) { return url.Parse(silent) }},
		"dialer": {Host: silent, Dial: (&net.Dialer{}).DialContext},
	} {
		n := For(kubernetes.NewForConfigOrDie(cfg), cfg)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		began := time.Now()
		if conn, err := n.dial(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "p"}}); err == nil {
			_ = conn.Close()
			t.Errorf("%s: it has answered", name)
		}
		cancel()
		if took := time.Since(began); took > Timeout/2 {
			t.Errorf("%s: given up after %s", name, took)
		}
	}
}
