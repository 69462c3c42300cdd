package watch

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// stuckResponse is a response whose client does not read until it is cut.
type stuckResponse struct {
	http.ResponseWriter
	end chan struct{}
}

// Write waits for the end.
func (s *stuckResponse) Write([]byte) (int, error) {
	<-s.end
	return 0, http.ErrHandlerTimeout
}

// SetWriteDeadline ends the writes.
func (s *stuckResponse) SetWriteDeadline(time.Time) error {
	close(s.end)
	return nil
}

// Hijack gives a connection that is stuck, too.
func (s *stuckResponse) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return stuckConn{nil, s}, bufio.NewReadWriter(bufio.NewReader(nil), nil), nil
}

// stuckConn is the connection of a stuckResponse.
type stuckConn struct {
	net.Conn
	of *stuckResponse
}

// Write waits for the end.
func (c stuckConn) Write(p []byte) (int, error) { return c.of.Write(p) }

// SetWriteDeadline ends the writes.
func (c stuckConn) SetWriteDeadline(at time.Time) error { return c.of.SetWriteDeadline(at) }

// newGuard returns the guard of a response to w, and how often it was ended.
func newGuard(w http.ResponseWriter) (*stallGuard, *int) {
	ended := new(int)
	return &stallGuard{ResponseWriter: w, limit: time.Hour, began: time.Now(), ended: func() { *ended++ }, reset: func() {}}, ended
}

// Watches that are not read end when too many bytes wait for a user, the longest first, and no further one is begun.
// Watches of other users, and watches that are read, go on. All waiting here is in the virtual time of synctest.
func TestBudgetEndsUnread(t *testing.T) {
	t.Parallel()
	t.Run("HTTP", func(t *testing.T) {
		endsUnread(t, func(g *stallGuard) (io.Writer, error) { return g, nil })
	})
	t.Run("WebSocket", func(t *testing.T) {
		endsUnread(t, func(g *stallGuard) (io.Writer, error) {
			conn, _, err := g.Hijack()
			return conn, err
		})
	})
}

// endsUnread writes the events of each watch by what writer returns.
func endsUnread(t *testing.T, writer func(*stallGuard) (io.Writer, error)) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget(1000)
		event := make([]byte, 1<<20)
		quiet, reader := &user.DefaultInfo{Name: "quiet"}, &user.DefaultInfo{Name: "reader"}
		other, otherEnded := newGuard(&stuckResponse{httptest.NewRecorder(), make(chan struct{})})
		if _, err := b.open(reader, other); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = other.Write(event) }()
		var ends []*int
		refused := 0
		for range 3 * userUnread / len(event) {
			g, ended := newGuard(&stuckResponse{httptest.NewRecorder(), make(chan struct{})})
			done, err := b.open(quiet, g)
			if err != nil {
				if !apierrors.IsTooManyRequests(err) {
					t.Error(err)
				}
				refused++
				continue
			}
			ends = append(ends, ended)
			w, err := writer(g)
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				defer done()
				defer g.stop()
				_, _ = w.Write(event)
			}()
			synctest.Wait()
			time.Sleep(time.Millisecond)
		}
		if len(ends) > userUnread/len(event)+int(unreadBusy/time.Millisecond) || len(ends) < userUnread/len(event) {
			t.Errorf("%d watches were begun", len(ends))
		}
		time.Sleep(3 * unreadGrace)
		synctest.Wait()
		cut := 0
		for i, ended := range ends {
			cut += *ended
			if want := i < len(ends)-userUnread/len(event); (*ended > 0) != want {
				t.Errorf("watch %d of %d ended %d times", i, len(ends), *ended)
			}
		}
		b.mu.Lock()
		waits := b.users["quiet"].bytes
		b.mu.Unlock()
		if waits > userUnread || cut == 0 || *otherEnded > 0 {
			t.Errorf("%d bytes wait, %d watches ended, another user's %d", waits, cut, *otherEnded)
		}
		time.Sleep(3 * time.Hour) // the guards end the rest
		synctest.Wait()
	})
}

// A user who has all watches gets another when one ends. Administrators may have more.
func TestBudgetOfWatches(t *testing.T) {
	t.Parallel()
	b := NewBudget(2)
	tenant := &user.DefaultInfo{Name: "tenant"}
	open := func(u user.Info) (int, func()) {
		g, _ := newGuard(httptest.NewRecorder())
		ctx := request.WithUser(t.Context(), u)
		w, begun, end := httptest.NewRecorder(), make(chan struct{}), make(chan struct{})
		done := make(chan struct{})
		h := b.Bounded(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { close(begun); <-end }),
			func(w http.ResponseWriter, _ *http.Request, err error) {
				w.WriteHeader(int(err.(apierrors.APIStatus).Status().Code))
				close(begun)
			})
		r := httptest.NewRequest(http.MethodGet, "/", nil).WithContext(context.WithValue(ctx, guardKey{}, g))
		go func() { defer close(done); h.ServeHTTP(w, r) }()
		<-begun
		select {
		case <-done:
		case <-time.After(0):
		}
		return w.Code, func() { close(end); <-done }
	}
	_, first := open(tenant)
	_, second := open(tenant)
	if code, _ := open(tenant); code != http.StatusTooManyRequests {
		t.Errorf("a third watch: %d", code)
	}
	var ends []func()
	for _, u := range []user.Info{
		&user.DefaultInfo{Name: "admin", Groups: []string{user.SystemPrivilegedGroup}}, &user.DefaultInfo{Name: user.APIServerUser},
	} {
		for i := range 3 {
			code, end := open(u)
			if code != http.StatusOK {
				t.Errorf("watch %d of %s: %d", i, u.GetName(), code)
			}
			ends = append(ends, end)
		}
	}
	first()
	code, third := open(tenant)
	if code != http.StatusOK {
		t.Errorf("after the end of one: %d", code)
	}
	for _, end := range append(ends, second, third) {
		end()
	}
	if len(b.users) > 0 {
		t.Errorf("users are kept: %v", b.users)
	}
}

// A slow watch ends when what waits for it is large, and not only when it is many events.
func TestSharedBacklogIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	w := &sharedWatch{out: make(chan watch.Event, sharedBuffer), done: make(chan struct{})}
	const size = sharedBacklogBytes / 4
	object := &corev1.ConfigMap{Data: map[string]string{"a": string(make([]byte, size))}}
	n := 0
	for ; !w.ended && n < sharedBacklog; n++ {
		w.send(watch.Event{Type: watch.Modified, Object: object}, func() int { return sizeOf(object) })
	}
	if n < sharedBuffer+3 || n > sharedBuffer+5 {
		t.Errorf("the watch ended after %d events", n)
	}
	close(w.done)
	w.wg.Wait()
	if got := sizeOf(object); got < size || got > size+1000 {
		t.Error(fmt.Sprint("the size of the object: ", got))
	}
}
