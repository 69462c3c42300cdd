package proxied

import (
	"bufio"
	"cmp"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/svc"
)

// lines returns the lines of all files, in the order of their names.
func (r *rig) lines() []string { return lines(r, r.server.logs.dir) }

func lines(r *rig, dir string) (out []string) {
	r.Helper()
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			text, err := os.ReadFile(path)
			r.must(err)
			for line := range strings.Lines(string(text)) {
				out = append(out, line)
			}
		}
		return nil
	})
	return out
}

func (r *rig) awaitLines(n int) []string {
	r.Helper()
	for deadline := time.Now().Add(patience); ; <-time.After(time.Millisecond) {
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
		cert, _, _ := certificate(t, "a.example.com")
		r.service.Certificates = []tls.Certificate{cert}
		r.set(r.web(tell))
		scheme := map[bool]string{true: "https", false: "http"}[dialect.Protocol(protocol).IsTLS()]
		q, err := http.NewRequestWithContext(t.Context(), "POST", scheme+"://web/a?b", strings.NewReader("x=1"))
		r.must(err)
		if protocol == "http" {
			q.Host = "web.example:80"
		}
		q.Header.Set("User-Agent", `a"b`)
		client := r.client()
		client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
		answer, err := client.Do(q)
		r.must(err)
		_, _ = io.Copy(io.Discard, answer.Body)
		r.must(answer.Body.Close())
		client.CloseIdleConnections()
		if lines := r.awaitLines(1); !regexp.MustCompile(c.want).MatchString(lines[0]) || len(lines) != 1 {
			t.Errorf("%s: %q, want %s", c.protocol, lines, c.want)
		}
		if c.protocol == "http" { // what fails has a line, too
			r.set()
			answer, err := client.Get("http://web/")
			r.must(err)
			_ = answer.Body.Close()
			if lines := r.awaitLines(2); !strings.Contains(lines[1], " - -1 -1 -1 503 - 0 ") {
				t.Errorf("%q", lines)
			}
		}
		r.server.Set(nil)
		if n := len(r.server.logs.files); n > 0 {
			t.Errorf("%s: %d files of a Service that is gone are open", c.protocol, n)
		}
	}
}

// An interval has its file, which the next process goes on with; there is an end to how much they are.
func TestAccessLogFiles(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, nil)
	open := func(most int64) *accessLog {
		a := &accessLog{dir: dir, node: "n1", log: r.server.log, most: most, files: map[logKey]*logFile{}}
		t.Cleanup(a.close)
		return a
	}
	begin := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	name, client := svc.Name{Namespace: "default", Name: "web"}, netip.MustParseAddrPort("192.0.2.1:1")
	write := func(a *accessLog, at time.Time) {
		a.write(&entry{owner: logship.OwnerOf(name, "uid"), at: at, client: client}, dialect.AccessLog{Every: dialect.Duration(5 * time.Minute)})
		a.pruning.Wait()
	}
	a := open(1 << 20)
	write(a, begin)
	write(open(1<<20), begin.Add(time.Second)) // another process
	write(a, begin.Add(time.Minute))           // the next interval
	sizes := func() map[string]int64 {
		out := map[string]int64{}
		files, _ := filepath.Glob(filepath.Join(dir, "default/web/2026/01/02/*"))
		for _, f := range files {
			info, err := os.Stat(f)
			r.must(err)
			out[filepath.Base(f)] = info.Size()
		}
		return out
	}
	const first, second = "n1_default_web_17b788a70eec_20260102T0305Z.log", "n1_default_web_17b788a70eec_20260102T0310Z.log"
	if got := sizes(); len(got) != 2 || got[first] != 2*got[second] || got[second] == 0 {
		t.Errorf("%v", got)
	}
	small := open(2000)
	small.write(&entry{owner: logship.OwnerOf(svc.Name{Namespace: "default", Name: "quiet"}, "uid"), at: begin, client: client},
		dialect.AccessLog{Every: dialect.Duration(5 * time.Minute)})
	for i := range 200 {
		write(small, begin.Add(time.Hour+time.Duration(i)*5*time.Minute))
	}
	for _, f := range small.files {
		if _, err := os.Stat(f.Name()); err != nil {
			t.Errorf("an open file is removed: %v", err)
		}
	}
	total := int64(0)
	_ = filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if info, err := d.Info(); err == nil && !d.IsDir() {
			total += info.Size()
		}
		return err
	})
	if total == 0 || total > 2000+250 {
		t.Errorf("%d bytes", total)
	}
	if left := lines(r, dir); !slices.ContainsFunc(left, func(l string) bool { return strings.Contains(l, " default/quiet ") }) {
		t.Errorf("a Service with many lines has cost another one its own: %q", left)
	}
	// What is over, or of a Service that is gone, is not open.
	if len(small.files) != 1 {
		t.Errorf("%d files are open, want that of this interval", len(small.files))
	}
	if small.dropped == 0 {
		t.Error("files that were removed are not counted")
	}
	small.retain(func(n svc.Name) bool { return n != name })
	if len(small.files) != 0 {
		t.Errorf("%d files of a Service that is gone are open", len(small.files))
	}
	if text := r.log.String(); !strings.Contains(text, "removed the oldest access logs") {
		t.Errorf("%s", text)
	}
}

// Nothing is added to a file that may be uploaded: a line that comes late goes to the one after it.
func TestFinishedFilesStay(t *testing.T) {
	begin := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	a := &accessLog{dir: t.TempDir(), node: "n1", log: slog.New(slog.DiscardHandler), most: 1 << 20, files: map[logKey]*logFile{}}
	t.Cleanup(a.close)
	names := func() (out []string) {
		_ = filepath.WalkDir(a.dir, func(_ string, d os.DirEntry, _ error) error {
			if !d.IsDir() {
				out = append(out, d.Name())
			}
			return nil
		})
		return out
	}
	write := func(service string, format dialect.LogFormat) {
		a.write(&entry{owner: logship.OwnerOf(svc.Name{Namespace: "default", Name: service}, "uid"), at: begin, kind: "http"},
			dialect.AccessLog{Every: dialect.Duration(5 * time.Minute), Format: format})
	}
	write("a", "")
	a.finish(begin.Add(time.Minute))
	if len(a.files) != 0 {
		t.Errorf("%d files are open", len(a.files))
	}
	write("a", "")
	write("b", dialect.LogALB)
	const mark = "17b788a70eec"
	want := []string{
		"n1_default_a_" + mark + "_20260102T0305Z.log", "n1_default_a_" + mark + "_20260102T0310Z.log",
		"n1_default_app.b_" + mark + "_20260102T0310Z.log",
	}
	if got := names(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// What the load balancer answers itself has a line without a Pod, whatever the client puts into it.
func TestOwnAnswersAreLogged(t *testing.T) {
	r := newRig(t, nil)
	pod := r.web(tell)
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
		conn := r.dial()
		in := bufio.NewReader(conn)
		_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: web\r\n\r\n")
		r.must(err)
		first, err := http.ReadResponse(in, nil)
		r.must(err)
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

// Files are counted while lines are written.
func TestPruneHoldsNothingUp(t *testing.T) {
	a := &accessLog{dir: t.TempDir(), log: slog.New(slog.DiscardHandler), files: map[logKey]*logFile{}}
	if err := os.WriteFile(filepath.Join(a.dir, "x"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	a.mu.Lock() // as a line that is written
	defer a.mu.Unlock()
	counted := make(chan int64)
	go func() {
		_, n := a.measure()
		counted <- n
	}()
	select {
	case n := <-counted:
		if n != 1 {
			t.Errorf("%d bytes", n)
		}
	case <-time.After(patience):
		t.Fatal("files are not counted while a line is written")
	}
}
