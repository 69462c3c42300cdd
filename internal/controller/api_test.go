package controller

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/controller/kittest"
)

// rig is a real API server and a client for the test itself.
type rig struct {
	testing.TB
	config *rest.Config
	client kubernetes.Interface
	ips    int // given to Pods of churn so far
}

func newRig(t testing.TB) *rig {
	t.Helper()
	config := rest.CopyConfig(apiservertest.Start(t))
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return &rig{TB: t, config: config, client: client}
}

// run starts controllers and returns what stops them; they stop at the end of
// the test anyway. It returns when they work.
func (r *rig) run(o Options) (stop func()) {
	r.Helper()
	if o.Config == nil {
		o.Config = r.config
	}
	started := make(chan struct{}, 1)
	o.Started = func() {
		select {
		case started <- struct{}{}:
		default:
		}
	}
	if os.Getenv("FAIRLEAD_TEST_LOG") != "" {
		o.Log = slog.New(slog.NewTextHandler(logTo{r}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, o) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				r.Errorf("Run: %v", err)
			}
		case <-time.After(20 * time.Second):
			r.Errorf("Run does not return")
		}
	})
	r.Cleanup(stop)
	select {
	case <-started:
	case err := <-done:
		done <- err
		r.Fatalf("Run returned early: %v", err)
	case <-time.After(30 * time.Second):
		r.Fatal("controllers do not start")
	}
	return stop
}

type logTo struct{ testing.TB }

func (l logTo) Write(p []byte) (int, error) {
	l.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// eventually polls until f is content.
func (r *rig) eventually(what string, f func() error) {
	r.Helper()
	r.within(20*time.Second, what, f)
}

func (r *rig) within(limit time.Duration, what string, f func() error) {
	r.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			r.Fatalf("%s: after %s still: %v", what, limit, err)
		}
		<-time.After(10 * time.Millisecond)
	}
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) namespace(name string) string {
	r.Helper()
	_, err := r.client.CoreV1().Namespaces().Create(context.Background(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	r.must(err)
	return name
}

// node makes a ready Node.
func (r *rig) node(name string, change ...func(*corev1.Node)) *corev1.Node {
	r.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: "z-" + name}}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now()}}
	for _, f := range change {
		f(n)
	}
	status := n.Status
	made, err := r.client.CoreV1().Nodes().Create(context.Background(), n, metav1.CreateOptions{})
	r.must(err)
	for {
		made.Status = status
		updated, err := r.client.CoreV1().Nodes().UpdateStatus(context.Background(), made, metav1.UpdateOptions{})
		if !apierrors.IsConflict(err) { // with a controller that is as fast
			r.must(err)
			return updated
		}
		made, err = r.client.CoreV1().Nodes().Get(context.Background(), name, metav1.GetOptions{})
		r.must(err)
	}
}

func (r *rig) service(namespace, name string, change ...func(*corev1.Service)) *corev1.Service {
	r.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	s.Spec.Selector = map[string]string{"app": name}
	s.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromInt32(9376)}}
	for _, f := range change {
		f(s)
	}
	made, err := r.client.CoreV1().Services(namespace).Create(context.Background(), s, metav1.CreateOptions{})
	r.must(err)
	return made
}

// pod makes a Pod that runs and is ready.
func (r *rig) pod(namespace, name, app, node, ip string) {
	r.Helper()
	made, err := r.client.CoreV1().Pods(namespace).Create(context.Background(), kittest.Pod(namespace, name, app, node),
		metav1.CreateOptions{})
	r.must(err)
	made.Status = runningStatus(ip, true)
	_, err = r.client.CoreV1().Pods(namespace).UpdateStatus(context.Background(), made, metav1.UpdateOptions{})
	r.must(err)
}

func runningStatus(ip string, ready bool) corev1.PodStatus {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	return corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status, LastTransitionTime: metav1.Now()}},
	}
}

func (r *rig) flip(namespace, name string, ready bool) {
	r.Helper()
	pod, err := r.client.CoreV1().Pods(namespace).Get(context.Background(), name, metav1.GetOptions{})
	r.must(err)
	pod.Status = runningStatus(pod.Status.PodIP, ready)
	_, err = r.client.CoreV1().Pods(namespace).UpdateStatus(context.Background(), pod, metav1.UpdateOptions{})
	r.must(err)
}

func (r *rig) killPod(namespace, name string) {
	r.Helper()
	now := int64(0)
	r.must(r.client.CoreV1().Pods(namespace).Delete(context.Background(), name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
}

func (r *rig) slices(namespace, service string) []discoveryv1.EndpointSlice {
	r.Helper()
	list, err := r.client.DiscoveryV1().EndpointSlices(namespace).List(context.Background(),
		metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service})
	r.must(err)
	return list.Items
}

// endpointsOf is what the slices of a Service say: "ip:port ready" sorted, IPv4
// only.
func (r *rig) endpointsOf(namespace, service string) []string {
	r.Helper()
	var out []string
	for _, s := range r.slices(namespace, service) {
		for _, e := range s.Endpoints {
			for _, p := range s.Ports {
				for _, a := range e.Addresses {
					out = append(out, fmt.Sprintf("%s:%d %v", a, *p.Port, *e.Conditions.Ready))
				}
			}
		}
	}
	slices.Sort(out)
	return out
}

func (r *rig) wantEndpoints(namespace, service string, want ...string) {
	r.Helper()
	r.eventually("endpoints of "+service, func() error {
		if got := r.endpointsOf(namespace, service); !slices.Equal(got, want) {
			return fmt.Errorf("%q, want %q", got, want)
		}
		return nil
	})
}

// faults lets one request in every n fail: refused with a conflict, an internal
// error, or a timeout. Of the timeouts half were carried out all the same.
type faults struct {
	next http.RoundTripper
	n    int
	on   *atomic.Bool
}

func (f *faults) RoundTrip(req *http.Request) (*http.Response, error) {
	watch := req.URL.Query().Get("watch") != ""
	if !f.on.Load() || watch || rand.IntN(f.n) > 0 {
		return f.next.RoundTrip(req)
	}
	codes := []int{http.StatusInternalServerError, http.StatusGatewayTimeout, http.StatusGatewayTimeout}
	if req.Method == http.MethodPut || req.Method == http.MethodPatch {
		codes = append(codes, http.StatusConflict)
	}
	kind := rand.IntN(len(codes))
	if kind == 2 { // carried out, and the answer is lost
		resp, err := f.next.RoundTrip(req)
		if err != nil {
			return nil, err
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	} else if req.Body != nil {
		_ = req.Body.Close()
	}
	code := codes[kind]
	reason := map[int]metav1.StatusReason{500: metav1.StatusReasonInternalError, 504: metav1.StatusReasonTimeout,
		409: metav1.StatusReasonConflict}[code]
	body := fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","message":"injected","reason":%q,"code":%d}`, reason, code)
	return &http.Response{
		StatusCode: code, Status: http.StatusText(code), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewBufferString(body)),
		ContentLength: int64(len(body)),
	}, nil
}

// faulty is the rig's configuration with one request in ten failing until the
// returned function is called.
func (r *rig) faulty() (*rest.Config, func()) {
	config := rest.CopyConfig(r.config)
	on := &atomic.Bool{}
	on.Store(true)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &faults{next: next, n: 10, on: on} })
	return config, func() { on.Store(false) }
}
