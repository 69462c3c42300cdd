package accounts

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4/jwt"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/util/keyutil"
)

// server is the directory of one of several servers, and what a server does with it.
type server struct {
	dir KeyDir
	*Issuer
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{dir: KeyDir(t.TempDir())}
	var err error
	if s.Issuer, err = NewIssuer("https://issuer", nil, s.dir.file(KeyFile), s.dir.file(PublicFile)); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *server) token(t *testing.T) string {
	t.Helper()
	claims := jwt.Claims{Issuer: s.Name, Expiry: jwt.NewNumericDate(time.Now().Add(time.Hour))}
	token, err := jwt.Signed(s.keys.Load().signer).Claims(claims).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// knows reports whether a key of the server verifies a token.
func (s *server) knows(t *testing.T, token string) bool {
	t.Helper()
	if _, err := s.reload(); err != nil {
		t.Fatal(err)
	}
	a := &Authenticator{Issuer: s.Issuer, Now: time.Now}
	_, _, err := a.AuthenticateToken(t.Context(), token)
	return err == nil || !strings.Contains(err.Error(), "not signed by this cluster")
}

// Through all stages, in any order of two servers, each accepts what the other signs; at the end the old key's tokens are rejected.
func TestKeyIsReplacedAtSeveralServers(t *testing.T) {
	t.Parallel()
	a := newServer(t)
	b := newServer(t)
	shared, err := os.ReadFile(a.dir.file(KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	own, err := keyutil.MakeEllipticPrivateKeyPEM() // a further key of the administrator's
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.dir.file("own.key"), own, 0o600); err != nil {
		t.Fatal(err)
	}
	further, err := b.dir.publicOf("own.key")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{KeyFile: shared, PublicFile: further} {
		if err := os.WriteFile(b.dir.file(name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	both := func(after string) {
		t.Helper()
		for _, pair := range [][2]*server{{a, b}, {b, a}} {
			if token := pair[0].token(t); !pair[0].knows(t, token) || !pair[1].knows(t, token) {
				t.Errorf("after %s a token is rejected", after)
			}
		}
	}
	if _, err := b.reload(); err != nil {
		t.Fatal(err)
	}
	first := a.token(t)
	both("the start")
	do := func(what string, f func() error) {
		t.Helper()
		for range 2 { // a stage may be taken again
			if err := f(); err != nil && !strings.Contains(err.Error(), "no key is being replaced") {
				t.Fatalf("%s: %v", what, err)
			}
		}
		both(what)
	}
	do("a publishes", func() error { return a.dir.Publish(nil) })
	next, err := os.ReadFile(a.dir.file(NextFile))
	if err != nil {
		t.Fatal(err)
	}
	do("b publishes", func() error { return b.dir.Publish(next) })
	do("b signs", b.dir.Sign)
	do("a signs", a.dir.Sign)
	if !a.knows(t, first) || !b.knows(t, first) {
		t.Error("an old token is rejected too early")
	}
	do("a finishes", a.dir.Finish)
	do("b finishes", b.dir.Finish)
	if a.knows(t, first) || b.knows(t, first) {
		t.Error("an old token is accepted at the end")
	}
	if left, err := b.dir.read(PublicFile); err != nil || string(left) != string(further) {
		t.Errorf("the administrator's own key: %s, %v", left, err)
	}
	for _, s := range []*server{a, b} {
		if state, err := s.dir.State(); err != nil || state.Stage != NotRotating || state.Old+state.Next != "" {
			t.Errorf("%+v, %v", state, err)
		}
	}
	if files, err := filepath.Glob(a.dir.file("*")); err != nil || len(files) != 1 {
		t.Errorf("left: %v, %v", files, err)
	}
}

// What is out of turn is rejected, and changes nothing; an abort before the next key signs leaves what was.
func TestStagesOutOfTurn(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	rejected := func(what string, err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", what, err, want)
		}
	}
	rejected("sign at first", s.dir.Sign(), "publish one first")
	rejected("finish at first", s.dir.Finish(), "no key is being replaced")
	rejected("abort at first", s.dir.Abort(), "no next key")
	rejected("no key", s.dir.Publish([]byte("x")), "private key")
	same, err := os.ReadFile(s.dir.file(KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	rejected("the key that signs", s.dir.Publish(same), "the one that signs")
	if err := s.dir.Publish(nil); err != nil {
		t.Fatal(err)
	}
	other, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		t.Fatal(err)
	}
	rejected("another key", s.dir.Publish(other), "has another key")
	rejected("finish too early", s.dir.Finish(), "the old key still signs")
	if err := s.dir.Abort(); err != nil {
		t.Fatal(err)
	}
	if files, err := filepath.Glob(s.dir.file("*")); err != nil || len(files) != 1 {
		t.Errorf("left after the abort: %v, %v", files, err)
	}
	if err := s.dir.Publish(nil); err != nil {
		t.Fatal(err)
	}
	if err := s.dir.Sign(); err != nil {
		t.Fatal(err)
	}
	rejected("publish before the end", s.dir.Publish(nil), "finish this rotation")
	rejected("abort too late", s.dir.Abort(), "no next key")
}

// Wherever a stage is interrupted, no public key is left without its private one, and the next stage completes it: the tokens of the
// old key are valid until the end, and then rejected.
func TestInterruptedPublish(t *testing.T) {
	t.Parallel()
	for lost, files := range map[string][]string{"all but the next key": {PublicFile, OldFile}, "the old key": {OldFile}} {
		s := newServer(t)
		first := s.token(t)
		if err := s.dir.Publish(nil); err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if err := os.Remove(s.dir.file(f)); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.dir.Sign(); err != nil {
			t.Fatal(err)
		}
		if state, err := s.dir.State(); err != nil || state.Stage != Signing || !s.knows(t, first) {
			t.Errorf("without %s: %+v, %v; or the old token is rejected too early", lost, state, err)
		}
		if err := s.dir.Finish(); err != nil || s.knows(t, first) {
			t.Errorf("without %s: %v, or the old token is accepted at the end", lost, err)
		}
	}
	s := newServer(t)
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, string(s.dir), unix.IN_MOVED_TO); err != nil {
		t.Fatal(err)
	}
	if err := s.dir.Publish(nil); err != nil {
		t.Fatal(err)
	}
	events := make([]byte, 4096)
	n, err := unix.Read(fd, events)
	if err != nil {
		t.Fatal(err)
	}
	next, public := bytes.Index(events[:n], []byte(NextFile)), bytes.Index(events[:n], []byte(PublicFile))
	if next < 0 || public < next {
		t.Errorf("%s is written at %d of the events, %s at %d", NextFile, next, PublicFile, public)
	}
}

// A server that joins during a replacement gets all that the others have of it: it takes the next stages too, and rejects the old
// key's tokens at the end.
func TestServerJoinsWhileKeyIsReplaced(t *testing.T) {
	t.Parallel()
	joins := func(a *server) *server {
		t.Helper()
		dir := KeyDir(t.TempDir())
		for _, name := range Files() {
			text, err := a.dir.read(name)
			if err == nil && text != nil {
				err = dir.write(name, text)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		i, err := NewIssuer(a.Name, nil, dir.file(KeyFile), dir.file(PublicFile))
		if err != nil {
			t.Fatal(err)
		}
		return &server{dir: dir, Issuer: i}
	}
	a := newServer(t)
	old := a.token(t)
	if err := a.dir.Publish(nil); err != nil {
		t.Fatal(err)
	}
	b := joins(a)
	if err := errors.Join(a.dir.Sign(), b.dir.Sign()); err != nil {
		t.Fatal(err)
	}
	all := []*server{a, b, joins(a)}
	for i, s := range all {
		if !s.knows(t, old) {
			t.Errorf("server %d rejects the old token too early", i)
		}
		if err := s.dir.Finish(); err != nil || s.knows(t, old) {
			t.Errorf("server %d: %v, or the old token is accepted at the end", i, err)
		}
	}
	for i, s := range all {
		if !s.knows(t, a.token(t)) {
			t.Errorf("server %d rejects a new token", i)
		}
	}
}

// A server tells since when its key signs: a further key that verifies does not change that, the next one that signs does.
func TestKeysTellSince(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	told := func() string {
		if _, err := s.reload(); err != nil {
			t.Fatal(err)
		}
		w := httptest.NewRecorder()
		s.Discovery("https://server")[KeysPath].ServeHTTP(w, httptest.NewRequest(http.MethodGet, KeysPath, nil))
		return w.Header().Get("Last-Modified")
	}
	wrote := func(at time.Time) string {
		if err := os.Chtimes(s.dir.file(KeyFile), at, at); err != nil {
			t.Fatal(err)
		}
		return at.UTC().Format(http.TimeFormat)
	}
	old := wrote(time.Now().Add(-48 * time.Hour))
	if err := s.dir.Publish(nil); err != nil {
		t.Fatal(err)
	}
	if since := told(); since != old {
		t.Errorf("the old key signs since %s, want %s", since, old)
	}
	if err := s.dir.Sign(); err != nil {
		t.Fatal(err)
	}
	next := wrote(time.Now().Add(-24 * time.Hour))
	if since := told(); since != next {
		t.Errorf("the next key signs since %s, want %s", since, next)
	}
}

// A server follows the files, keeps its keys while they cannot be read, and says so once.
func TestFollow(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.Follow(t.Context(), slog.New(slog.NewTextHandler(&log, nil)))
		}()
		good, err := os.ReadFile(s.dir.file(KeyFile))
		if err != nil {
			t.Fatal(err)
		}
		write := func(text []byte) {
			t.Helper()
			if err := os.WriteFile(s.dir.file(KeyFile), text, 0o600); err != nil {
				t.Fatal(err)
			}
			time.Sleep(3 * followPeriod)
		}
		before := s.keys.Load()
		write([]byte("broken"))
		if s.keys.Load() != before || strings.Count(log.String(), "cannot read the keys of tokens") != 1 {
			t.Errorf("log:\n%s", log.String())
		}
		write(good)
		if err := s.dir.Publish(nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * followPeriod)
		if n := len(s.keys.Load().public); n != 2 || !strings.Contains(log.String(), "the keys of tokens have changed") {
			t.Errorf("%d keys, log:\n%s", n, log.String())
		}
	})
}
