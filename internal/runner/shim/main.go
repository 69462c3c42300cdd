package shim

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
)

// readyFD is the pipe to which a new shim writes "ok" or its error.
const readyFD = 3

// CheckArg as the only argument makes Main return 0 and do nothing else.
const CheckArg = "-check"

// Main runs a shim until its shutdown and returns its exit code. The arguments
// come from Start.
func Main(args []string) int {
	if len(args) > 0 && args[0] == "pod-shim" { // as it names itself
		args = args[1:]
	}
	if len(args) == 1 && args[0] == CheckArg {
		return 0
	}
	if len(args) == 1 && args[0] == execArg {
		return becomeContainer()
	}
	ready := os.NewFile(readyFD, "ready")
	flags := flag.NewFlagSet("pod-shim", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory of the pod's state")
	hostname := flags.String("hostname", "", "hostname to set in an own UTS namespace")
	network := flags.Bool("own-network", false, "the network namespace is the pod's own")
	pids := flags.Bool("own-pids", false, "the PID and mount namespaces are the pod's own")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	if *dir == "" || ready == nil {
		fmt.Fprintln(os.Stderr, "fairlead: pod-shim is started by the agent, not by hand")
		return 2
	}
	s, err := prepare(*dir, *hostname, *network, *pids)
	if err != nil {
		fmt.Fprint(ready, err)
		return 1
	}
	fmt.Fprint(ready, "ok")
	_ = ready.Close()
	s.serve()
	return 0
}

func prepare(dir, hostname string, ownNetwork, ownPIDs bool) (*server, error) {
	if ownPIDs {
		if err := mount.OwnProc(); err != nil {
			return nil, err
		}
	}
	// The socket's path may be longer than a socket address can hold (108
	// bytes), its name is not.
	if err := os.Chdir(dir); err != nil {
		return nil, err
	}
	if hostname != "" {
		if err := process.SetHostname(hostname); err != nil {
			return nil, fmt.Errorf("set hostname: %w", err)
		}
	}
	if ownNetwork {
		sysctl.HardenPod()
	}
	if err := process.BecomeSubreaper(); err != nil {
		return nil, fmt.Errorf("become subreaper: %w", err)
	}
	// A terminal's hang-up or ^C must not end the shim. Not signal.Ignore: an
	// ignored signal stays ignored in the containers.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGINT)
	_ = os.Remove(socketName)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socketName, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	return &server{
		listener: l, boot: process.BootID(), containers: map[string]*container{},
		known: map[int]bool{}, watchers: map[chan State]bool{},
	}, nil
}

// server is a running shim.
type server struct {
	listener *net.UnixListener
	boot     string

	// starting is read-locked from before a process is started until its pid is
	// in known, so that the reaper never takes its exit code.
	starting sync.RWMutex

	mu         sync.Mutex
	containers map[string]*container
	known      map[int]bool
	watchers   map[chan State]bool
	closing    bool
}

// maxWatchLag is how many states a watcher may be behind before it is
// disconnected; it reconnects and lists again.
const maxWatchLag = 256

func (s *server) serve() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	child := make(chan os.Signal, 1)
	signal.Notify(child, syscall.SIGCHLD)
	var wg sync.WaitGroup
	wg.Go(func() { s.reap(ctx, child) })
	wg.Go(func() {
		select {
		case <-term:
			s.shutdown()
		case <-ctx.Done():
		}
	})
	for {
		c, err := s.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			break
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // out of file descriptors
			continue
		}
		go s.handle(c)
	}
	cancel()
	wg.Wait()
}

// maxMissed is how many checks in a row must miss the socket.
const maxMissed = 3

// reap reaps orphans, which become children of the subreaper. It also ends the pod
// when its directory is removed: then no agent can reach the shim.
func (s *server) reap(ctx context.Context, child <-chan os.Signal) {
	known := func(pid int) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.known[pid]
	}
	check := time.NewTicker(time.Second)
	defer check.Stop()
	missed := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-child:
		case <-check.C:
			missed++
			if _, err := os.Stat(socketName); !errors.Is(err, os.ErrNotExist) {
				missed = 0
			}
			if missed == maxMissed {
				go s.shutdown() // ends serve, and with it the process
			}
		}
		for more := true; more; {
			s.starting.Lock()
			more = process.ReapOrphan(known)
			s.starting.Unlock()
		}
	}
}

func (s *server) handle(c *net.UnixConn) {
	defer c.Close()
	if !sameUser(c) {
		return
	}
	req, files, err := receive(c)
	closeFiles := func() {
		for _, f := range files {
			if f != nil {
				_ = f.Close()
			}
		}
	}
	defer closeFiles()
	if err != nil {
		_ = reply(c, response{Error: err.Error()})
		return
	}
	switch req.Op {
	case opStart:
		if req.Container == nil {
			err = errors.New("start without a container")
			break
		}
		state, startErr := s.start(*req.Container)
		if startErr == nil {
			_ = reply(c, response{State: &state})
			return
		}
		err = startErr
	case opWatch:
		s.watch(c)
		return
	case opSignal:
		if req.All {
			err = s.killNamed(req.Name)
		} else {
			err = s.signal(req.Name, syscall.Signal(req.Signal))
		}
	case opExec:
		if req.Exec == nil {
			err = errors.New("exec without a command")
			break
		}
		s.exec(c, *req.Exec, files, closeFiles)
		return
	case opAttach:
		s.attach(c, req.Name, files)
		return
	case opResize:
		err = s.resize(req.Name, req.Width, req.Height)
	case opShutdown:
		s.shutdown()
	default:
		err = fmt.Errorf("operation %q is not known to this shim", req.Op)
	}
	if err != nil {
		_ = reply(c, response{Error: err.Error()})
		return
	}
	_ = reply(c, response{})
}

// watch sends all states, then each change, until the connection ends.
func (s *server) watch(c *net.UnixConn) {
	ch := make(chan State, maxWatchLag)
	s.mu.Lock()
	var now []State
	for _, k := range s.containers {
		now = append(now, k.state)
	}
	s.watchers[ch] = true
	s.mu.Unlock()
	defer s.unwatch(ch)
	for _, st := range now {
		if reply(c, response{State: &st}) != nil {
			return
		}
	}
	if reply(c, response{Synced: true}) != nil {
		return
	}
	gone := make(chan struct{})
	go func() { // ends with the connection, which handle closes
		defer close(gone)
		_, _ = c.Read(make([]byte, 1))
	}()
	for {
		select {
		case <-gone:
			return
		case st, ok := <-ch:
			if !ok || reply(c, response{State: &st}) != nil {
				return
			}
		}
	}
}

func (s *server) unwatch(ch chan State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watchers[ch] {
		delete(s.watchers, ch)
		close(ch)
	}
}

// publish writes the state of k to its record and sends it to the watchers. It is
// called with s.mu held.
func (s *server) publish(k *container) {
	if err := writeState(k.spec.Record, k.state); err != nil {
		fmt.Fprintf(os.Stderr, "pod-shim: cannot record the state of %s: %v\n", k.spec.Name, err)
	}
	for ch := range s.watchers {
		select {
		case ch <- k.state:
		default:
			delete(s.watchers, ch)
			close(ch)
		}
	}
}

// shutdown kills every process of the pod and then ends the shim.
func (s *server) shutdown() {
	s.mu.Lock()
	s.closing = true
	var all []*container
	for _, k := range s.containers {
		all = append(all, k)
	}
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, k := range all {
		_ = s.kill(ctx, k)
	}
	// Whatever escaped into another mount namespace is a child of the shim by
	// now, or becomes one when its parent dies.
	for wait := time.Millisecond; ctx.Err() == nil; wait = min(2*wait, 50*time.Millisecond) {
		left := process.Children(os.Getpid())
		if len(left) == 0 {
			break
		}
		for _, id := range left {
			_ = id.Signal(syscall.SIGKILL)
		}
		time.Sleep(wait)
	}
	_ = s.listener.Close()
}

func writeState(path string, st State) error {
	b, err := json.Marshal(st)
	if err != nil {
		return err
	}
	return fileio.Replace(path, b, 0o600)
}
