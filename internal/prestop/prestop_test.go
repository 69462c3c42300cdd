package prestop

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

const port = 10263

// rig is a running Server in the network namespace of the test, which has no Pods: only their addresses count.
type rig struct {
	*testing.T
	server     *Server
	client     *fake.Clientset
	slices     reflector.Sink[*discoveryv1.EndpointSlice]
	controlled atomic.Bool
	stop       context.CancelFunc
	ended      chan struct{}
}

func newRig(t *testing.T, pods ...*corev1.Pod) *rig {
	t.Helper()
	r := &rig{T: t, client: fake.NewClientset()}
	r.controlled.Store(true)
	r.server = New(Options{
		Client: r.client, NodeName: "here", Port: port, Wait: time.Minute, Controlled: r.controlled.Load,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	// A packet needs a way, and a source, before it is led elsewhere.
	for pods, source := range map[string]string{"10.244.1.0/24": "127.0.0.1", "fd00:10:244:1::/64": "::1"} {
		if out, err := exec.Command("ip", "route", "replace", pods, "dev", "lo", "src", source).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	none := func(*discoveryv1.EndpointSlice) {}
	r.slices = r.server.Follow(reflector.Sink[*discoveryv1.EndpointSlice]{Set: none, Delete: none})
	for _, p := range pods {
		if _, err := r.client.CoreV1().Pods(p.Namespace).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	var ctx context.Context
	ctx, r.stop = context.WithCancel(context.Background())
	r.ended = make(chan struct{})
	go func() {
		defer close(r.ended)
		_ = r.server.Run(ctx)
	}()
	t.Cleanup(func() {
		r.stop()
		<-r.ended
		if err := link.CloseInward(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// ask sends the request of a kubelet to an address of a Pod, and returns the text of the answer.
func ask(ctx context.Context, address string) (string, error) {
	url := fmt.Sprintf("http://%s/drain", net.JoinHostPort(address, fmt.Sprint(port)))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	res, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return strings.TrimSpace(string(text)), err
}

// answers waits until requests of an address are answered with a result.
func (r *rig) answers(address string, want outcome) {
	r.Helper()
	testbed.Until(r.T, "the answer "+string(want)+" at "+address, func() error {
		ctx, cancel := context.WithTimeout(r.Context(), testbed.Patience)
		defer cancel()
		if got, err := ask(ctx, address); err != nil || got != string(want) {
			return fmt.Errorf("%q, %w", got, err)
		}
		return nil
	})
}

func (r *rig) update(p *corev1.Pod) {
	r.Helper()
	if _, err := r.client.CoreV1().Pods(p.Namespace).Update(r.Context(), p, metav1.UpdateOptions{}); err != nil {
		r.Fatal(err)
	}
}

// begin sends a request that is not answered yet.
func (r *rig) begin(address string) <-chan string {
	r.Helper()
	out := make(chan string, 1)
	waits := testutil.ToFloat64(r.server.metrics.waiting)
	go func() {
		text, err := ask(r.Context(), address)
		if err != nil {
			text = err.Error()
		}
		out <- text
	}()
	testbed.Until(r.T, "a request that waits", func() error {
		if n := testutil.ToFloat64(r.server.metrics.waiting); n <= waits {
			return fmt.Errorf("%v wait", n)
		}
		return nil
	})
	return out
}

// The kernel leads what root's processes send to the port of a Pod here, and nothing else; the answer comes when the Pod is
// drained or gone, and at once if there is nothing to wait for.
func TestAnswers(t *testing.T) {
	web, other, gone := madePod("web", "10.244.1.7", "fd00:10:244:1::7"), madePod("other", "10.244.1.8"), madePod("gone", "10.244.1.9")
	r := newRig(t, web, other, gone)
	r.slices.Set(slice("x", true, "web", "gone"))
	r.answers("10.244.1.7", restarted) // by a look at the API
	r.answers("fd00:10:244:1::7", restarted)
	r.update(ends(other, 30))
	r.answers("10.244.1.8", unselected)

	r.update(ends(web, 120))
	first, second := r.begin("10.244.1.7"), r.begin("fd00:10:244:1::7")
	r.controlled.Store(false)
	r.answers("10.244.1.7", uncontrolled)
	r.controlled.Store(true)
	select {
	case text := <-first:
		t.Fatalf("a request is answered with %q before the Pod is drained", text)
	default:
	}
	r.update(hasDrained(ends(web, 120)))
	for _, answer := range []<-chan string{first, second} {
		if text := testbed.Receive(t, "the answer", answer); text != string(drained) {
			t.Errorf("the answer is %q", text)
		}
	}
	r.answers("10.244.1.7", drained) // another container of the Pod
	if n := testutil.CollectAndCount(r.server, "fairlead_prestop_wait_seconds"); n != 1 {
		t.Errorf("%d histograms", n)
	}

	r.update(ends(gone, 120))
	waits := r.begin("10.244.1.9")
	if err := r.client.CoreV1().Pods("default").Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if text := testbed.Receive(t, "the answer", waits); text != string(drained) {
		t.Errorf("the answer for a Pod that is gone is %q", text)
	}
	testbed.Until(t, "the end of the way to an address without a Pod", func() error {
		out, err := exec.Command("nft", "list", "table", "ip", "fairlead-drain").CombinedOutput()
		if err == nil && strings.Contains(string(out), "10.244.1.9") {
			err = errors.New(string(out))
		}
		return err
	})
	// An address of the machine is no Pod's: the connection is closed unread.
	before := testutil.ToFloat64(r.server.metrics.rejected)
	if text, err := ask(t.Context(), "127.0.0.1"); err == nil {
		t.Errorf("127.0.0.1 answers %q", text)
	}
	if n := testutil.ToFloat64(r.server.metrics.rejected); n <= before {
		t.Errorf("%v connections were closed unread", n)
	}
}

// A Pod that is never drained waits for half of its grace period and no longer, and that is reported.
func TestADrainThatNeverEnds(t *testing.T) {
	begin := time.Now()
	r := newRig(t, ends(madePod("web", "10.244.1.7"), 2))
	r.slices.Set(slice("x", true, "web"))
	r.answers("10.244.1.7", late)
	if took := time.Since(begin); took < time.Second {
		t.Errorf("the answer came after %s, want half of the grace period", took)
	}
	testbed.Until(t, "the Event", func() error {
		list, err := r.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) == 0 || list.Items[0].Reason != "NotDrained" || list.Items[0].InvolvedObject.Name != "web" {
			return fmt.Errorf("%v, %w", list.Items, err)
		}
		return nil
	})
}

// Connections and requests without end do not keep a kubelet's from an answer for long, whoever sends them.
func TestFlood(t *testing.T) {
	r := newRig(t, ends(madePod("web", "10.244.1.7"), 120), ends(madePod("other", "10.244.1.8"), 120))
	r.slices.Set(slice("x", true, "web"))
	r.answers("10.244.1.8", unselected)
	open := func(text string) net.Conn {
		t.Helper()
		c, err := net.DialTimeout("tcp", net.JoinHostPort("10.244.1.7", fmt.Sprint(port)), testbed.Patience)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := io.WriteString(c, text); err != nil {
			t.Logf("write: %v", err) // it is closed already
		}
		return c
	}
	// One with a body that never comes is answered.
	c := open("POST /drain HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
	_ = c.SetDeadline(time.Now().Add(testbed.Patience))
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, " 400 ") {
		t.Errorf("a request with a body gets %q, %v", line, err)
	}
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Errorf("its connection is not closed: %v", err)
	}
	for range maxAsking {
		open("GET /drain HTTP/1.1\r\nHost: x\r\n\r\n")
	}
	testbed.Until(t, "requests that wait", func() error {
		if n := testutil.ToFloat64(r.server.metrics.waiting); n != maxAsking {
			return fmt.Errorf("%v wait, want %d", n, maxAsking)
		}
		return nil
	})
	r.answers("10.244.1.7", busy)
	r.answers("10.244.1.8", unselected) // another Pod
	before := testutil.ToFloat64(r.server.metrics.rejected)
	for range maxConnections + 10 {
		open("GET")
	}
	testbed.Until(t, "connections that are closed at once", func() error {
		if n := testutil.ToFloat64(r.server.metrics.rejected) - before; n < 10 {
			return fmt.Errorf("%v", n)
		}
		return nil
	})
	r.answers("10.244.1.8", unselected) // once half requests have timed out
}

// When the proxy ends, requests that wait are answered still; then the port refuses connections at once, and Pods end.
func TestEnd(t *testing.T) {
	web := ends(madePod("web", "10.244.1.7"), 120)
	r := newRig(t, web)
	r.slices.Set(slice("x", true, "web"))
	testbed.Until(t, "the way to the server", func() error {
		c, err := net.DialTimeout("tcp", net.JoinHostPort("10.244.1.7", fmt.Sprint(port)), time.Second)
		if err == nil {
			_ = c.Close()
		}
		return err
	})
	waits := r.begin("10.244.1.7")
	r.stop()
	r.update(hasDrained(web))
	if text := testbed.Receive(t, "the answer", waits); text != string(drained) {
		t.Errorf("the answer is %q", text)
	}
	testbed.Receive(t, "the end", r.ended)
	if _, err := ask(t.Context(), "10.244.1.7"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after the end: %v, want refused", err)
	}
}
