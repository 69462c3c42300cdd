package socket

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Waiter waits for the next bytes of many connections, with one goroutine for all of them: a goroutine for each would
// cost its stack.
type Waiter struct {
	file  *os.File // an epoll, which the runtime's poller watches in turn
	epoll syscall.RawConn

	mu      sync.Mutex
	closed  bool
	next    uint64
	waiting map[uint64]*waiting
}

// waiting is a connection of a Waiter.
type waiting struct {
	conn  *net.TCPConn
	timer *time.Timer
	done  func(readable bool)
}

// NewWaiter returns a Waiter, for which Run has to run.
func NewWaiter() (*Waiter, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // by that package os lets the runtime watch it
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("fcntl O_NONBLOCK", err)
	}
	w := &Waiter{file: os.NewFile(uintptr(fd), "epoll"), waiting: map[uint64]*waiting{}}
	if w.epoll, err = w.file.SyscallConn(); err != nil {
		_ = w.file.Close()
		return nil, err
	}
	return w, nil
}

// Run waits until Close. When it ends with an error, what Wait has been given is called with false, and Wait accepts nothing more.
func (w *Waiter) Run() error {
	defer w.endAll()
	events := make([]unix.EpollEvent, 128)
	for {
		n := 0
		var failed error
		err := w.epoll.Read(func(fd uintptr) bool {
			n, failed = unix.EpollWait(int(fd), events, 0)
			return n != 0 // none are -1 after an error
		})
		switch {
		case err != nil && w.ended(): // package os does not wrap this one
			return nil
		case errors.Is(failed, unix.EINTR):
			continue
		case err != nil || failed != nil:
			return fmt.Errorf("wait for connections: %w", errors.Join(err, failed))
		}
		for i := range events[:n] {
			w.end(uint64(uint32(events[i].Fd))|uint64(uint32(events[i].Pad))<<32, true)
		}
	}
}

func (w *Waiter) ended() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.closed
}

// Wait has done called once: when c has bytes, an end or an error to be read, or with false when there is nothing within
// the timeout, or at Close. The caller must not read from c until then. It reports whether it waits; if not, done is not called.
func (w *Waiter) Wait(c *net.TCPConn, timeout time.Duration, done func(readable bool)) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return false
	}
	w.next++
	id := w.next
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: int32(uint32(id)), Pad: int32(id >> 32)}
	if w.control(c, unix.EPOLL_CTL_ADD, &event) != nil {
		return false
	}
	w.waiting[id] = &waiting{c, time.AfterFunc(timeout, func() { w.end(id, false) }), done}
	return true
}

// control changes what the epoll knows of a connection.
func (w *Waiter) control(c *net.TCPConn, op int, event *unix.EpollEvent) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner, failed error
	err = w.epoll.Control(func(epoll uintptr) {
		inner = raw.Control(func(fd uintptr) { failed = unix.EpollCtl(int(epoll), op, int(fd), event) })
	})
	return errors.Join(err, inner, failed)
}

// end calls a connection's done, unless that was done.
func (w *Waiter) end(id uint64, readable bool) {
	w.mu.Lock()
	c := w.waiting[id]
	delete(w.waiting, id)
	w.mu.Unlock()
	if c == nil {
		return
	}
	c.timer.Stop()
	_ = w.control(c.conn, unix.EPOLL_CTL_DEL, nil) // it may be closed
	c.done(readable)
}

// Close ends Run, and calls what Wait has been given with false.
func (w *Waiter) Close() error {
	w.endAll()
	return w.file.Close()
}

// endAll ends all that waits, and has Wait accept nothing more.
func (w *Waiter) endAll() {
	w.mu.Lock()
	w.closed = true
	all := w.waiting
	w.waiting = nil
	w.mu.Unlock()
	for _, c := range all {
		c.timer.Stop()
		c.done(false)
	}
}
