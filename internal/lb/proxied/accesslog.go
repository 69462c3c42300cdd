package proxied

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// accessLog writes a line for each connection of TCP or TLS, and for each request of HTTP, as a Classic Load Balancer
// of AWS does (https://docs.aws.amazon.com/elasticloadbalancing/latest/classic/access-log-collection.html). Each line
// is one write, so that none is lost when the process ends.
type accessLog struct {
	dir, node string
	log       *slog.Logger
	most      int64 // bytes of all files; the oldest go first

	mu    sync.Mutex
	files map[svc.Name]*logFile
	// pruned and warned are when that was done last.
	pruned, warned time.Time
}

// logFile is what lines of a Service go to for an interval.
type logFile struct {
	*os.File
	until time.Time
	left  int64 // bytes before another one begins
}

const (
	// maxAccessLogs bounds all files of a node.
	maxAccessLogs = 1 << 30
	// pruneEvery is how often files are counted at most.
	pruneEvery = 10 * time.Second
	// maxLogged bounds a request line or a user agent in a line.
	maxLogged = 4 << 10
)

// entry is a line.
type entry struct {
	service      svc.Name
	at           time.Time // of the end
	client, pod  netip.AddrPort
	before       time.Duration // until a Pod had it
	during       time.Duration // until the Pod answered, negative if that is unknown
	after        time.Duration // until the client had the answer
	status       int           // to the client, 0 without HTTP
	podStatus    int
	received     int64 // from the client
	sent         int64
	request      string // empty without HTTP
	agent        string
	suite, proto string // of TLS
}

// tls takes over what was agreed on.
func (e *entry) tls(s tls.ConnectionState) {
	e.suite, e.proto = tls.CipherSuiteName(s.CipherSuite), strings.ReplaceAll(tls.VersionName(s.Version), " ", "v")
}

// text returns the line.
func (e *entry) text() string {
	seconds := func(d time.Duration) string {
		if d < 0 {
			return "-1"
		}
		return strconv.FormatFloat(d.Seconds(), 'f', 6, 64)
	}
	number := func(n int) string {
		if n == 0 {
			return "-"
		}
		return strconv.Itoa(n)
	}
	pod := "-"
	if e.pod.IsValid() {
		pod = e.pod.String()
	}
	return fmt.Sprintf("%s %s %s %s %s %s %s %s %s %d %d \"%s\" \"%s\" %s %s\n", e.at.UTC().Format("2006-01-02T15:04:05.000000Z"), e.service,
		e.client, pod, seconds(e.before), seconds(e.during), seconds(e.after), number(e.status), number(e.podStatus), e.received, e.sent,
		quoted(cmp.Or(e.request, "- - - ")), quoted(cmp.Or(e.agent, "-")), cmp.Or(e.suite, "-"), cmp.Or(e.proto, "-"))
}

// quoted returns what may stand between double quotes on a line: other bytes as \xNN.
func quoted(s string) string {
	s = s[:min(len(s), maxLogged)]
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; c < ' ' || c >= 0x7f || c == '"' || c == '\\' {
			fmt.Fprintf(&b, `\x%02x`, c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// write writes a line for a Service whose files are of an interval.
func (a *accessLog) write(e *entry, every time.Duration) {
	line := e.text()
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.files[e.service]
	if f == nil || !e.at.Before(f.until) || f.left < 0 {
		if f != nil {
			_ = f.Close()
		}
		delete(a.files, e.service)
		a.forget(func(_ svc.Name, f *logFile) bool { return !e.at.Before(f.until) })
		a.prune(e.at)
		made, err := a.open(e.service, e.at, every)
		if err != nil {
			a.warn("cannot write an access log", "service", e.service, "err", err)
			return
		}
		f = made
		a.files[e.service] = f
	}
	n, err := f.WriteString(line)
	if f.left -= int64(n); err != nil {
		a.warn("cannot write an access log", "service", e.service, "err", err)
	}
}

// open opens the file for a time: that of an earlier process goes on.
func (a *accessLog) open(n svc.Name, at time.Time, every time.Duration) (*logFile, error) {
	if every <= 0 {
		every = time.Hour
	}
	begin := at.UTC().Truncate(every)
	dir := filepath.Join(a.dir, n.Namespace, n.Name, begin.Format("2006"), begin.Format("01"), begin.Format("02"))
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("%s_%s_%s_%s", a.node, n.Namespace, n.Name, begin.Add(every).Format("20060102T1504Z"))
	for part := ""; ; part += "+" { // a few: each has an eighth of the bytes that all may have
		f, err := os.OpenFile(filepath.Join(dir, name+part+".log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err != nil || info.Size() > a.most/8 {
			_ = f.Close()
			if err != nil {
				return nil, err
			}
			continue
		}
		return &logFile{f, begin.Add(every), a.most/8 - info.Size()}, nil
	}
}

// warn reports a failure, once a minute at most.
func (a *accessLog) warn(text string, args ...any) {
	if now := time.Now(); now.Sub(a.warned) >= time.Minute {
		a.warned = now
		a.log.Warn(text, args...)
	}
}

// retain closes the files of Services for which keep returns false. A line that comes later opens one again, until the
// interval ends.
func (a *accessLog) retain(keep func(svc.Name) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forget(func(n svc.Name, _ *logFile) bool { return !keep(n) })
}

// forget closes files.
func (a *accessLog) forget(which func(svc.Name, *logFile) bool) {
	for n, f := range a.files {
		if which(n, f) {
			_ = f.Close()
			delete(a.files, n)
		}
	}
}

// prune removes files while there are more bytes than may be: the oldest of the Service that has the most, so that one
// with many requests does not cost the others their lines.
func (a *accessLog) prune(now time.Time) {
	if now.Sub(a.pruned) < pruneEvery {
		return
	}
	a.pruned = now
	type file struct {
		path string
		at   time.Time
		size int64
	}
	type service struct {
		files []file
		size  int64
	}
	services := map[string]*service{} // by their directories
	total := int64(0)
	_ = filepath.WalkDir(a.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // the others count
		}
		if i, err := d.Info(); err == nil {
			rel, _ := filepath.Rel(a.dir, path)
			parts := strings.SplitN(rel, string(filepath.Separator), 3)
			key := filepath.Join(parts[:min(2, len(parts))]...)
			if services[key] == nil {
				services[key] = &service{}
			}
			v := services[key]
			v.files = append(v.files, file{path, i.ModTime(), i.Size()})
			v.size += i.Size()
			total += i.Size()
		}
		return nil
	})
	for _, v := range services {
		slices.SortFunc(v.files, func(x, y file) int { return cmp.Or(x.at.Compare(y.at), cmp.Compare(x.path, y.path)) })
	}
	removed := 0
	for total > a.most && len(services) > 0 {
		largest := ""
		for key, v := range services {
			if services[largest] == nil || v.size > services[largest].size {
				largest = key
			}
		}
		v := services[largest]
		f := v.files[0]
		v.size -= f.size
		if v.files = v.files[1:]; len(v.files) == 0 {
			delete(services, largest)
		}
		a.forget(func(_ svc.Name, open *logFile) bool { return open.Name() == f.path })
		if os.Remove(f.path) == nil {
			removed++
			total -= f.size
			for dir := filepath.Dir(f.path); dir != a.dir && os.Remove(dir) == nil; { // while it is empty
				dir = filepath.Dir(dir)
			}
		}
	}
	if removed > 0 {
		a.warn("removed the oldest access logs, since there are too many", "files", removed, "bytes", a.most)
	}
}

// close closes the files.
func (a *accessLog) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.files {
		_ = f.Close()
	}
	clear(a.files)
}

// counter counts what is written to a client, and the status.
type counter struct {
	http.ResponseWriter
	status int
	sent   int64
}

// WriteHeader passes on a status; the last one counts.
func (c *counter) WriteHeader(status int) {
	c.status = status
	c.ResponseWriter.WriteHeader(status)
}

// Write passes on a part of the body.
func (c *counter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.sent += int64(n)
	return n, err
}

// Unwrap is for http.ResponseController.
func (c *counter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// countedBody counts what is read of a request's body.
type countedBody struct {
	io.ReadCloser
	n *atomic.Int64
}

// Read reads from the body.
func (b countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.n.Add(int64(n))
	return n, err
}
