// Package accesslog writes the access logs of load balancers, in the formats of AWS. Package logship uploads them.
package accesslog

import (
	"cmp"
	"crypto/tls"
	"fmt"
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
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/svc"
)

// Log writes a line for each connection of TCP or TLS, and for each request of HTTP, as a Classic Load Balancer
// of AWS does (https://docs.aws.amazon.com/elasticloadbalancing/latest/classic/access-log-collection.html), or for requests
// as an Application Load Balancer. Each line is one write, so that none is lost when the process ends.
type Log struct {
	dir, node string
	log       *slog.Logger
	most      int64   // bytes of all files; the oldest go first
	output    *output // in place of files, nil for those

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

// New returns a Log with files in a directory, which name the node that writes them; Standard stands for the standard output. It
// reports what fails to log.
func New(dir, node string, log *slog.Logger) *Log {
	l := &Log{dir: filepath.Clean(dir), node: node, log: log, most: maxAccessLogs, files: map[logKey]*logFile{}}
	if dir == Standard {
		l.output = newOutput(os.Stdout)
	}
	return l
}

// Entry is a line.
type Entry struct {
	Owner        logship.Owner // its Service
	At           time.Time     // of the end
	Client, Pod  netip.AddrPort
	Before       time.Duration // until a Pod had it
	During       time.Duration // until the Pod answered, negative if that is unknown
	After        time.Duration // until the client had the answer
	Status       int           // to the client, 0 without HTTP
	PodStatus    int
	Received     int64 // from the client
	Sent         int64
	Request      string // empty without HTTP
	Agent        string
	Suite, Proto string // of TLS

	// What follows only lines of JSON have.

	RequestID string
	Subject   string // of the client's certificate

	// What follows only lines of an Application Load Balancer have.

	Kind   string // http, https, h2, grpcs, ws or wss
	Began  time.Time
	Domain string // that TLS was asked for
}

// KindOf returns what an Application Load Balancer calls a request that had a status, by its protocol.
func KindOf(protocol string, grpc, secure bool, status int) string {
	switch {
	case status == http.StatusSwitchingProtocols && secure:
		return "wss"
	case status == http.StatusSwitchingProtocols:
		return "ws"
	case secure && protocol == "HTTP/2.0" && grpc:
		return "grpcs"
	case protocol == "HTTP/2.0": // also without TLS, which an Application Load Balancer does not have
		return "h2"
	case secure:
		return "https"
	}
	return "http"
}

// TLS takes over what was agreed on.
func (e *Entry) TLS(s tls.ConnectionState) {
	e.Suite, e.Proto = tls.CipherSuiteName(s.CipherSuite), strings.ReplaceAll(tls.VersionName(s.Version), " ", "v")
}

const timeFormat = "2006-01-02T15:04:05.000000Z"

// text returns the line as of a Classic Load Balancer.
func (e *Entry) text() string {
	return e.At.UTC().Format(timeFormat) + " " + e.Owner.Service.String() + " " + e.common() + "\n"
}

// common returns what lines of both formats have, from the client to TLS.
func (e *Entry) common() string {
	seconds := func(d time.Duration) string {
		if d < 0 {
			return "-1"
		}
		return strconv.FormatFloat(d.Seconds(), 'f', 6, 64)
	}
	return fmt.Sprintf("%s %s %s %s %s %s %s %d %d \"%s\" \"%s\" %s %s",
		e.Client, e.to(), seconds(e.Before), seconds(e.During), seconds(e.After), number(e.Status), number(e.PodStatus), e.Received, e.Sent,
		quoted(cmp.Or(e.Request, "- - - ")), quoted(cmp.Or(e.Agent, "-")), cmp.Or(e.Suite, "-"), cmp.Or(e.Proto, "-"))
}

// to returns the Pod.
func (e *Entry) to() string {
	if e.Pod.IsValid() {
		return e.Pod.String()
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
// (https://docs.aws.amazon.com/elasticloadbalancing/latest/application/load-balancer-access-logs.html#access-log-Entry-format).
func (e *Entry) application() string {
	actions := "-"
	if e.Pod.IsValid() {
		actions = "forward"
	}
	return fmt.Sprintf("%s %s app/%s %s - \"-\" \"%s\" \"-\" 0 %s \"%s\" \"-\" \"-\" \"%s\" \"%s\" \"-\" \"-\" -\n",
		e.Kind, e.At.UTC().Format(timeFormat), e.Owner.Service, e.common(), quoted(cmp.Or(e.Domain, "-")), e.Began.UTC().Format(timeFormat),
		actions, e.to(), number(e.PodStatus))
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

// Write writes a line for a Service whose files are of a format and an interval. The format of an Application Load
// Balancer is for requests: other lines go to another file.
func (l *Log) Write(e *Entry, o dialect.AccessLog) {
	key := logKey{e.Owner, dialect.LogELB}
	line := ""
	switch {
	case o.Format == dialect.LogJSON:
		key.format, line = o.Format, e.json()
	case o.Format == dialect.LogALB && e.Kind != "":
		key.format, line = o.Format, e.application()
	default:
		line = e.text()
	}
	if l.output != nil {
		l.output.write(line)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	at := e.At
	if at.Before(l.complete) {
		at = l.complete
	}
	f := l.files[key]
	if f == nil || !at.Before(f.until) || f.left < 0 {
		if f != nil {
			_ = f.Close()
		}
		delete(l.files, key)
		l.forget(func(_ logKey, f *logFile) bool { return !at.Before(f.until) })
		l.startPrune(at)
		made, err := l.open(key, at, o.Every.Std())
		if err != nil {
			l.warn("cannot write an access log", "service", e.Owner.Service, "err", err)
			return
		}
		f = made
		l.files[key] = f
	}
	n, err := f.WriteString(line)
	if f.left -= int64(n); err != nil {
		l.warn("cannot write an access log", "service", e.Owner.Service, "err", err)
	}
}

// Finish makes sure that nothing is added to files that are complete by now.
func (l *Log) Finish(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.After(l.complete) {
		l.complete = now
	}
	l.forget(func(_ logKey, f *logFile) bool { return !now.Before(f.until) })
}

// open opens the file for a time: that of an earlier process goes on.
func (l *Log) open(key logKey, at time.Time, every time.Duration) (*logFile, error) {
	if every <= 0 {
		every = time.Hour
	}
	is := logship.File{Node: l.node, Owner: key.owner, Application: key.format == dialect.LogALB, JSON: key.format == dialect.LogJSON,
		End: at.UTC().Truncate(every).Add(every)}
	if err := os.MkdirAll(filepath.Dir(filepath.Join(l.dir, is.Name(every))), 0o750); err != nil {
		return nil, err
	}
	for ; ; is.Part++ { // a few: each has an eighth of the bytes that all may have
		f, err := os.OpenFile(filepath.Join(l.dir, is.Name(every)), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err != nil || info.Size() > l.most/8 {
			_ = f.Close()
			if err != nil {
				return nil, err
			}
			continue
		}
		return &logFile{f, is.End, l.most/8 - info.Size()}, nil
	}
}

// warn reports a failure, at most once a minute. The caller holds mu.
func (l *Log) warn(text string, args ...any) {
	if now := time.Now(); now.Sub(l.warned) >= time.Minute {
		l.warned = now
		l.log.Warn(text, args...)
	}
}

// Retain closes the files of Services for which keep returns false. A line that comes later opens one again, until the
// interval ends.
func (l *Log) Retain(keep func(svc.Name) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(func(k logKey, _ *logFile) bool { return !keep(k.owner.Service) })
}

// forget closes files. The caller holds mu.
func (l *Log) forget(which func(logKey, *logFile) bool) {
	for n, f := range l.files {
		if which(n, f) {
			_ = f.Close()
			delete(l.files, n)
		}
	}
}

// startPrune starts to remove files beyond the limit. The caller holds mu, which prune does not hold while it reads
// directories: no request waits for it.
func (l *Log) startPrune(now time.Time) {
	if now.Sub(l.pruned) >= pruneEvery && !l.prunes {
		l.pruned, l.prunes = now, true
		l.pruning.Go(l.prune)
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
func (l *Log) prune() {
	services, total := l.measure()
	removed := 0
	for total > l.most && len(services) > 0 {
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
		if l.remove(f.path) {
			removed++
			total -= f.size
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.prunes = false
	if removed > 0 {
		l.warn("removed the oldest access logs, since there are too many", "files", removed, "bytes", l.most)
	}
}

// remove removes a file, and directories that are empty without it.
func (l *Log) remove(path string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(func(_ logKey, open *logFile) bool { return open.Name() == path })
	if os.Remove(path) != nil {
		return false
	}
	if logship.Unsent(path) {
		l.dropped++
	}
	for dir := filepath.Dir(path); dir != l.dir && os.Remove(dir) == nil; { // while it is empty
		dir = filepath.Dir(dir)
	}
	return true
}

// measure returns the files of all Services, by their directories, and how many bytes they have.
func (l *Log) measure() (services map[string]*loggedService, total int64) {
	services = map[string]*loggedService{}
	_ = filepath.WalkDir(l.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // the others count
		}
		if i, err := d.Info(); err == nil {
			rel, _ := filepath.Rel(l.dir, path)
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

// Dropped returns how many files were removed, since there were too many, before they were uploaded.
func (l *Log) Dropped() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dropped
}

// DroppedLines returns how many lines the standard output did not get, since its reader was too slow.
func (l *Log) DroppedLines() uint64 {
	if l.output == nil {
		return 0
	}
	return l.output.dropped.Load()
}

// Close closes the files.
func (l *Log) Close() {
	if l.output != nil {
		l.output.close()
	}
	l.pruning.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.files {
		_ = f.Close()
	}
	clear(l.files)
}
