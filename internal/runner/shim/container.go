package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"

	"github.com/fairlead/fairlead/internal/kernel/cgroup"
	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner/logfile"
)

// container is one attempt of one container.
type container struct {
	spec    Container
	started chan struct{} // closed when the process runs or could not be started
	done    chan struct{} // closed when state.Exited is published

	// Guarded by server.mu.
	state State
	ns    *os.File // its mount namespace, nil once it has ended
	stdin io.WriteCloser
	term  *os.File // the master of its terminal

	sinkMu sync.Mutex
	sinks  map[*sink]bool
}

// start runs a container and returns when its process runs or could not be
// started. Only one attempt of a container runs at a time.
func (s *server) start(spec Container) (State, error) {
	s.mu.Lock()
	old := s.containers[spec.Name]
	closing := s.closing
	if !closing && old != nil && !old.state.Exited {
		s.mu.Unlock()
		if old.spec.ID == spec.ID {
			return s.stateOnceStarted(old), nil // the runner asks again if the answer did not come in time
		}
		return State{}, fmt.Errorf("container %s runs already as attempt %d", spec.Name, old.spec.Attempt)
	}
	if closing {
		s.mu.Unlock()
		return State{}, errors.New("the pod is shutting down")
	}
	k := &container{
		spec: spec, started: make(chan struct{}), done: make(chan struct{}), sinks: map[*sink]bool{},
		state: State{Name: spec.Name, Attempt: spec.Attempt, ID: spec.ID, Boot: s.boot, Started: time.Now()},
	}
	s.containers[spec.Name] = k
	s.mu.Unlock()

	go func() {
		binds, err := spec.showPrograms()
		if err == nil {
			err = mount.Confine(spec.mountConfinement(), binds, func(ns *os.File) error { return s.run(k, ns) })
		}
		s.ended(k, err)
		select {
		case <-k.started:
		default:
			close(k.started)
		}
	}()
	return s.stateOnceStarted(k), nil
}

// stateOnceStarted waits until the process of k runs or could not be started.
func (s *server) stateOnceStarted(k *container) State {
	<-k.started
	s.mu.Lock()
	defer s.mu.Unlock()
	return k.state
}

// run starts the process of k on the calling thread and stays on it until the
// process has ended: the kernel sends the parent-death signal when the thread ends
// (prctl(2)). The error is why the process could not be started.
func (s *server) run(k *container, ns *os.File) error {
	inode, err := mount.Inode(ns)
	if err != nil {
		return err
	}
	path, err := lookPath(k.spec.Args, k.spec.Env, k.spec.Dir)
	if err != nil {
		return k.spec.hidden(path, err)
	}
	var log *logfile.Writer
	var dir *os.File
	var oomKills int64
	elsewhere(func() {
		if dir, err = k.spec.openGroup(); err == nil {
			log, err = logfile.NewWriter(k.spec.Log, k.spec.Limit)
		}
		oomKills = cgroup.At(k.spec.Cgroup).OOMKills()
	})
	defer dir.Close()
	if err != nil {
		return err
	}
	defer log.Close()
	// In its confinement /dev may lead where the Pod wants.
	var p *plumbing
	elsewhere(func() { p, err = newPlumbing(k.spec) })
	if err != nil {
		return err
	}
	defer p.closeAll()
	cmd := command(path, k.spec, p)
	forget, err := s.launch(cmd, k.spec, dir)
	if err != nil {
		return startError(err, cmd, k.spec.mountConfinement())
	}
	defer forget()
	p.closeChild()
	id, _ := process.Find(cmd.Process.Pid)
	closing := false
	elsewhere(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		k.state.Process, k.state.MountNS, k.state.Started = id, inode, time.Now()
		k.ns, k.stdin, k.term = ns, p.in, p.term
		s.publish(k)
		closing = s.closing
	})
	if closing {
		_ = id.Signal(syscall.SIGKILL) // shutdown came before there was a process
	}
	close(k.started)

	var copies sync.WaitGroup
	copies.Go(func() { log.Copy(logfile.Stdout, p.out, k.tee(false)) })
	if p.err != nil {
		copies.Go(func() { log.Copy(logfile.Stderr, p.err, k.tee(true)) })
	}
	_ = cmd.Wait()
	finished := time.Now()
	oomKills = s.killRest(k, inode) - oomKills
	_ = p.readersDeadline(time.Now().Add(time.Second)) // an escaped process may hold them open
	copies.Wait()
	s.mu.Lock()
	k.state.Finished = finished
	k.state.ExitCode, k.state.Signal = exitStatus(cmd.ProcessState)
	k.state.OOMKilled = oomKills > 0
	s.mu.Unlock()
	return nil
}

// command returns the command of a container's first process.
func command(path string, spec Container, p *plumbing) *exec.Cmd {
	return &exec.Cmd{
		Path: path, Args: spec.Args, Env: spec.Env, Dir: cmp.Or(spec.Dir, "/"),
		Stdin: p.childIn, Stdout: p.childOut, Stderr: p.childErr,
		SysProcAttr: &syscall.SysProcAttr{Setsid: true, Setctty: spec.TTY, Pdeathsig: syscall.SIGKILL, Credential: credential(spec)},
	}
}

// killRest kills what the first process of k, which has ended, leaves in its cgroup and its mount namespace, and returns how
// often the kernel has killed in the cgroup for want of memory. The inode is certain to be this namespace's only while it
// is open: the kernel reuses the numbers.
func (s *server) killRest(k *container, inode uint64) (oomKills int64) {
	s.mu.Lock()
	k.ns, k.stdin, k.term = nil, nil, nil
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	elsewhere(func() {
		group := cgroup.At(k.spec.Cgroup)
		if k.spec.Cgroup != "" {
			_ = group.Kill(ctx)
		}
		oomKills = group.OOMKills()
		_ = process.KillMountNamespace(ctx, inode)
	})
	return oomKills
}

// ended publishes the end of k; err is why it could not be started, or nil.
func (s *server) ended(k *container, err error) {
	k.closeSinks()
	s.mu.Lock()
	defer s.mu.Unlock()
	k.state.Exited = true
	if err != nil {
		k.state.Error = err.Error()
		k.state.ExitCode = 128
		k.state.Finished = time.Now()
	}
	s.publish(k)
	close(k.done)
}

// elsewhere calls f on a thread that sees all of the machine's files: that of a
// container is confined.
func elsewhere(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
}

// openGroup opens the directory of the container's control group, nil if it has none.
func (c Container) openGroup() (*os.File, error) {
	if c.Cgroup == "" {
		return nil, nil
	}
	dir, err := cgroup.At(c.Cgroup).Open()
	if err != nil {
		return nil, fmt.Errorf("control group of the container: %w", err)
	}
	return dir, nil
}

// launch starts cmd as a process of the container c in the control group behind dir, if
// that is not nil, so that the reaper keeps its exit code until forget is called.
func (s *server) launch(cmd *exec.Cmd, c Container, dir *os.File) (forget func(), err error) {
	if dir != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	forget = func() {
		if cmd.Process != nil {
			s.mu.Lock()
			delete(s.known, cmd.Process.Pid)
			s.mu.Unlock()
		}
	}
	s.starting.RLock()
	started := sync.OnceFunc(s.starting.RUnlock) // before the process prepares itself, which may take long
	defer started()
	prepare := func(pid int) {
		s.mu.Lock()
		s.known[pid] = true
		s.mu.Unlock()
		started()
		_ = process.SetOOMScoreAdj(pid, c.OOMScoreAdj) // lower than its own not without root
	}
	if c.Confinement != nil {
		err = startConfined(cmd, c.Confinement, prepare)
	} else if err = cmd.Start(); err == nil {
		prepare(cmd.Process.Pid)
	}
	if err != nil {
		forget()
		return nil, err
	}
	return forget, nil
}

// signal sends sig only to the first process of a container, as runtimes do. A
// container that does not run is no error.
func (s *server) signal(name string, sig syscall.Signal) error {
	s.mu.Lock()
	k := s.containers[name]
	s.mu.Unlock()
	if k == nil {
		return nil
	}
	return s.running(k).Signal(sig)
}

// kill ends every process of a container and waits for that: run kills the others
// when the first one has ended.
func (s *server) kill(ctx context.Context, k *container) error {
	if err := s.running(k).Signal(syscall.SIGKILL); err != nil {
		return err
	}
	select {
	case <-k.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("container %s has not ended: %w", k.spec.Name, ctx.Err())
	}
}

// killNamed is kill for a request of the runner. A container that does not exist
// is no error.
func (s *server) killNamed(name string) error {
	s.mu.Lock()
	k := s.containers[name]
	s.mu.Unlock()
	if k == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return s.kill(ctx, k)
}

// running returns the first process of a container, none if it is not running.
func (s *server) running(k *container) process.ID {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.state.Exited {
		return process.ID{}
	}
	return k.state.Process
}

func (s *server) resize(name string, width, height uint16) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.containers[name]
	if k == nil || k.term == nil {
		return nil
	}
	return pty.Setsize(k.term, &pty.Winsize{Cols: width, Rows: height})
}

func (c Container) mountConfinement() *mount.Confinement {
	if c.Confinement == nil {
		return nil
	}
	return &c.Confinement.Mount
}

func credential(c Container) *syscall.Credential {
	if c.User == nil && c.Group == nil {
		return nil
	}
	cred := &syscall.Credential{Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())}
	if c.User != nil {
		cred.Uid = uint32(*c.User)
	}
	if c.Group != nil {
		cred.Gid = uint32(*c.Group)
	}
	// In a user namespace with one mapping setgroups is forbidden.
	cred.NoSetGroups = int(cred.Uid) == os.Getuid() && int(cred.Gid) == os.Getgid()
	return cred
}

// lookPath finds the program in the container's own PATH, inside its mount
// namespace.
func lookPath(args, env []string, dir string) (string, error) {
	if len(args) == 0 || args[0] == "" {
		return "", errors.New("no command: with image host, command is required")
	}
	name := args[0]
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join("/", dir, name)
		}
		return name, runnable(name)
	}
	path := ""
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
		}
	}
	for _, d := range filepath.SplitList(path) {
		if filepath.IsAbs(d) && runnable(filepath.Join(d, name)) == nil {
			return filepath.Join(d, name), nil
		}
	}
	return "", fmt.Errorf("command %q is not in PATH (%s) of this machine", name, path)
}

func runnable(path string) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Errorf("command %s: %w", path, errors.Unwrap(err))
	case st.IsDir():
		return fmt.Errorf("command %s is a directory", path)
	case st.Mode()&0o111 == 0:
		return fmt.Errorf("command %s is not executable", path)
	}
	return nil
}

// startError explains a failed start; to Go a failed chdir looks like a failed
// exec.
func startError(err error, cmd *exec.Cmd, w *mount.Confinement) error {
	if st, statErr := os.Stat(cmd.Dir); statErr != nil || !st.IsDir() {
		if w.Hides(cmd.Dir) {
			return fmt.Errorf("working directory %s is hidden from Pods that are not privileged; choose another one, such as /", cmd.Dir)
		}
		return fmt.Errorf("working directory %s does not exist on this machine", cmd.Dir)
	}
	return fmt.Errorf("start %s: %w", cmd.Path, err)
}

func exitStatus(ps *os.ProcessState) (code, sig int) {
	if ps == nil {
		return 255, 0
	}
	if ws, ok := ps.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal()), int(ws.Signal())
	}
	return ps.ExitCode(), 0
}
