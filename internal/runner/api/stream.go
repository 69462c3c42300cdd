package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/creack/pty"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/utils/exec"

	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/runner/pod"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// streamer carries streams between the API server and a pod. It implements the
// interfaces of k8s.io/cri-streaming; ctx ends with the agent.
type streamer struct {
	ctx context.Context
	pod *pod.Snapshot
}

// endWithAgent returns a copy of a request's context that ends with the agent too.
func (s streamer) endWithAgent(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.ctx, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// ExecInContainer runs a command and returns when it has ended and what it
// wrote has been sent.
func (s streamer) ExecInContainer(ctx context.Context, _, _, container string, cmd []string, in io.Reader, out, errOut io.WriteCloser,
	tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	ctx, cancel := s.endWithAgent(ctx)
	defer cancel()
	var p *pipes
	var err error
	if tty {
		p, err = newTerminal(in, out)
	} else {
		p, err = newPipes(in, out, errOut)
	}
	if err != nil {
		return err
	}
	defer p.close()
	if p.term != nil {
		stop := p.follow(resize)
		defer stop()
	}
	code, err := s.pod.Client.Exec(ctx, shim.Exec{Container: container, Args: cmd, TTY: tty}, p.far, p.begin)
	if err != nil {
		return err
	}
	p.drain()
	if code != 0 {
		return exec.CodeExitError{Err: fmt.Errorf("command terminated with exit code %d", code), Code: code}
	}
	return nil
}

// AttachContainer joins the streams to a running container.
func (s streamer) AttachContainer(ctx context.Context, _, _, container string, in io.Reader, out, errOut io.WriteCloser, _ bool,
	resize <-chan remotecommand.TerminalSize) error {
	ctx, cancel := s.endWithAgent(ctx)
	defer cancel()
	p, err := newPipes(in, out, errOut)
	if err != nil {
		return err
	}
	defer p.close()
	sizes := make(chan struct{})
	defer close(sizes)
	if resize != nil {
		go func() { // ends with the attachment
			for {
				select {
				case <-sizes:
					return
				case size, ok := <-resize:
					if !ok {
						return
					}
					_ = s.pod.Client.Resize(ctx, container, size.Width, size.Height)
				}
			}
		}()
	}
	if err := s.pod.Client.Attach(ctx, container, p.far, p.begin); err != nil {
		return err
	}
	p.drain()
	return nil
}

// PortForward joins a stream to a port on the pod's loopback device.
func (s streamer) PortForward(ctx context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	ctx, cancel := s.endWithAgent(ctx)
	defer cancel()
	conn, err := dialPod(s.pod, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	back := make(chan error, 1)
	go func() {
		_, err := io.Copy(stream, conn)
		back <- err
	}()
	go func() { // ends at the end of the client's stream, or when that is closed
		_, _ = io.Copy(conn, stream)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	// The connection ends when the pod closes it, as with a kubelet. A client
	// that leaves closes the stream, which ends the copy above and so the
	// connection.
	err = <-back
	if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// dialTimeout bounds a connection within a pod.
const dialTimeout = 10 * time.Second

// dialPod connects to a port of the Pod itself, over IPv4 or else IPv6.
func dialPod(p *pod.Snapshot, port int32) (net.Conn, error) {
	var conn net.Conn
	connect := func() error {
		var errs []error
		for _, host := range []string{"127.0.0.1", "::1"} {
			c, err := net.DialTimeout("tcp", net.JoinHostPort(host, strconv.Itoa(int(port))), dialTimeout)
			if err == nil {
				conn = c
				return nil
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	if p.HostNetwork {
		return conn, connect()
	}
	err := netns.Do(netns.Of(p.NetnsPID), connect)
	return conn, err
}

// pipes are files between a process in a pod and the streams of a client: far
// are the process's ends.
type pipes struct {
	far       shim.Streams
	term      *os.File
	in        *os.File
	input     io.Reader
	outs      []outlet
	copies    sync.WaitGroup
	ended     atomic.Bool
	beginOnce sync.Once
}

// outlet copies what a process writes to its client.
type outlet struct {
	from *os.File
	to   io.Writer
}

func newTerminal(in io.Reader, out io.Writer) (*pipes, error) {
	master, slave, err := pty.Open()
	if err != nil {
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	p := &pipes{term: master, far: shim.Streams{Stdin: slave, Stdout: slave}}
	if in != nil {
		p.in, p.input = master, in
	}
	if out != nil {
		p.outs = append(p.outs, outlet{master, out})
	}
	return p, nil
}

func newPipes(in io.Reader, out, errOut io.Writer) (*pipes, error) {
	p := &pipes{}
	var errs []error
	pipe := func() (r, w *os.File) {
		r, w, err := os.Pipe()
		errs = append(errs, err)
		return r, w
	}
	if in != nil {
		p.far.Stdin, p.in = pipe()
		p.input = in
	}
	if out != nil {
		r, w := pipe()
		p.far.Stdout, p.outs = w, append(p.outs, outlet{r, out})
	}
	if errOut != nil {
		r, w := pipe()
		p.far.Stderr, p.outs = w, append(p.outs, outlet{r, errOut})
	}
	if err := errors.Join(errs...); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// begin starts copying. It is called when the process has its ends.
func (p *pipes) begin() {
	p.beginOnce.Do(func() {
		p.closeFar()
		if p.input != nil {
			go func() { // ends with the client's stream, which the caller closes
				_, _ = io.Copy(p.in, p.input)
				if p.term == nil {
					_ = p.in.Close()
				}
			}()
		}
		for _, o := range p.outs {
			p.copies.Go(func() { p.copy(o) })
		}
	})
}

// drainTimeout is how long output is awaited after the process has ended: a
// child left behind may hold the pipe open forever.
const drainTimeout = 500 * time.Millisecond

// copy returns when the last writer has closed the pipe, or when nothing came
// for drainTimeout after the process's end. Time spent writing to the client
// does not count.
func (p *pipes) copy(o outlet) {
	buf := make([]byte, 32<<10)
	for {
		ended := p.ended.Load()
		if ended {
			_ = o.from.SetReadDeadline(time.Now().Add(drainTimeout))
		}
		n, err := o.from.Read(buf)
		if n > 0 {
			if _, err := o.to.Write(buf[:n]); err != nil {
				return
			}
		}
		// The deadline that drain set may come before ended was seen here.
		if err != nil && (ended || !errors.Is(err, os.ErrDeadlineExceeded)) {
			return
		}
	}
}

// drain waits until everything written has been sent.
func (p *pipes) drain() {
	p.ended.Store(true)
	for _, o := range p.outs {
		_ = o.from.SetReadDeadline(time.Now())
	}
	p.copies.Wait()
}

// follow gives the terminal the client's window size until stop is called.
func (p *pipes) follow(resize <-chan remotecommand.TerminalSize) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			case s, ok := <-resize:
				if !ok {
					return
				}
				_ = pty.Setsize(p.term, &pty.Winsize{Cols: s.Width, Rows: s.Height})
			}
		}
	})
	return func() {
		close(done)
		wg.Wait()
	}
}

func (p *pipes) closeFar() {
	for _, f := range []*os.File{p.far.Stdin, p.far.Stdout, p.far.Stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}

func (p *pipes) close() {
	p.closeFar()
	for _, o := range p.outs {
		_ = o.from.Close()
	}
	if p.in != nil {
		_ = p.in.Close()
	}
	if p.term != nil {
		_ = p.term.Close()
	}
}
