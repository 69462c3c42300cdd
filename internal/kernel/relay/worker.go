package relay

import (
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/svc"
)

// The kinds of file in a worker's epoll, beside the number that identifies it.
const (
	kindWake int32 = iota
	kindListener
	kindClient // of a TCP flow
	kindServer
	kindUDP // the endpoint's side of a UDP client
)

const (
	maxEvents = 256
	// bufferSize is how much is copied at once; a connection that fills it is
	// spliced.
	bufferSize = 32 << 10
	// pauseTime is how long a thread waits for files before it tries again.
	pauseTime = 50 * time.Millisecond
	yieldTime = 8 * time.Millisecond
)

// worker is one thread. But for what mu guards only the thread itself uses it.
type worker struct {
	engine *Engine
	epoll  int
	wake   int // an eventfd

	mu       sync.Mutex
	commands []func()
	closed   bool // commands are no longer run

	load atomic.Int64 // connections that are, or will be, this thread's
	// Bytes passed on. Each thread counts its own: one number for all of them
	// would be passed from processor to processor with every write.
	toEndpoints, toClients atomic.Int64

	now       time.Time
	yielded   time.Time
	events    [maxEvents]unix.EpollEvent
	listeners map[int32]*Listener
	dial      connector
	tcp       streams
	pipes     pipes
	udp       datagrams
	paused    bool
	resume    time.Time
	draining  bool // end when the last connection has
}

// slots numbers things. A number is free again after the events of the turn in
// which it was given back.
type slots[T any] struct {
	all    []T
	free   []int32
	leaver []int32
	n      int
}

func (s *slots[T]) add(v T) int32 {
	s.n++
	if n := len(s.free); n > 0 {
		i := s.free[n-1]
		s.free = s.free[:n-1]
		s.all[i] = v
		return i
	}
	s.all = append(s.all, v)
	return int32(len(s.all) - 1)
}

func (s *slots[T]) remove(i int32) {
	var none T
	s.all[i] = none
	s.leaver = append(s.leaver, i)
	s.n--
}

func (s *slots[T]) recycle() {
	s.free = append(s.free, s.leaver...)
	s.leaver = s.leaver[:0]
}

func newWorker(e *Engine) (*worker, error) {
	w := &worker{
		engine: e, epoll: -1, wake: -1, listeners: map[int32]*Listener{},
		dial: connector{spare: [2]int{-1, -1}},
		udp:  datagrams{oob: make([]byte, 128), byClient: map[udpKey]*udpClient{}, idle: list.New()},
	}
	w.dial.w, w.tcp.w, w.pipes.w, w.udp.w = w, w, w, w
	var err error
	if w.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if w.wake, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err == nil {
		err = w.watch(w.wake, unix.EPOLLIN, kindWake, 0)
	}
	if err != nil {
		w.closeFiles()
		return nil, err
	}
	return w, nil
}

// start starts the thread, and returns when it is in the Engine's namespace.
func (w *worker) start() error {
	entered := make(chan error, 1)
	w.engine.wg.Go(func() {
		defer w.closeFiles()
		home, err := w.engine.atHome()
		switch {
		case err != nil:
		case home:
			entered <- nil
			w.run()
		default:
			err = netns.OnThread(func() error {
				if err := unix.Setns(int(w.engine.ns.Fd()), unix.CLONE_NEWNET); err != nil {
					return os.NewSyscallError("setns", err)
				}
				entered <- nil
				w.run()
				return nil
			})
		}
		if err != nil {
			entered <- err
		}
	})
	return <-entered
}

// atHome reports whether the Engine's network namespace is the one in which
// goroutines run. A new goroutine must call it, without its own
// thread: the process's first thread, which /proc/self stands for, may be a test's
// and elsewhere.
func (e *Engine) atHome() (bool, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var own, want unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &own); err != nil {
		return false, fmt.Errorf("the process's network namespace: %w", err)
	}
	if err := unix.Fstat(int(e.ns.Fd()), &want); err != nil {
		return false, fmt.Errorf("the wanted network namespace: %w", err)
	}
	return own.Ino == want.Ino && own.Dev == want.Dev, nil
}

func (w *worker) closeFiles() {
	w.pipes.closeAll()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	for _, fd := range []int{w.dial.spare[0], w.dial.spare[1], w.wake, w.epoll} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// do has f called on the thread, before it looks at further events. Calls are
// made in order. It returns false if the thread has ended.
func (w *worker) do(f func()) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return false
	}
	w.commands = append(w.commands, f)
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(w.wake, one[:])
	return true
}

func (w *worker) runCommands() {
	var b [8]byte
	_, _ = unix.Read(w.wake, b[:])
	w.mu.Lock()
	commands := w.commands
	w.commands = nil
	w.mu.Unlock()
	for _, f := range commands {
		f()
	}
}

func (w *worker) watch(fd int, events uint32, kind, number int32) error {
	ev := unix.EpollEvent{Events: events, Fd: number, Pad: kind}
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, fd, &ev))
}

func (w *worker) run() {
	for {
		n, err := unix.EpollWait(w.epoll, w.events[:], w.epollTimeout())
		if err != nil && !is(err, unix.EINTR) {
			panic(fmt.Sprintf("relay: epoll_wait: %v", err)) // the epoll itself is broken
		}
		w.now = time.Now()
		for i := range max(n, 0) {
			w.handle(&w.events[i])
		}
		w.tcp.runReady()
		w.expire()
		w.tcp.flows.recycle()
		w.udp.clients.recycle()
		w.yield()
		if w.draining && w.tcp.flows.n == 0 && len(w.listeners) == 0 && w.last() {
			return
		}
	}
}

// yield shows the Go scheduler that the goroutine is well. From one that it has
// not seen for 10 ms it takes the processor in the next system call, and to find
// such ones it wakes up every 20 µs, which is a tenth of the work.
func (w *worker) yield() {
	if w.now.Sub(w.yielded) > yieldTime {
		w.yielded = w.now
		runtime.Gosched()
	}
}

// last makes do return false from now on, if no command is left to run.
func (w *worker) last() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = len(w.commands) == 0
	return w.closed
}

func (w *worker) handle(ev *unix.EpollEvent) {
	switch ev.Pad {
	case kindWake:
		w.runCommands()
	case kindListener:
		switch l := w.listeners[ev.Fd]; {
		case l == nil:
		case l.Protocol == svc.TCP:
			w.dial.accept(l, acceptAtOnce)
		default:
			w.udp.fromClients(l)
		}
	case kindClient, kindServer:
		if f := w.tcp.flows.all[ev.Fd]; f != nil {
			w.tcp.flowEvent(f, ev.Pad == kindServer, ev.Events)
		}
	case kindUDP:
		if c := w.udp.clients.all[ev.Fd]; c != nil {
			w.udp.fromEndpoint(c)
		}
	}
}

// epollTimeout returns how long to wait for events, in milliseconds.
func (w *worker) epollTimeout() int {
	if len(w.tcp.ready) > 0 {
		return 0
	}
	next := time.Time{}
	sooner := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	for i := range w.dial.connecting {
		if q := w.dial.connecting[i]; len(q) > 0 {
			sooner(q[0].deadline)
		}
	}
	if w.paused {
		sooner(w.resume)
	}
	if c := w.udp.silent(); c != nil {
		sooner(c.last.Add(w.engine.cfg.UDPTimeout))
	}
	if !w.tcp.nextIdle.IsZero() {
		sooner(w.tcp.nextIdle)
	}
	if next.IsZero() {
		return -1
	}
	return int(max(time.Until(next)+time.Millisecond-1, 0) / time.Millisecond)
}

// expire does what is due.
func (w *worker) expire() {
	w.dial.expire()
	w.udp.expire()
	w.tcp.expireIdle()
	if w.paused && !w.now.Before(w.resume) {
		w.paused = false
		for _, l := range w.listeners {
			if l.Protocol == svc.TCP && !w.paused {
				w.listen(l)
			}
		}
	}
}

func (w *worker) addListener(l *Listener) {
	w.listeners[l.id] = l
	if l.Protocol != svc.TCP || !w.paused {
		w.listen(l)
	}
}

// listen puts a listener into the epoll. Of several threads that wait for a
// connection the kernel wakes one.
func (w *worker) listen(l *Listener) {
	events := uint32(unix.EPOLLIN)
	if l.Protocol == svc.TCP {
		events |= unix.EPOLLEXCLUSIVE
	}
	if w.watch(l.fd, events, kindListener, l.id) != nil {
		w.pause() // no memory, or no more watches: try again
	}
}

func (w *worker) unlisten(l *Listener) { _ = unix.EpollCtl(w.epoll, unix.EPOLL_CTL_DEL, l.fd, nil) }

// acceptLast accepts what waits at a listener that closes.
func (w *worker) acceptLast(l *Listener) {
	if l.Protocol == svc.TCP {
		w.dial.accept(l, backlog)
	} else {
		w.udp.dropClients(l)
	}
}

// pause stops accepting for a while. What is waiting stays in the backlog.
func (w *worker) pause() {
	if w.paused {
		return
	}
	w.paused = true
	w.resume = w.now.Add(pauseTime)
	w.engine.count.paused.Add(1)
	w.pipes.closeAll() // four connections could live on two of them
	for _, l := range w.listeners {
		if l.Protocol == svc.TCP {
			w.unlisten(l)
		}
	}
}

// room takes n open files out of what connections may have; it reports whether it could.
func (w *worker) room(n int64) bool {
	if w.engine.count.files.Add(n) <= int64(w.engine.cfg.MaxFiles) {
		return true
	}
	w.engine.count.files.Add(-n)
	return false
}

func (t *streams) abortAll() {
	t.aborting = true
	for _, f := range slices.Clone(t.flows.all) {
		if f != nil {
			t.abort(f)
		}
	}
}

// socket returns a new socket of TCP for an endpoint.
func (k *connector) socket(f svc.Family) (int, error) {
	fd, err := unix.Socket(domain(f), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1))
	if every := int(k.w.engine.cfg.KeepAlive / time.Second); every > 0 {
		err = errors.Join(err,
			unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, every),
			unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, every))
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
