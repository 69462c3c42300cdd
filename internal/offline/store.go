// Package offline keeps the last known state of the API on a node's disk, and answers
// with it while no server does: a node that starts then has the Services, endpoints, names
// and Pods that it knew.
//
// It works below the clients. The answer of a list is kept as it is, and the bytes of the
// watch that follows are appended to it before the client gets them, so that the disk is
// never behind what this node has done. Lists that accept any version (resourceVersion=0),
// as reflectors ask at their start, are answered from it. The watch that comes next goes on
// from that version when a server is back: only the changes since then are
// applied.
package offline

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
)

const (
	// protobuf is the only encoding that is kept: a node's clients ask for it.
	protobuf = "application/vnd.kubernetes.protobuf"
	// minCompact is the least number of bytes of changes until a file is written again; from
	// there on it is as many as the list has.
	minCompact = 256 << 10
	// maxAge is how long a file is kept that was not used.
	maxAge = 30 * 24 * time.Hour
	// maxSingles is how many bytes are kept of objects that were read one by one. Users make
	// those, and a node must not fill its disk with all that its Pods have ever named.
	maxSingles = 64 << 20
	// singlePrefix begins the names of their files.
	singlePrefix = "single-"
)

// kept are the resources whose lists are kept. Secrets are not, nor is anything that may
// hold one.
func kept() []string {
	return []string{"services", "endpointslices", "nodes", "namespaces", "pods", "servicecidrs", "ipaddresses", "configmaps"}
}

// Store is a directory of answers.
type Store struct {
	dir string
	log *slog.Logger
	// compact is minCompact, and room maxSingles.
	compact, room int64
	disk          syncer

	mu      sync.Mutex
	answers map[string]*answer // by key
	singles int64              // the bytes of single objects, or more
}

// answer is one list and its changes; mu guards it.
type answer struct {
	path    string
	single  bool
	compact int64
	disk    *syncer
	mu      sync.Mutex
	file    *os.File // open for changes, nil before the first list of this process
	// version is up to which everything is in the file; list and changes are its bytes.
	version       uint64
	list, changes int64
	watched       int // by how many watches whose changes are kept
	saved         int // how many answers of servers were kept
}

// Open returns the Store in a directory, which it makes.
func Open(dir string, log *slog.Logger) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("the last known state: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("the last known state: %w", err)
	}
	s := &Store{dir: dir, log: log, compact: minCompact, room: maxSingles, answers: map[string]*answer{}}
	for _, e := range entries {
		info, err := e.Info()
		switch {
		case err != nil:
		case time.Since(info.ModTime()) > maxAge:
			_ = os.Remove(filepath.Join(dir, e.Name()))
		case strings.HasPrefix(e.Name(), singlePrefix):
			s.singles += info.Size()
		}
	}
	return s, nil
}

// Use makes clients created from cfg keep and use the last known state. Call it after all
// else that sets cfg up.
func (s *Store) Use(cfg *rest.Config) {
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return &transport{s, next} })
}

// Close waits until everything is on the disk. It comes after the end of the clients.
func (s *Store) Close() { s.disk.close() }

// answer returns the answer of a key, single for that of one object.
func (s *Store) answer(key string, single bool) *answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.answers[key]
	if a == nil {
		sum := sha256.Sum256([]byte(key))
		name := hex.EncodeToString(sum[:16])
		if single {
			name = singlePrefix + name
		}
		a = &answer{path: filepath.Join(s.dir, name), single: single, compact: s.compact, disk: &s.disk}
		s.answers[key] = a
	}
	return a
}

type transport struct {
	s    *Store
	next http.RoundTripper
}

func (t *transport) WrappedRoundTripper() http.RoundTripper { return t.next }

func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	key, q, ok := keyOf(req)
	if !ok {
		return t.next.RoundTrip(req)
	}
	a := t.s.answer(key, q.single)
	before := a.saves()
	resp, err := t.next.RoundTrip(req)
	switch {
	case err != nil && errors.Is(err, syscall.ECONNREFUSED) && !q.watch && (q.any || q.single):
		if body := t.s.load(a, key); body != nil {
			return answerOf(req, body), nil
		}
	case err != nil || resp.StatusCode != http.StatusOK || !strings.HasPrefix(resp.Header.Get("Content-Type"), protobuf):
	case q.watch:
		if a.begin(q.version) {
			resp.Body = &recorder{ReadCloser: resp.Body, s: t.s, a: a, key: key}
		}
	default:
		var body []byte
		if body, err = io.ReadAll(resp.Body); err != nil {
			_ = resp.Body.Close()
			return nil, err
		}
		_ = resp.Body.Close()
		resp.Body = io.NopCloser(bytes.NewReader(body))
		t.s.save(a, key, body, before)
	}
	return resp, err
}

// answerOf is the response that a body of the disk makes.
func answerOf(req *http.Request, body []byte) *http.Response {
	return &http.Response{
		Status: "200 OK", StatusCode: http.StatusOK, Proto: "HTTP/2.0", ProtoMajor: 2, Request: req,
		Header: http.Header{"Content-Type": {protobuf}}, ContentLength: int64(len(body)), Body: io.NopCloser(bytes.NewReader(body)),
	}
}

// query is what a request asks of its resource.
type query struct {
	watch, single bool
	// any reports that any version will do; version is where a watch begins.
	any     bool
	version uint64
}

// keyOf returns the key of what req reads, and reports whether that is kept.
func keyOf(req *http.Request) (key string, q query, ok bool) {
	if req.Method != http.MethodGet {
		return "", q, false
	}
	parts := strings.Split(strings.Trim(req.URL.Path, "/"), "/")
	switch { // api/VERSION/..., apis/GROUP/VERSION/...
	case len(parts) > 2 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) > 3 && parts[0] == "apis":
		parts = parts[3:]
	default:
		return "", q, false
	}
	if len(parts) > 2 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	values := req.URL.Query()
	switch {
	case !slices.Contains(kept(), parts[0]) || len(parts) > 2 || values.Get("continue") != "":
		return "", q, false
	case len(parts) == 2:
		// What a Pod's start reads; of other kinds a node reads what it is about to write.
		if q.single = parts[0] == "configmaps"; !q.single {
			return "", q, false
		}
	case parts[0] == "pods" && !strings.Contains(values.Get("fieldSelector"), "spec.nodeName="):
		return "", q, false // a node does not keep Pods of other nodes
	}
	version := values.Get("resourceVersion")
	q.any = version == "0"
	q.version, _ = strconv.ParseUint(version, 10, 64)
	q.watch = values.Get("watch") != ""
	selects := url.Values{}
	for _, name := range []string{"labelSelector", "fieldSelector"} {
		if v := values.Get(name); v != "" {
			selects.Set(name, v)
		}
	}
	return req.URL.Path + "?" + selects.Encode(), q, true
}

// saves returns how many answers of servers were kept.
func (a *answer) saves() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.saved
}

// save keeps the answer of a list, unless a newer one is kept already: by a watch, or by another list that came between this
// one's request, when before answers had been kept, and its answer. A watch may lag behind a list that is newer than it for
// long; that list is kept, and the watch that follows it continues it.
func (s *Store) save(a *answer, key string, body []byte, before int) {
	l, err := parse(body, a.single)
	a.mu.Lock()
	defer a.mu.Unlock()
	whole := err == nil && !l.more
	switch newer := whole && l.version > a.version; {
	case !newer && a.watched > 0, whole && !newer && a.saved != before:
		return
	case !whole:
		s.failed(a, key, err)
		return
	}
	a.saved++
	s.failed(a, key, a.write(key, body, l.version))
	if a.single {
		s.makeRoom(int64(len(body)))
	}
}

// makeRoom removes the single objects that were read longest ago if there are too many with one
// more. It leaves some room, so that it does not look at all of them each time.
func (s *Store) makeRoom(added int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.singles += added; s.singles <= s.room {
		return
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		s.log.Warn("cannot look for unused parts of the last known state; retrying with the next object", "dir", s.dir, "err", err)
		return
	}
	var files []fs.FileInfo
	s.singles = 0
	for _, e := range entries {
		if info, err := e.Info(); err == nil && strings.HasPrefix(e.Name(), singlePrefix) {
			files = append(files, info)
			s.singles += info.Size()
		}
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, f := range files {
		if s.singles <= s.room*3/4 {
			break
		}
		if err := os.Remove(filepath.Join(s.dir, f.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.log.Warn("cannot remove a part of the last known state", "dir", s.dir, "err", err)
			continue
		}
		s.singles -= f.Size()
	}
	maps.DeleteFunc(s.answers, func(_ string, a *answer) bool { return a.single }) // their files say all
}

// load returns the answer of a key as a server would give it, nil if there is none.
func (s *Store) load(a *answer, key string) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	body, version, err := read(a.path, key)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("cannot use a part of the last known state", "of", key, "file", a.path, "err", err)
	}
	if body != nil && err != nil { // what is added now comes after what can be read
		s.failed(a, key, a.write(key, body, version))
	}
	if body != nil && a.file == nil {
		a.version = version
		s.log.Debug("no server answers; using the last known state", "of", key, "version", version)
	}
	return body
}

// failed removes an answer that could not be kept: this node's state must not be newer than
// what is on its disk. It is called with a's lock held.
func (s *Store) failed(a *answer, key string, err error) {
	if err == nil {
		return
	}
	if !errors.Is(err, errNoFile) {
		s.log.Warn("cannot keep the last known state; a start without a server will lack it", "of", key, "file", a.path, "err", err)
	}
	a.close()
	a.version = 0
	_ = os.Remove(a.path)
}

// begin reports whether a watch from a version continues what is kept. Several clients may watch
// the same: whichever is ahead adds what is new, so that none of them is ahead of the disk.
func (a *answer) begin(version uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if version == 0 || version > a.version {
		return false
	}
	a.watched++
	return true
}

// recorder keeps what passes of a watch.
type recorder struct {
	io.ReadCloser
	s     *Store
	a     *answer
	key   string
	parts framer
	ended bool
}

// Read gives the client nothing that is not on the disk.
func (r *recorder) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	r.a.mu.Lock()
	defer r.a.mu.Unlock()
	if n > 0 && !r.ended {
		frames, version, bad := r.parts.add(p[:n], r.a.version)
		if bad == nil && len(frames) > 0 {
			bad = r.a.append(r.key, frames, version)
		}
		if bad != nil {
			r.s.failed(r.a, r.key, bad)
			r.end()
		}
	}
	if err != nil {
		r.end()
	}
	return n, err
}

// Close ends the watch.
func (r *recorder) Close() error {
	r.a.mu.Lock()
	r.end()
	r.a.mu.Unlock()
	return r.ReadCloser.Close()
}

// end keeps nothing more of this watch. It is called with the lock held.
func (r *recorder) end() {
	if !r.ended {
		r.ended = true
		r.a.watched--
	}
}
