package web

import (
	"bufio"
	"cmp"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// lines returns the lines of all files, in the order of their names.
func (r *rig) lines() []string { return r.Lines(r.logs) }

// openLogs returns the files of access logs that this process has open.
func (r *rig) openLogs() (open []string) {
	r.Helper()
	const own = "/proc/self/fd"
	all, err := os.ReadDir(own)
	r.Must(err)
	for _, f := range all {
		info, err := os.Stat(filepath.Join(own, f.Name()))
		if err != nil || !info.Mode().IsRegular() {
			continue // a directory is open while the oldest files are looked for
		}
		if to, err := os.Readlink(filepath.Join(own, f.Name())); err == nil && strings.HasPrefix(to, r.logs) {
			open = append(open, to)
		}
	}
	return open
}

func (r *rig) awaitLines(n int) []string {
	r.Helper()
	for deadline := time.Now().Add(lbtest.Patience); ; <-time.After(time.Millisecond) {
		if lines := r.lines(); len(lines) >= n {
			return lines
		} else if time.Now().After(deadline) {
			r.Fatalf("%q, want %d lines", lines, n)
		}
	}
}

// Lines are as a Classic Load Balancer of AWS writes them (behaviours 122 to 125).
func TestAccessLog(t *testing.T) {
	const when, addr, seconds = `\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z`, `127\.0\.0\.1:\d+`, `\d+\.\d{6}`
	for _, c := range []struct{ protocol, want string }{
		{"http", fmt.Sprintf(`^%s default/web %s %s %s %s %s 200 200 3 \d+ "POST http://web\.example:80/a\?b HTTP/1\.1" "a\\x22b" - -\n$`,
			when, addr, addr, seconds, seconds, seconds)},
		{"https", fmt.Sprintf(`^%s default/web %s %s %s %s %s 200 200 3 \d+ "POST https://.* HTTP/1\.1" "a\\x22b" TLS_\S+ TLSv1\.3\n$`,
			when, addr, addr, seconds, seconds, seconds)},
		{"https alb", fmt.Sprintf(`^https %s app/default/web %s %s %s %s %s 200 200 3 \d+ "POST https://.* HTTP/1\.1" "a\\x22b" TLS_\S+ `+
			`TLSv1\.3 - "-" "web" "-" 0 %s "forward" "-" "-" "%s" "200" "-" "-" -\n$`, when, addr, addr, seconds, seconds, seconds, when, addr)},
		{"tls alb", fmt.Sprintf(`^%s default/web %s %s %s -1 -1 - - \d+ \d+ "- - - " "-" TLS_\S+ TLSv1\.3\n$`, when, addr, addr, seconds)},
		{"tls", fmt.Sprintf(`^%s default/web %s %s %s -1 -1 - - \d+ \d+ "- - - " "-" TLS_\S+ TLSv1\.3\n$`, when, addr, addr, seconds)},
		{"tcp", fmt.Sprintf(`^%s default/web %s %s %s -1 -1 - - \d+ \d+ "- - - " "-" - -\n$`, when, addr, addr, seconds)},
	} {
		protocol, format, _ := strings.Cut(c.protocol, " ")
		r := newRig(t, map[string]string{
			dialect.LBTLSSecrets: "a", lbProtocol: protocol,
			"fairlead.dev/lb-access-log-format":                               cmp.Or(format, "elb"),
			"service.beta.kubernetes.io/aws-load-balancer-access-log-enabled": "true",
		})
		cert, _, _ := lbtest.Certificate(t, "a.example.com")
		r.service.Certificates = []tls.Certificate{cert}
		r.set(r.Web(lbtest.Tell))
		scheme := map[bool]string{true: "https", false: "http"}[dialect.Protocol(protocol).IsTLS()]
		q, err := http.NewRequestWithContext(t.Context(), "POST", scheme+"://web/a?b", strings.NewReader("x=1"))
		r.Must(err)
		if protocol == "http" {
			q.Host = "web.example:80"
		}
		q.Header.Set("User-Agent", `a"b`)
		client := r.Client()
		client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
		answer, err := client.Do(q)
		r.Must(err)
		_, _ = io.Copy(io.Discard, answer.Body)
		r.Must(answer.Body.Close())
		client.CloseIdleConnections()
		if lines := r.awaitLines(1); !regexp.MustCompile(c.want).MatchString(lines[0]) || len(lines) != 1 {
			t.Errorf("%s: %q, want %s", c.protocol, lines, c.want)
		}
		if c.protocol == "http" { // what fails has a line, too
			r.set()
			answer, err := client.Get("http://web/")
			r.Must(err)
			_ = answer.Body.Close()
			if lines := r.awaitLines(2); !strings.Contains(lines[1], " - -1 -1 -1 503 - 0 ") {
				t.Errorf("%q", lines)
			}
			asked := make(chan struct{})
			r.set(r.Web(func(_ http.ResponseWriter, q *http.Request) {
				close(asked)
				<-q.Context().Done()
			}))
			left := r.Dial()
			_, err = io.WriteString(left, "GET /left HTTP/1.1\r\nHost: web\r\n\r\n")
			r.Must(err)
			<-asked
			r.Must(left.Close())
			if lines := r.awaitLines(3); !strings.Contains(lines[2], " 499 - 0 ") || !strings.Contains(lines[2], "/left HTTP") {
				t.Errorf("of a client that has left: %q", lines)
			}
		}
		if len(r.openLogs()) == 0 {
			t.Errorf("%s: no file is open", c.protocol)
		}
		r.server.Set(nil)
		if open := r.openLogs(); len(open) > 0 {
			t.Errorf("%s: files of a Service that is gone are open: %q", c.protocol, open)
		}
	}
}

// What the load balancer answers itself has a line without a Pod, whatever the client puts into it.
func TestOwnAnswersAreLogged(t *testing.T) {
	r := newRig(t, nil)
	pod := r.Web(lbtest.Tell)
	usual := map[string]string{lbProtocol: "http", "service.beta.kubernetes.io/aws-load-balancer-access-log-enabled": "true"}
	get := "GET /\"%0a\\ HTTP/1.1\r\nHost: web\r\nUser-Agent: a\" \"b\tc\xff\r\n\r\n"
	logged := `"GET http://web:\d+/%22%0A%5C HTTP/1\.1" "a\\x22 \\x22b\\x09c\\xff"`
	n := 0
	for _, c := range []struct {
		status        int
		request, want string
		change        func()
	}{
		{403, get, logged, func() { r.service.Spec.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")} }},
		{421, get, logged, func() { r.service.Name.Name = "other" }},
		{405, "CONNECT 192.0.2.1:22 HTTP/1.1\r\nHost: 192.0.2.1:22\r\n\r\n", `"CONNECT http://192\.0\.2\.1:22[^"]* HTTP/1\.1" "-"`, nil},
		{400, "GET / HTTP/1.1\nHost: web\n\n", `"- - - " "-"`, nil},
		{400, "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", `"- - - " "-"`, nil},
		{431, "GET / HTTP/1.1\r\nHost: web\r\nX: " + strings.Repeat("x", 2*maxHeader) + "\r\n\r\n", `"- - - " "-"`, nil},
	} {
		r.service.Name.Name = "web"
		r.ask(usual)
		r.set(pod)
		conn := r.Dial()
		in := bufio.NewReader(conn)
		_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: web\r\n\r\n")
		r.Must(err)
		first, err := http.ReadResponse(in, nil)
		r.Must(err)
		_, _ = io.Copy(io.Discard, first.Body)
		if c.change != nil {
			c.change()
			r.set(pod)
		}
		_, _ = io.WriteString(conn, c.request) // the connection may end before the end of it
		answer, err := http.ReadResponse(in, nil)
		if err != nil || answer.StatusCode != c.status {
			t.Fatalf("%d: %v, %v", c.status, answer, err)
		}
		n += 2
		want := regexp.MustCompile(fmt.Sprintf(`^\S+ default/web 127\.0\.0\.1:\d+ - -1 -1 -1 %d - 0 \d+ %s - -\n$`, c.status, c.want))
		if lines := r.awaitLines(n); !want.MatchString(lines[n-1]) || len(lines) != n {
			t.Errorf("%q\nwant %s", lines[n-1], want)
		}
	}
}
