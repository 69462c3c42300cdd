package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// TestWatcher runs a watcher over a script of answers, one letter per second of
// fake time: y yes, n no; the result is what was reported when.
func TestWatcher(t *testing.T) {
	for _, c := range []struct {
		name   string
		probe  corev1.Probe
		eager  bool
		script string
		want   string
	}{
		{"every period", corev1.Probe{PeriodSeconds: 2}, false, "yyyyyy", "0s:yes"},
		{"no after the threshold", corev1.Probe{PeriodSeconds: 1, FailureThreshold: 2}, false, "yynny",
			"0s:yes 2s:failed 3s:failed 3s:no 4s:yes"},
		{"one no is not enough", corev1.Probe{PeriodSeconds: 1}, false, "ynnyy", "0s:yes 1s:failed 2s:failed 3s:yes"},
		{"yes after the threshold", corev1.Probe{PeriodSeconds: 1, SuccessThreshold: 3}, false, "yynyyyy", "2s:failed 5s:yes"},
		{"initial delay", corev1.Probe{PeriodSeconds: 1, InitialDelaySeconds: 3}, false, "nnnyy", "3s:yes"},
		{"eager: soon after it is up", corev1.Probe{PeriodSeconds: 10}, true, "nyyy", "1.26s:yes"},
		{"eager: only each period counts", corev1.Probe{PeriodSeconds: 2, FailureThreshold: 2}, true, "nnnnnn", "2s:failed 4s:failed 4s:no"},
		{"eager: not after the first yes", corev1.Probe{PeriodSeconds: 3, FailureThreshold: 1}, true, "ynnnyyy", "0s:yes 3s:failed 3s:no 6s:yes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(len(c.script))*time.Second-time.Millisecond)
				defer cancel()
				var got []string
				add := func(what string) { got = append(got, fmt.Sprintf("%v:%s", time.Since(start), what)) }
				Watcher{
					Probe: &c.probe, Since: start, Eager: c.eager,
					Answer: func(ok bool) { add(map[bool]string{true: "yes", false: "no"}[ok]) },
					Failed: func(error) { add("failed") },
				}.Run(ctx, func(context.Context) error {
					if c.script[int(time.Since(start)/time.Second)] == 'y' {
						return nil
					}
					return errors.New("no")
				})
				if d := cmp.Diff(c.want, strings.Join(got, " ")); d != "" {
					t.Error(d)
				}
			})
		})
	}
}

func TestTimeoutIsAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		failed := 0
		Watcher{
			Probe: &corev1.Probe{PeriodSeconds: 5, TimeoutSeconds: 2}, Since: time.Now(),
			Answer: func(bool) {}, Failed: func(error) { failed++ },
		}.Run(ctx, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		if failed != 1 {
			t.Errorf("%d failures, want 1", failed)
		}
	})
}

func TestHTTP(t *testing.T) {
	var seen *http.Request
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		seen = r
		code, _ := strconv.Atoi(r.URL.Query().Get("code"))
		if to := r.URL.Query().Get("to"); to != "" {
			w.Header().Set("Location", to)
		}
		w.WriteHeader(code)
		fmt.Fprint(w, "the reason")
	})
	for _, secure := range []bool{false, true} {
		s := httptest.NewUnstartedServer(mux)
		scheme := corev1.URISchemeHTTP
		if secure {
			s.StartTLS()
			scheme = corev1.URISchemeHTTPS
		} else {
			s.Start()
		}
		defer s.Close()
		u, _ := url.Parse(s.URL)
		port, _ := strconv.Atoi(u.Port())
		target := Target{IP: netip.MustParseAddr("127.0.0.1"), Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: int32(port)}}}
		for path, ok := range map[string]bool{
			"/x?code=200": true, "/x?code=204": true, "/x?code=302&to=http://192.0.2.1/": true, "/x?code=302&to=/x%3Fcode=500": false,
			"/x?code=400": false, "/x?code=503": false, "no-slash?code=200": true,
		} {
			err := target.Once(t.Context(), corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
				Path: path, Port: intstr.FromString("web"), Scheme: scheme, HTTPHeaders: []corev1.HTTPHeader{{Name: "host", Value: "shop.example"},
					{Name: "X-A", Value: "b"}},
			}})
			if (err == nil) != ok {
				t.Errorf("%s %s: %v, want yes: %v", scheme, path, err, ok)
			}
			if err != nil && !strings.Contains(err.Error(), "the reason") {
				t.Errorf("%s: error %q without the answer's text", path, err)
			}
		}
		err := target.Once(t.Context(), corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
			Path: "/x?code=200", Port: intstr.FromString("web"), Scheme: scheme,
			HTTPHeaders: []corev1.HTTPHeader{{Name: "host", Value: "shop.example"}, {Name: "X-A", Value: "b"}},
		}})
		if err != nil || seen.Host != "shop.example" || seen.Header.Get("X-A") != "b" || !strings.HasPrefix(seen.UserAgent(), "kube-probe/") {
			t.Errorf("%v, request %s %v", err, seen.Host, seen.Header)
		}
	}
}

func TestTCPAndPorts(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	target := Target{IP: netip.MustParseAddr("127.0.0.1")}
	ask := func(p intstr.IntOrString) error {
		return target.Once(t.Context(), corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: p}})
	}
	if err := ask(intstr.FromInt32(int32(port))); err != nil {
		t.Error(err)
	}
	if err := ask(intstr.FromString(strconv.Itoa(port))); err != nil {
		t.Error(err)
	}
	for _, bad := range []intstr.IntOrString{intstr.FromInt32(0), intstr.FromInt32(70000), intstr.FromString("nameless")} {
		if ask(bad) == nil {
			t.Errorf("port %s gave a yes", bad.String())
		}
	}
	l.Close()
	if ask(intstr.FromInt32(int32(port))) == nil {
		t.Error("a closed port gave a yes")
	}
}

func TestExec(t *testing.T) {
	for _, c := range []struct {
		code int
		err  error
		ok   bool
	}{{0, nil, true}, {3, nil, false}, {0, errors.New("not running"), false}} {
		target := Target{Exec: func(context.Context, []string) (int, []byte, error) { return c.code, []byte("said\n"), c.err }}
		err := target.Once(t.Context(), corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"x"}}})
		if (err == nil) != c.ok {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
