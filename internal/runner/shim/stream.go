package shim

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/kernel/process"
)

// exec runs a further process in a container: it replies when the process runs and
// when it has ended. The process is killed when the connection ends.
func (s *server) exec(c *net.UnixConn, req Exec, files []*os.File, closeFiles func()) {
	ns, spec, err := s.enterable(req.Container)
	if err != nil {
		_ = reply(c, response{Error: err.Error()})
		return
	}
	defer ns.Close()
	group, err := spec.openGroup()
	if err != nil {
		_ = reply(c, response{Error: err.Error()})
		return
	}
	defer group.Close()
	spec.give(files...)
	err = mount.Enter(ns, func() error {
		path, err := lookPath(req.Args, spec.Env, spec.Dir)
		if err != nil {
			return err
		}
		cmd := &exec.Cmd{
			Path: path, Args: req.Args, Env: spec.Env, Dir: spec.Dir,
			SysProcAttr: &syscall.SysProcAttr{Setsid: true, Setctty: req.TTY, Pdeathsig: syscall.SIGKILL, Credential: credential(spec)},
		}
		if cmd.Dir == "" {
			cmd.Dir = "/"
		}
		// A nil *os.File in an io.Reader would not be nil.
		if files[0] != nil {
			cmd.Stdin = files[0]
		}
		if files[1] != nil {
			cmd.Stdout = files[1]
		}
		if files[2] != nil {
			cmd.Stderr = files[2]
		} else if req.TTY && files[0] != nil {
			cmd.Stderr = files[0]
		}
		forget, err := s.launch(cmd, spec, group)
		if err != nil {
			return startError(err, cmd, spec.mountConfinement())
		}
		defer forget()
		closeFiles()
		_ = reply(c, response{})
		gone := make(chan struct{})
		ended := make(chan struct{})
		go func() { // ends with the connection
			_, _ = c.Read(make([]byte, 1))
			close(gone)
		}()
		var killer sync.WaitGroup
		killer.Go(func() {
			select {
			case <-gone:
				_ = process.KillGroup(cmd.Process.Pid) // its session's first group
			case <-ended:
			}
		})
		_ = cmd.Wait()
		close(ended)
		killer.Wait()
		code, _ := exitStatus(cmd.ProcessState)
		_ = reply(c, response{Exited: true, ExitCode: code})
		return nil
	})
	if err != nil {
		_ = reply(c, response{Error: err.Error()})
	}
}

// enterable returns a descriptor of a running container's mount namespace.
func (s *server) enterable(name string) (*os.File, Container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.containers[name]
	if k == nil || k.ns == nil {
		return nil, Container{}, fmt.Errorf("container %s is not running", name)
	}
	ns, err := fileio.Dup(k.ns)
	if err != nil {
		return nil, Container{}, fmt.Errorf("container %s: %w", name, err)
	}
	return ns, k.spec, nil
}

// maxSinkLag is how many chunks (of up to 16 KiB) an attached client may be
// behind before chunks are dropped: a slow reader must not stop the container.
const maxSinkLag = 64

// sink is one attached client's stdout or stderr.
type sink struct {
	stderr bool
	ch     chan []byte
}

// tee returns a function that hands the container's output to attached clients.
func (k *container) tee(stderr bool) func([]byte) {
	return func(b []byte) {
		k.sinkMu.Lock()
		defer k.sinkMu.Unlock()
		for s := range k.sinks {
			if s.stderr != stderr {
				continue
			}
			select {
			case s.ch <- append([]byte(nil), b...):
			default:
			}
		}
	}
}

func (k *container) addSink(s *sink) bool {
	k.sinkMu.Lock()
	defer k.sinkMu.Unlock()
	if k.sinks == nil {
		return false
	}
	k.sinks[s] = true
	return true
}

func (k *container) removeSink(s *sink) {
	k.sinkMu.Lock()
	defer k.sinkMu.Unlock()
	if k.sinks[s] {
		delete(k.sinks, s)
		close(s.ch)
	}
}

// closeSinks ends all attached clients; none is added afterwards.
func (k *container) closeSinks() {
	k.sinkMu.Lock()
	defer k.sinkMu.Unlock()
	for s := range k.sinks {
		close(s.ch)
	}
	k.sinks = nil
}

// attach joins the given files to a running container until it ends or the
// connection does.
func (s *server) attach(c *net.UnixConn, name string, files []*os.File) {
	s.mu.Lock()
	k := s.containers[name]
	var stdin io.WriteCloser
	if k != nil {
		stdin = k.stdin
	}
	running := k != nil && k.ns != nil
	s.mu.Unlock()
	var err error
	switch {
	case !running:
		err = fmt.Errorf("container %s is not running", name)
	case files[0] != nil && stdin == nil:
		err = fmt.Errorf("container %s has no stdin: set stdin: true in its spec", name)
	}
	if err != nil {
		_ = reply(c, response{Error: err.Error()})
		return
	}
	_ = reply(c, response{})
	var out sync.WaitGroup
	var sinks []*sink
	for i, f := range files[1:] {
		if f == nil {
			continue
		}
		one := &sink{stderr: i == 1, ch: make(chan []byte, maxSinkLag)}
		if !k.addSink(one) {
			continue
		}
		sinks = append(sinks, one)
		out.Go(func() {
			for b := range one.ch {
				if _, err := f.Write(b); err != nil {
					k.removeSink(one)
					return
				}
			}
		})
	}
	in := make(chan struct{})
	go func() { // ends when the client closes its end of stdin, or handle does
		defer close(in)
		if files[0] == nil {
			return
		}
		_, err := io.Copy(stdin, files[0])
		if k.spec.StdinOnce && !errors.Is(err, os.ErrClosed) {
			_ = stdin.Close()
		}
	}()
	gone := make(chan struct{})
	go func() {
		_, _ = c.Read(make([]byte, 1))
		close(gone)
	}()
	select {
	case <-k.done:
	case <-gone:
	}
	for _, one := range sinks {
		k.removeSink(one)
	}
	if files[0] != nil {
		_ = files[0].Close()
	}
	out.Wait()
	_ = reply(c, response{Exited: true})
}
