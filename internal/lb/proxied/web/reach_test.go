package web

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/testbed"
)

// dark is a Pod whose node does not answer: what connects to it hangs.
func (r *rig) dark() netip.AddrPort {
	r.Helper()
	_, at := r.backlog()
	r.darken(at)
	return at
}

// backlog is a Pod at a socket that accepts one connection, until darken or another call does.
func (r *rig) backlog() (fd int, at netip.AddrPort) {
	r.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	r.Must(err)
	r.Cleanup(func() { _ = syscall.Close(fd) })
	r.Must(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	r.Must(syscall.Listen(fd, 0))
	name, err := syscall.Getsockname(fd)
	r.Must(err)
	return fd, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(name.(*syscall.SockaddrInet4).Port))
}

// darken fills the backlog of a Pod.
func (r *rig) darken(at netip.AddrPort) {
	for {
		c, err := net.DialTimeout("tcp", at.String(), 300*time.Millisecond)
		if err != nil {
			return
		}
		r.Cleanup(func() { _ = c.Close() })
	}
}

// An answer has to begin within the request timeout, and may then take its time; fields that pass for others do not go on.
func TestRequestTimeout(t *testing.T) {
	for _, version := range []int{1, 2} {
		r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-request-timeout": "1"})
		release := make(chan struct{})
		r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
			if len(q.Header["X_real_ip"]) > 0 || q.Header.Get("X-Other") == "" {
				t.Error(q.Header)
			}
			if q.URL.Path == "/silent" {
				<-q.Context().Done()
				return
			}
			_ = http.NewResponseController(w).Flush()
			<-release
			_, _ = io.WriteString(w, "late")
		}))
		client := r.clientOf(version)
		get := func(path string) *http.Response {
			q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.At.String()+path, nil)
			r.Must(err)
			q.Header = http.Header{"X_real_ip": {"192.0.2.1"}, "X-Other": {"a_b"}}
			answer, err := client.Do(q)
			r.Must(err)
			return answer
		}
		begun := get("/begun")
		silent := get("/silent")
		close(release)
		if silent.StatusCode != http.StatusGatewayTimeout || begun.StatusCode != http.StatusOK {
			t.Errorf("HTTP/%d: %s, %s", version, silent.Status, begun.Status)
		}
		if text, err := io.ReadAll(begun.Body); string(text) != "late" || err != nil {
			t.Errorf("HTTP/%d: an answer that had begun: %q, %v", version, text, err)
		}
		_, _ = silent.Body.Close(), begun.Body.Close()
		r.service.Spec.IdleTimeout, r.service.Spec.RequestTimeout = dialect.Duration(50*time.Millisecond), dialect.Duration(time.Minute)
		r.set(r.Web(func(w http.ResponseWriter, _ *http.Request) {
			<-time.After(400 * time.Millisecond) // what a Pod computes
			_, _ = io.WriteString(w, "computed")
		}))
		slow := get("/slow")
		if text, err := io.ReadAll(slow.Body); string(text) != "computed" || err != nil {
			t.Errorf("HTTP/%d: an answer after more than the idle timeout: %s, %q, %v", version, slow.Status, text, err)
		}
		_ = slow.Body.Close()
	}
}

// A Pod closes a kept connection just as a request comes, and accepts no other one: another Pod has the request. It is asked beside the
// first one if that hangs; if it refuses, it gets no new clients.
func TestDarkPodOfAKeptConnection(t *testing.T) {
	for _, hangs := range []bool{true, false} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		fd, at := r.backlog()
		other := r.Web(lbtest.Tell)
		r.set(at)
		goOn, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			s, _, err := syscall.Accept(fd)
			if err != nil {
				return
			}
			defer syscall.Close(s)
			for n := range 2 {
				if _, err := syscall.Read(s, make([]byte, 4096)); err != nil || n == 1 {
					return
				}
				_, _ = syscall.Write(s, []byte("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
				<-goOn
			}
		}()
		client := r.Client()
		ask := func() time.Duration {
			began := time.Now()
			answer, err := client.Get("http://" + r.At.String())
			r.Must(err)
			if _ = answer.Body.Close(); answer.StatusCode != http.StatusOK {
				t.Errorf("hangs %t: %s", hangs, answer.Status)
			}
			return time.Since(began)
		}
		ask()
		if hangs {
			r.darken(at)
		} else {
			r.Must(syscall.Shutdown(fd, syscall.SHUT_RDWR))
		}
		close(goOn)
		r.set(at, other)
		for over := false; !over; {
			if took := ask(); took > pods.DialTimeout/2 {
				t.Errorf("hangs %t: an answer after %s", hangs, took)
			}
			select {
			case <-ended:
				over = true
			default:
			}
		}
		if _, _, ejected := r.config.Pool.Count(); ejected == 0 && !hangs {
			t.Error("a Pod that refuses connections gets new clients")
		}
	}
}

// refusing makes a Pod of backlog accept, and speak HTTP/2: it has not looked at the first request, and answers further ones.
func (r *rig) refusing(fd int) {
	r.Helper()
	fd, err := syscall.Dup(fd)
	r.Must(err)
	f := os.NewFile(uintptr(fd), "pod") //nolint:gosec // a file
	defer f.Close()
	l, err := net.FileListener(f)
	r.Must(err)
	var had atomic.Int32
	testbed.Serve(r.TB, l, func(c net.Conn) {
		if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
			return
		}
		served := http2.NewFramer(c, c)
		_ = served.WriteSettings()
		for {
			frame, err := served.ReadFrame()
			if err != nil {
				return
			}
			id := frame.Header().StreamID
			switch first := had.Load() == 0; {
			case frame.Header().Type != http2.FrameHeaders:
				continue
			case first:
				_ = served.WriteRSTStream(id, http2.ErrCodeRefusedStream)
			default:
				_ = headersFrame(id, true, ":status 200")(served)
			}
			had.Add(1)
		}
	})
}

// A Pod accepts so late that another one was asked beside it, and then refuses the request, which goes to it again. Both attempts count
// for that Pod: the other one had nothing.
func TestRetriesAreCountedByPod(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", lbBackend: "h2c"})
	fds := map[netip.AddrPort]int{}
	for range 2 {
		fd, at := r.backlog()
		r.darken(at)
		fds[at] = fd
	}
	r.set(slices.Collect(maps.Keys(fds))...)
	m, err := r.config.Pool.Pick(r.At.Addr(), nil)
	r.Must(err)
	other := m.Addr() // of two, the next client begins with the one that this one did not
	delete(fds, other)
	for at, fd := range fds {
		const all, of = `fairlead_lb_retries_total{namespace="default",service="web"} `, `",namespace="default",service="web"} `
		client, status := r.Client(), make(chan string, 1)
		go func() {
			answer, err := client.Get("http://" + r.At.String())
			if err != nil {
				status <- err.Error()
				return
			}
			_ = answer.Body.Close()
			status <- fmt.Sprint(answer.StatusCode)
		}()
		r.shows(all + "1") // the other one was asked
		r.refusing(fd)
		if got := testbed.Receive(t, "the answer", status); got != "200" {
			t.Error(got)
		}
		const pod = `fairlead_lb_endpoint_retries_total{endpoint="`
		r.shows(all+"2", pod+at.String()+of+"2", pod+other.String()+of+"0")
	}
}

// timedOut is a Pod's end whose bytes nobody acknowledges, and silentClient one without a body.
type timedOut struct{ pod }

func (timedOut) head(*exchange, []byte, bool) {}
func (timedOut) flush() error                 { return nil }
func (timedOut) answer(*http1.Response, time.Duration) error {
	return os.NewSyscallError("read", syscall.ETIMEDOUT)
}
func (timedOut) stale() bool             { return false }
func (timedOut) unseen(error) bool       { return false }
func (timedOut) release(*exchange, bool) {}
func (timedOut) source(*exchange) source { return nothing }

type silentClient struct{ client }

func (silentClient) source() source { return nothing }

// A request to a Pod whose node is dark goes to another Pod if it may be sent again, and the Pod gets no new clients.
func TestRequestsOfADarkNode(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.set(r.Free(), r.Free())
	for _, simple := range []bool{false, true} {
		m, err := r.config.Pool.Pick(r.At.Addr(), nil)
		r.Must(err)
		x := &exchange{
			engine: r.engine, conn: &clientConn{began: time.Now()}, config: r.config, to: r.config, client: silentClient{}, req: &http1.Request{},
		}
		x.touch()
		err = x.ask(timedOut{}, m, nil, simple, true)
		_, _, ejected := r.config.Pool.Count()
		if !errors.Is(err, syscall.ETIMEDOUT) || isUndialed(err) != simple || (ejected > 0) != simple {
			t.Errorf("may be sent again %t: %v, %d Pods are left out", simple, err, ejected)
		}
	}
}

// The timeout of a rule counts instead of the Gateway's, also if it is longer, and 0s is none.
func TestTimeoutOfRule(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-request-timeout": "1"})
	at := r.Web(func(w http.ResponseWriter, q *http.Request) {
		select {
		case <-q.Context().Done():
		case <-time.After(1500 * time.Millisecond):
			_, _ = io.WriteString(w, "late")
		}
	})
	client := r.Client()
	for timeouts, want := range map[string]int{"{}": 504, "{request: 0s}": 200, "{request: 1m}": 200} {
		r.retried("timeouts: "+timeouts, at)
		answer, err := client.Get("http://" + r.At.String() + "/")
		r.Must(err)
		if _ = answer.Body.Close(); answer.StatusCode != want {
			t.Errorf("%s: %s, want %d", timeouts, answer.Status, want)
		}
	}
}

// A Pod that does not answer costs the first request a moment, and the next ones nothing.
func TestDarkPod(t *testing.T) {
	for _, version := range []int{1, 2} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		r.set(r.dark(), r.Web(lbtest.Tell))
		client := r.clientOf(version)
		var longest time.Duration
		slow := 0
		for range 20 {
			began := time.Now()
			answer, err := client.Post("http://"+r.At.String(), "", http.NoBody)
			r.Must(err)
			if _ = answer.Body.Close(); answer.StatusCode != http.StatusOK {
				t.Fatal(fmt.Sprint("HTTP/", version, ": ", answer.Status))
			}
			took := time.Since(began)
			longest = max(longest, took)
			if took >= secondAfter {
				slow++
			}
		}
		if longest > 3*time.Second || slow == 0 {
			t.Errorf("HTTP/%d: at worst %v; %d were slow", version, longest, slow)
		}
	}
}
