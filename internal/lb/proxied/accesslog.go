package proxied

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/svc"
)

// accessLog writes a line for each connection of TCP or TLS, and for each request of HTTP, as a Classic Load Balancer
// of AWS does (https://docs.aws.amazon.com/elasticloadbalancing/latest/classic/access-log-collection.html), or for requests
// as an Application Load Balancer. Each line is one write, so that none is lost when the process ends.
type accessLog struct {
	dir, node string
	log       *slog.Logger
	most      int64 // bytes of all files; the oldest go first

	pruning sync.WaitGroup

	mu    sync.Mutex
	files map[logKey]*logFile
	// complete is until when files have ended: nothing is added to those, whenever a line was made.
	complete time.Time
	// pruned and warned are when that was done last.
	pruned, warned time.Time
	prunes         bool
	dropped        uint64 // files that were removed before they were uploaded
}

// logKey identifies a file within each interval.
type logKey struct {
	owner  logship.Owner
	format dialect.LogFormat
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
	owner        logship.Owner
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

	// What follows only lines of an Application Load Balancer have.

	kind   string // http, https, h2, grpcs, ws or wss
	began  time.Time
	domain string // that TLS was asked for
}

// tls takes over what was agreed on.
func (e *entry) tls(s tls.ConnectionState) {
	e.suite, e.proto = tls.CipherSuiteName(s.CipherSuite), strings.ReplaceAll(tls.VersionName(s.Version), " ", "v")
}

const timeFormat = "2006-01-02T15:04:05.000000Z"

// text returns the line as of a Classic Load Balancer.
func (e *entry) text() string {
	return e.at.UTC().Format(timeFormat) + " " + e.owner.Service.String() + " " + e.common() + "\n"
}

// common returns what lines of both formats have, from the client to TLS.
func (e *entry) common() string {
	seconds := func(d time.Duration) string {
		if d < 0 {
			return "-1"
		}
		return strconv.FormatFloat(d.Seconds(), 'f', 6, 64)
	}
	return fmt.Sprintf("%s %s %s %s %s %s %s %d %d \"%s\" \"%s\" %s %s",
		e.client, e.to(), seconds(e.before), seconds(e.during), seconds(e.after), number(e.status), number(e.podStatus), e.received, e.sent,
		quoted(cmp.Or(e.request, "- - - ")), quoted(cmp.Or(e.agent, "-")), cmp.Or(e.suite, "-"), cmp.Or(e.proto, "-"))
}

// to returns the Pod.
func (e *entry) to() string {
	if e.pod.IsValid() {
		return e.pod.String()
	}
	return "-"
}

// number returns a status.
func number(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

// application returns the line as of an Application Load Balancer. There are no target groups, traces, rules and
// classifications here
// (https://docs.aws.amazon.com/elasticloadbalancing/latest/application/load-balancer-access-logs.html#access-log-entry-format).
func (e *entry) application() string {
	actions := "-"
	if e.pod.IsValid() {
		actions = "forward"
	}
	return fmt.Sprintf("%s %s app/%s %s - \"-\" \"%s\" \"-\" 0 %s \"%s\" \"-\" \"-\" \"%s\" \"%s\" \"-\" \"-\" -\n",
		e.kind, e.at.UTC().Format(timeFormat), e.owner.Service, e.common(), quoted(cmp.Or(e.domain, "-")), e.began.UTC().Format(timeFormat),
		actions, e.to(), number(e.podStatus))
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

// write writes a line for a Service whose files are of a format and an interval. The format of an Application Load
// Balancer is for requests: other lines go to another file.
func (a *accessLog) write(e *entry, o dialect.AccessLog) {
	key := logKey{e.owner, dialect.LogELB}
	line := ""
	if o.Format == dialect.LogALB && e.kind != "" {
		key.format, line = o.Format, e.application()
	} else {
		line = e.text()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	at := e.at
	if at.Before(a.complete) {
		at = a.complete
	}
	f := a.files[key]
	if f == nil || !at.Before(f.until) || f.left < 0 {
		if f != nil {
			_ = f.Close()
		}
		delete(a.files, key)
		a.forget(func(_ logKey, f *logFile) bool { return !at.Before(f.until) })
		a.startPrune(at)
		made, err := a.open(key, at, o.Every.Std())
		if err != nil {
			a.warn("cannot write an access log", "service", e.owner.Service, "err", err)
			return
		}
		f = made
		a.files[key] = f
	}
	n, err := f.WriteString(line)
	if f.left -= int64(n); err != nil {
		a.warn("cannot write an access log", "service", e.owner.Service, "err", err)
	}
}

// finish makes sure that nothing is added to files that are complete by now.
func (a *accessLog) finish(now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if now.After(a.complete) {
		a.complete = now
	}
	a.forget(func(_ logKey, f *logFile) bool { return !now.Before(f.until) })
}

// open opens the file for a time: that of an earlier process goes on.
func (a *accessLog) open(key logKey, at time.Time, every time.Duration) (*logFile, error) {
	if every <= 0 {
		every = time.Hour
	}
	is := logship.File{Node: a.node, Owner: key.owner, Application: key.format == dialect.LogALB, End: at.UTC().Truncate(every).Add(every)}
	if err := os.MkdirAll(filepath.Dir(filepath.Join(a.dir, is.Name(every))), 0o750); err != nil {
		return nil, err
	}
	for ; ; is.Part++ { // a few: each has an eighth of the bytes that all may have
		f, err := os.OpenFile(filepath.Join(a.dir, is.Name(every)), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
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
		return &logFile{f, is.End, a.most/8 - info.Size()}, nil
	}
}

// warn reports a failure, at most once a minute. The caller holds mu.
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
	a.forget(func(k logKey, _ *logFile) bool { return !keep(k.owner.Service) })
}

// forget closes files. The caller holds mu.
func (a *accessLog) forget(which func(logKey, *logFile) bool) {
	for n, f := range a.files {
		if which(n, f) {
			_ = f.Close()
			delete(a.files, n)
		}
	}
}

// startPrune starts to remove files beyond the limit. The caller holds mu, which prune does not hold while it reads
// directories: no request waits for it.
func (a *accessLog) startPrune(now time.Time) {
	if now.Sub(a.pruned) >= pruneEvery && !a.prunes {
		a.pruned, a.prunes = now, true
		a.pruning.Go(a.prune)
	}
}

// loggedFile is a file of a loggedService.
type loggedFile struct {
	path string
	at   time.Time
	size int64
}

// loggedService has the files of a Service, the oldest first.
type loggedService struct {
	files []loggedFile
	size  int64
}

// prune removes files while there are more bytes than may be: the oldest of the Service that has the most, so that one
// with many requests does not cost the others their lines.
func (a *accessLog) prune() {
	services, total := a.measure()
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
		if a.remove(f.path) {
			removed++
			total -= f.size
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.prunes = false
	if removed > 0 {
		a.warn("removed the oldest access logs, since there are too many", "files", removed, "bytes", a.most)
	}
}

// remove removes a file, and directories that are empty without it.
func (a *accessLog) remove(path string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forget(func(_ logKey, open *logFile) bool { return open.Name() == path })
	if os.Remove(path) != nil {
		return false
	}
	if logship.Unsent(path) {
		a.dropped++
	}
	for dir := filepath.Dir(path); dir != a.dir && os.Remove(dir) == nil; { // while it is empty
		dir = filepath.Dir(dir)
	}
	return true
}

// measure returns the files of all Services, by their directories, and how many bytes they have.
func (a *accessLog) measure() (services map[string]*loggedService, total int64) {
	services = map[string]*loggedService{}
	_ = filepath.WalkDir(a.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // the others count
		}
		if i, err := d.Info(); err == nil {
			rel, _ := filepath.Rel(a.dir, path)
			parts := strings.SplitN(rel, string(filepath.Separator), 3)
			key := filepath.Join(parts[:min(2, len(parts))]...)
			if services[key] == nil {
				services[key] = &loggedService{}
			}
			v := services[key]
			v.files = append(v.files, loggedFile{path, i.ModTime(), i.Size()})
			v.size += i.Size()
			total += i.Size()
		}
		return nil
	})
	for _, v := range services {
		slices.SortFunc(v.files, func(x, y loggedFile) int { return cmp.Or(x.at.Compare(y.at), cmp.Compare(x.path, y.path)) })
	}
	return services, total
}

// close closes the files.
func (a *accessLog) close() {
	a.pruning.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.files {
		_ = f.Close()
	}
	clear(a.files)
}
