package proxied

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/systemd"
)

// speakerVariable is set in a process of this test that serves an address for a Pod: "ADDRESS POD".
const speakerVariable = "FAIRLEAD_TEST_SPEAKER"

// TestSpeakerProcess is what TestHandOver starts.
func TestSpeakerProcess(t *testing.T) {
	at, pod, ok := strings.Cut(os.Getenv(speakerVariable), " ")
	if !ok {
		t.Skip("only as a process of TestHandOver")
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	store, err := systemd.OpenFileStore()
	if err != nil || store == nil {
		t.Fatal(store, err)
	}
	s := New(Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Store: store})
	address := netip.MustParseAddrPort(at)
	v := &Service{Name: svc.Name{Namespace: "default", Name: "web"}, Addrs: []netip.Addr{address.Addr()},
		Backends: map[uint16][]netip.AddrPort{address.Port(): {netip.MustParseAddrPort(pod)}}}
	v.Spec = dialect.Read(dialect.Service{Ports: []dialect.Port{{Name: "web", Number: address.Port(), Protocol: "TCP"}}}).Spec
	if failed := s.Set([]*Service{v}); len(failed) > 0 {
		t.Fatal(failed)
	}
	fmt.Println("serving")
	<-stop
	ctx, cancel := context.WithTimeout(context.Background(), lbtest.Patience)
	defer cancel()
	s.Close(ctx)
}

// manager does what systemd does for a unit with FileDescriptorStoreMax=.
type manager struct {
	*rig
	notify *net.UnixConn
	at     string

	mu   sync.Mutex
	kept map[string]*os.File
}

func newManager(r *rig) *manager {
	m := &manager{rig: r, at: filepath.Join(r.TempDir(), "notify"), kept: map[string]*os.File{}}
	var err error
	m.notify, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: m.at, Net: "unixgram"})
	r.Must(err)
	done := make(chan struct{})
	r.Cleanup(func() {
		_ = m.notify.Close()
		<-done
		for _, f := range m.kept {
			_ = f.Close()
		}
	})
	go func() {
		defer close(done)
		text, control := make([]byte, 4096), make([]byte, socket.FilesSpace(8))
		for {
			n, c, _, _, err := m.notify.ReadMsgUnix(text, control)
			if err != nil {
				return
			}
			files, _ := socket.UnpackFiles(control[:c])
			_, name, _ := strings.Cut(string(text[:n]), "FDNAME=")
			m.mu.Lock()
			if f := m.kept[name]; f != nil {
				_ = f.Close()
				delete(m.kept, name)
			}
			if bytes.HasPrefix(text[:n], []byte("FDSTORE=1")) && len(files) == 1 {
				m.kept[name] = files[0]
			}
			m.mu.Unlock()
		}
	}()
	return m
}

// start starts a process that serves the address for a Pod, with what was kept.
func (m *manager) start(pod netip.AddrPort) *exec.Cmd {
	m.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*lbtest.Patience)
	m.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "sh", "-c", `export LISTEN_PID=$$; exec "$0" -test.run='^TestSpeakerProcess$'`, os.Args[0])
	m.mu.Lock()
	for _, f := range m.kept {
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	m.mu.Unlock()
	cmd.Env = append(os.Environ(), speakerVariable+"="+m.rig.At.String()+" "+pod.String(), "NOTIFY_SOCKET="+m.at,
		fmt.Sprint("LISTEN_FDS=", len(cmd.ExtraFiles)), "LISTEN_FDNAMES=x")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	m.Must(err)
	m.Must(cmd.Start())
	line := make([]byte, 8)
	if _, err := io.ReadFull(out, line); err != nil || string(line) != "serving\n" {
		m.Fatalf("%q, %v", line, err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	for deadline := time.Now().Add(lbtest.Patience); !m.keeps(); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			m.Fatal("the process has not sent its listener")
		}
	}
	return cmd
}

// keeps reports whether something is kept.
func (m *manager) keeps() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.kept) > 0
}

// Three restarts of the process that accepts connections, one of them by force, refuse and lose none of 500 new ones each second:
// systemd keeps the sockets, and those that wait are served by the next process. What is established ends before.
func TestHandOver(t *testing.T) {
	r := newRig(t, nil)
	m := newManager(r)
	pod := r.Pod(lbtest.Named("pod"))
	process := m.start(pod)
	var all sync.WaitGroup
	var failed, cut, served atomic.Int32
	var last atomic.Value
	end := make(chan struct{})
	all.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for range 30_000 {
			select {
			case <-end:
				return
			case <-tick.C:
			}
			all.Go(func() {
				c, err := net.DialTimeout("tcp", r.At.String(), lbtest.Patience)
				if err == nil {
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(lbtest.Patience))
					var got string
					if got, err = lbtest.Say(c, "x"); got == "pod x\n" {
						served.Add(1)
						return
					}
					if errors.Is(err, io.EOF) || errors.Is(err, lbtest.ErrReset) {
						cut.Add(1)
						return
					}
				}
				failed.Add(1)
				last.Store(fmt.Sprint(err))
			})
		}
	})
	for round := range 3 {
		long := r.Dial()
		if _, err := lbtest.Say(long, "before"); err != nil {
			t.Fatal(err)
		}
		how := syscall.SIGTERM
		if round == 2 {
			how = syscall.SIGKILL
		}
		before := served.Load()
		r.Must(process.Process.Signal(how))
		if how == syscall.SIGTERM {
			if got, err := lbtest.Say(long, "after"); err != nil || got != "pod after\n" {
				t.Errorf("an established connection: %q, %v", got, err)
			}
			r.Must(long.Close())
		}
		if err := process.Wait(); err != nil && how == syscall.SIGTERM {
			t.Error(err)
		}
		if how == syscall.SIGTERM && cut.Load() > 0 {
			t.Errorf("%d connections were cut", cut.Load())
		}
		process = m.start(pod)
		for deadline := time.Now().Add(lbtest.Patience); served.Load() < before+100; <-time.After(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("the next process serves no connection")
			}
		}
	}
	close(end)
	all.Wait()
	t.Logf("%d served, %d cut by force", served.Load(), cut.Load())
	if failed.Load() > 0 {
		t.Errorf("%d failed: %v", failed.Load(), last.Load())
	}
	r.Must(process.Process.Signal(syscall.SIGTERM))
	_ = process.Wait()
}

// brokenStore keeps nothing.
type brokenStore struct{}

func (brokenStore) Inherited() []net.Listener           { return nil }
func (brokenStore) NameOf(net.Listener) string          { return "" }
func (brokenStore) Keep(string, *net.TCPListener) error { return errors.New("no") }
func (brokenStore) Drop(string) error                   { return nil }

// What the kernel has accepted for a listener that goes is served, also at the end of a process whose listener could not be kept.
func TestQueueOfAListenerThatGoes(t *testing.T) {
	for name, leave := range map[string]func(*rig, netip.AddrPort){
		"moved": func(r *rig, pod netip.AddrPort) {
			r.service.Addrs = []netip.Addr{r.Free().Addr()}
			r.set(pod)
		},
		"not kept": func(r *rig, _ netip.AddrPort) {
			ctx, cancel := context.WithTimeout(t.Context(), lbtest.Patience)
			defer cancel()
			if kept := r.server.Close(ctx); len(kept) > 0 {
				t.Errorf("%v are kept", kept)
			}
		},
	} {
		r := newRig(t, nil)
		r.server.store = brokenStore{}
		leaveQueued(r, name, leave)
	}
}

// leaveQueued has a listener leave with many connections that wait.
func leaveQueued(r *rig, name string, leave func(*rig, netip.AddrPort)) {
	r.Helper()
	pod := r.Pod(lbtest.Named("pod"))
	r.set(pod)
	const conns = 200
	answers := make(chan error, conns)
	for range conns {
		c := r.Dial()
		go func() {
			_, err := lbtest.Say(c, "x")
			_ = c.Close()
			answers <- err
		}()
	}
	leave(r, pod) // some are not accepted yet
	for range conns {
		if err := <-answers; err != nil {
			r.Fatalf("%s: %v", name, err)
		}
	}
}
