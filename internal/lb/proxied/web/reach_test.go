package web

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// dark is a Pod whose node does not answer: what connects to it hangs.
func (r *rig) dark() netip.AddrPort {
	r.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	r.Must(err)
	r.Cleanup(func() { _ = syscall.Close(fd) })
	r.Must(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	r.Must(syscall.Listen(fd, 0))
	name, err := syscall.Getsockname(fd)
	r.Must(err)
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(name.(*syscall.SockaddrInet4).Port))
	for { // until the backlog is full
		c, err := net.DialTimeout("tcp", at.String(), 300*time.Millisecond)
		if err != nil {
			return at
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
