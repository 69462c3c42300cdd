package accesslog

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// An interval has its file, which the next process goes on with; there is an end to how much they are.
func TestAccessLogFiles(t *testing.T) {
	dir := t.TempDir()
	r := lbtest.New(t)
	open := func(most int64) *Log {
		a := &Log{dir: dir, node: "n1", log: r.Logger(), most: most, files: map[logKey]*logFile{}}
		t.Cleanup(a.Close)
		return a
	}
	begin := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	name, client := svc.Name{Namespace: "default", Name: "web"}, netip.MustParseAddrPort("192.0.2.1:1")
	write := func(a *Log, at time.Time) {
		a.Write(&Entry{Owner: logship.OwnerOf(name, "uid"), At: at, Client: client}, dialect.AccessLog{Every: dialect.Duration(5 * time.Minute)})
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
			r.Must(err)
			out[filepath.Base(f)] = info.Size()
		}
		return out
	}
	const first, second = "n1_default_web_17b788a70eec_20260102T0305Z.log", "n1_default_web_17b788a70eec_20260102T0310Z.log"
	if got := sizes(); len(got) != 2 || got[first] != 2*got[second] || got[second] == 0 {
		t.Errorf("%v", got)
	}
	small := open(2000)
	small.Write(&Entry{Owner: logship.OwnerOf(svc.Name{Namespace: "default", Name: "quiet"}, "uid"), At: begin, Client: client},
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
	if left := r.Lines(dir); !slices.ContainsFunc(left, func(l string) bool { return strings.Contains(l, " default/quiet ") }) {
		t.Errorf("a Service with many lines has cost another one its own: %q", left)
	}
	// What is over, or of a Service that is gone, is not open.
	if len(small.files) != 1 {
		t.Errorf("%d files are open, want that of this interval", len(small.files))
	}
	if small.Dropped() == 0 {
		t.Error("files that were removed are not counted")
	}
	small.Retain(func(n svc.Name) bool { return n != name })
	if len(small.files) != 0 {
		t.Errorf("%d files of a Service that is gone are open", len(small.files))
	}
	if text := r.Logged.String(); !strings.Contains(text, "removed the oldest access logs") {
		t.Errorf("%s", text)
	}
}

// Nothing is added to a file that may be uploaded: a line that comes late goes to the one after it.
func TestFinishedFilesStay(t *testing.T) {
	begin := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	a := &Log{dir: t.TempDir(), node: "n1", log: slog.New(slog.DiscardHandler), most: 1 << 20, files: map[logKey]*logFile{}}
	t.Cleanup(a.Close)
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
		a.Write(&Entry{Owner: logship.OwnerOf(svc.Name{Namespace: "default", Name: service}, "uid"), At: begin, Kind: "http"},
			dialect.AccessLog{Every: dialect.Duration(5 * time.Minute), Format: format})
	}
	write("a", "")
	a.Finish(begin.Add(time.Minute))
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

// Files are counted while lines are written.
func TestPruneHoldsNothingUp(t *testing.T) {
	a := &Log{dir: t.TempDir(), log: slog.New(slog.DiscardHandler), files: map[logKey]*logFile{}}
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
	case <-time.After(lbtest.Patience):
		t.Fatal("files are not counted while a line is written")
	}
}

// A line of JSON has the known fields, numbers as numbers, and text of a client cannot end it.
func TestJSON(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC)
	e := Entry{
		Owner: logship.OwnerOf(svc.Name{Namespace: "default", Name: "web"}, "uid"), At: at, Client: netip.MustParseAddrPort("192.0.2.1:1"),
		Pod: netip.MustParseAddrPort("10.0.0.1:80"), Before: 5e6, During: 1e9, After: -1, Status: 200, PodStatus: 200, Received: 1, Sent: 2,
		Request: "GET http://a:80/\"},{\n<x> HTTP/1.1", Agent: "a\xff\n", Kind: "http", Began: at, RequestID: "id",
	}
	want := `{"time":"2026-01-02T03:04:05.006Z","namespace":"default","service":"web","client":"192.0.2.1:1","endpoint":"10.0.0.1:80",` +
		`"kind":"http","began":"2026-01-02T03:04:05.006Z","method":"GET","url":"http://a:80/\"},{\n\u003cx\u003e","protocol":"HTTP/1.1",` +
		`"status":200,"endpoint_status":200,"request_processing_seconds":0.005,"endpoint_processing_seconds":1,"received_bytes":1,` +
		`"sent_bytes":2,"user_agent":"a�\n","request_id":"id"}` + "\n"
	if got := e.json(); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	tcp := Entry{Owner: e.Owner, At: at, Client: e.Client, Before: -1, During: -1, After: -1}
	want = `{"time":"2026-01-02T03:04:05.006Z","namespace":"default","service":"web","client":"192.0.2.1:1","kind":"tcp",` +
		`"received_bytes":0,"sent_bytes":0}` + "\n"
	if got := tcp.json(); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	dir := t.TempDir()
	a := New(dir, "n1", slog.New(slog.DiscardHandler))
	for _, f := range []dialect.LogFormat{dialect.LogJSON, dialect.LogALB, dialect.LogELB} { // each has its file
		a.Write(&e, dialect.AccessLog{Format: f})
	}
	a.Close()
	files, _ := filepath.Glob(filepath.Join(dir, "default/web/2026/01/02/*"))
	if len(files) != 3 || !strings.Contains(files[1], "_json.web_") {
		t.Errorf("%q", files)
	}
}

// blocked is a reader that takes nothing until it may.
type blocked struct {
	may chan struct{}
	got strings.Builder
}

func (b *blocked) Write(p []byte) (int, error) {
	<-b.may
	return b.got.Write(p)
}

// No request waits for the reader of the standard output: lines are dropped and counted, and the others are whole.
func TestSlowOutput(t *testing.T) {
	w := &blocked{may: make(chan struct{})}
	a := &Log{output: newOutput(w)}
	e := Entry{At: time.Now(), Request: "GET / HTTP/1.1"}
	const lines = maxWaiting + 100
	for range lines {
		a.Write(&e, dialect.AccessLog{Format: dialect.LogJSON})
	}
	dropped := int(a.DroppedLines()) //nolint:gosec // a few
	close(w.may)
	a.Close()
	testbed.Receive(t, "the end of the output", a.output.done) // for which Close does not always wait
	got := strings.Split(strings.TrimSuffix(w.got.String(), "\n"), "\n")
	if dropped < 99 || len(got)+dropped != lines || strings.Count(w.got.String(), e.json()) != len(got) {
		t.Errorf("%d lines, %d dropped, of %d", len(got), dropped, lines)
	}
}

// A reader that takes nothing any more does not keep the process.
func TestBlockedOutput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &blocked{may: make(chan struct{})}
		a := &Log{output: newOutput(w)}
		a.Write(&Entry{At: time.Now()}, dialect.AccessLog{})
		began := time.Now()
		a.Close()
		if took := time.Since(began); took != lastWrites {
			t.Errorf("the end takes %v, want %v", took, lastWrites)
		}
		close(w.may)
	})
}
