package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/cgroup"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// Options configure a shim.
type Options struct {
	// Command is the program and its first arguments, for example
	// {"/usr/bin/fairlead", "pod-shim"}.
	Command []string
	// Dir is the pod's directory; the socket and the log of the shim lie there.
	Dir string
	// HostNetwork leaves the pod in the machine's network and UTS namespaces.
	HostNetwork bool
	// HostIPC leaves it in the machine's IPC namespace.
	HostIPC bool
	// OwnPIDs gives the pod a PID namespace, in which the shim is the first process:
	// all others end with it.
	OwnPIDs  bool
	Hostname string
	// Cgroup is the directory of the control group that the shim begins in, ""
	// for that of the caller.
	Cgroup string
}

// startTimeout bounds how long a process that was started prepares itself: the shim until its socket is open, as far as its caller
// waits, and a container until its program runs. A busy machine needs long for it, and a container whose Pod never restarts fails
// for good then. It is the kubelet's runtimeRequestTimeout.
const startTimeout = 2 * time.Minute

// Start starts a shim and returns when it listens. The shim outlives the caller.
func Start(ctx context.Context, o Options) (process.ID, error) {
	log, err := os.OpenFile(filepath.Join(o.Dir, "shim.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return process.ID{}, err
	}
	defer log.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return process.ID{}, err
	}
	defer r.Close()
	args := append(o.Command[1:len(o.Command):len(o.Command)], "-dir", o.Dir)
	attr := &syscall.SysProcAttr{Setsid: true}
	if !o.HostIPC {
		attr.Cloneflags |= syscall.CLONE_NEWIPC
	}
	if o.OwnPIDs {
		attr.Cloneflags |= syscall.CLONE_NEWPID | syscall.CLONE_NEWNS
		args = append(args, "-own-pids")
	}
	if !o.HostNetwork {
		attr.Cloneflags |= syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS
		args = append(args, "-own-network", "-hostname", o.Hostname)
	}
	if o.Cgroup != "" {
		group, err := cgroup.At(o.Cgroup).Open()
		if err != nil {
			return process.ID{}, fmt.Errorf("control group of the pod's shim: %w", err)
		}
		defer group.Close()
		attr.UseCgroupFD, attr.CgroupFD = true, int(group.Fd())
	}
	fileio.KeepInherited()
	cmd := exec.Command(o.Command[0], args...)
	cmd.Stderr, cmd.ExtraFiles, cmd.SysProcAttr, cmd.Dir = log, []*os.File{w}, attr, "/"
	// Two threads are plenty, and the scheduler's memory grows with the cores.
	cmd.Env = append(os.Environ(), "GOMAXPROCS=2")
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		return process.ID{}, fmt.Errorf("start the pod's shim: %w", err)
	}
	id, findErr := process.Find(cmd.Process.Pid)
	go func() { _ = cmd.Wait() }() // ends with the shim or with this process
	deadline := time.Now().Add(startTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = r.SetReadDeadline(deadline)
	answer, err := io.ReadAll(io.LimitReader(r, 4096))
	if err == nil && string(answer) == "ok" && findErr == nil {
		return id, nil
	}
	_ = cmd.Process.Kill()
	if len(answer) > 0 && string(answer) != "ok" {
		return process.ID{}, fmt.Errorf("start the pod's shim: %s", answer)
	}
	return process.ID{}, fmt.Errorf("the pod's shim does not answer: %w", errors.Join(err, findErr))
}

// Client talks to the shim whose directory Dir is.
type Client struct{ Dir string }

// dial opens a connection, by way of a descriptor of the directory because a
// socket address holds at most 108 bytes (unix(7)).
func (cl Client) dial(ctx context.Context) (*net.UnixConn, error) {
	dir, err := os.Open(cl.Dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), socketName))
	if err != nil {
		return nil, fmt.Errorf("reach the pod's shim: %w", err)
	}
	return c.(*net.UnixConn), nil
}

// begin sends a request and waits for the first answer. The connection ends
// with ctx.
func (cl Client) begin(ctx context.Context, req request, files ...*os.File) (*net.UnixConn, response, func(), error) {
	c, err := cl.dial(ctx)
	if err != nil {
		return nil, response{}, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	end := func() {
		stop()
		_ = c.Close()
	}
	var r response
	if err = send(c, req, files...); err == nil {
		err = readMessage(c, &r)
	}
	if err == nil && r.Error != "" {
		err = errors.New(r.Error)
	}
	if err == nil {
		return c, r, end, nil
	}
	end()
	return nil, r, nil, contextError(ctx, err)
}

func contextError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// once is a request with one answer.
func (cl Client) once(ctx context.Context, req request) (response, error) {
	limit := 30 * time.Second
	if req.Op == opStart {
		limit += startTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	_, r, end, err := cl.begin(ctx, req)
	if err != nil {
		return r, err
	}
	end()
	return r, nil
}

// Start starts a container. A State with Error set is a container that could not
// be started; an error means that the shim could not be reached.
func (cl Client) Start(ctx context.Context, c Container) (State, error) {
	r, err := cl.once(ctx, request{Op: opStart, Container: &c})
	if err != nil {
		return State{}, err
	}
	if r.State == nil {
		return State{}, errors.New("the pod's shim gave no state")
	}
	return *r.State, nil
}

// Signal sends sig to a container's first process.
func (cl Client) Signal(ctx context.Context, container string, sig syscall.Signal) error {
	_, err := cl.once(ctx, request{Op: opSignal, Name: container, Signal: int(sig)})
	return err
}

// Kill ends every process of a container.
func (cl Client) Kill(ctx context.Context, container string) error {
	_, err := cl.once(ctx, request{Op: opSignal, Name: container, Signal: int(syscall.SIGKILL), All: true})
	return err
}

// Shutdown ends every process of the pod and the shim. A shim that has ended
// already is no error.
func (cl Client) Shutdown(ctx context.Context) error {
	_, err := cl.once(ctx, request{Op: opShutdown})
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNRESET) {
		return nil
	}
	return err
}

// Resize sets the window size of a container's terminal.
func (cl Client) Resize(ctx context.Context, container string, width, height uint16) error {
	_, err := cl.once(ctx, request{Op: opResize, Name: container, Width: width, Height: height})
	return err
}

// Watch calls f with the state of every container, then synced, then f for each
// change, until the connection or ctx ends. It always returns an error.
func (cl Client) Watch(ctx context.Context, f func(State), synced func()) error {
	c, r, end, err := cl.begin(ctx, request{Op: opWatch})
	if err != nil {
		return err
	}
	defer end()
	for {
		switch {
		case r.Synced:
			synced()
		case r.State != nil:
			f(*r.State)
		}
		r = response{}
		if err := readMessage(c, &r); err != nil {
			return contextError(ctx, err)
		}
	}
}

// Streams are files for a process; nil ones are absent. The caller keeps owning
// them.
type Streams struct{ Stdin, Stdout, Stderr *os.File }

func (s Streams) list() []*os.File {
	var out []*os.File
	for _, f := range []*os.File{s.Stdin, s.Stdout, s.Stderr} {
		if f != nil {
			out = append(out, f)
		}
	}
	return out
}

// Exec runs a command in a container and returns its exit code. started is
// called when it runs: then the caller may close its ends of the streams. The
// command is killed when ctx ends.
func (cl Client) Exec(ctx context.Context, e Exec, s Streams, started func()) (int, error) {
	c, _, end, err := cl.begin(ctx, request{
		Op: opExec, Exec: &e, Stdin: s.Stdin != nil, Stdout: s.Stdout != nil, Stderr: s.Stderr != nil,
	}, s.list()...)
	if err != nil {
		return 0, err
	}
	defer end()
	started()
	var r response
	if err := readMessage(c, &r); err != nil {
		return 0, contextError(ctx, err)
	}
	if r.Error != "" {
		return 0, errors.New(r.Error)
	}
	return r.ExitCode, nil
}

// Attach joins streams to a running container until it ends or ctx does.
func (cl Client) Attach(ctx context.Context, container string, s Streams, started func()) error {
	c, _, end, err := cl.begin(ctx, request{
		Op: opAttach, Name: container, Stdin: s.Stdin != nil, Stdout: s.Stdout != nil, Stderr: s.Stderr != nil,
	}, s.list()...)
	if err != nil {
		return err
	}
	defer end()
	started()
	var r response
	if err := readMessage(c, &r); err != nil {
		return contextError(ctx, err)
	}
	return nil
}

// Process is the shim's process, or an error if none listens.
func (cl Client) Process(ctx context.Context) (process.ID, error) {
	c, err := cl.dial(ctx)
	if err != nil {
		return process.ID{}, err
	}
	defer c.Close()
	pid, _, err := socket.Peer(c)
	if err != nil {
		return process.ID{}, err
	}
	return process.Find(pid)
}
