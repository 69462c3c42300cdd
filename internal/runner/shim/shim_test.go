package shim_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner/logfile"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "pod-shim" {
		os.Exit(shim.Main(os.Args[2:]))
	}
	testbed.Main(m)
}

// pod is a running shim with what its watcher has seen.
type pod struct {
	t *testing.T
	shim.Client
	id     process.ID
	states chan shim.State
}

func newPod(t *testing.T) *pod {
	t.Helper()
	return newPodOf(t, "/proc/self/exe", "pod-shim")
}

func newPodOf(t *testing.T, command ...string) *pod {
	t.Helper()
	// Longer than a socket address may be.
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	id, err := shim.Start(t.Context(), shim.Options{Command: command, Dir: dir, Hostname: "the-pod"})
	if err != nil {
		t.Fatal(err)
	}
	p := &pod{t: t, Client: shim.Client{Dir: dir}, id: id, states: make(chan shim.State, 100)}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := p.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		await(t, "the shim's end", func() bool { return !id.Alive() })
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(dir, "shim.log"))
			t.Logf("shim.log: %s", b)
		}
	})
	return p
}

func (p *pod) watch() {
	p.t.Helper()
	synced := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	p.t.Cleanup(cancel)
	go func() { _ = p.Watch(ctx, func(s shim.State) { p.states <- s }, func() { close(synced) }) }()
	select {
	case <-synced:
	case <-time.After(5 * time.Second):
		p.t.Fatal("no sync")
	}
}

func (p *pod) container(script string) shim.Container {
	return shim.Container{
		Name: "main", ID: fmt.Sprint("id-", script), Args: []string{"sh", "-c", script},
		Env: []string{"PATH=/usr/bin:/bin", "GREETING=hello"},
		Log: filepath.Join(p.Dir, "main.log"), Record: filepath.Join(p.Dir, "main.json"),
	}
}

func (p *pod) start(c shim.Container) shim.State {
	p.t.Helper()
	st, err := p.Start(p.t.Context(), c)
	if err != nil {
		p.t.Fatal(err)
	}
	return st
}

// exit waits for the end of the container as a watcher sees it.
func (p *pod) exit() shim.State {
	p.t.Helper()
	for {
		select {
		case st := <-p.states:
			if st.Exited {
				return st
			}
		case <-time.After(10 * time.Second):
			p.t.Fatal("the container did not end")
		}
	}
}

func (p *pod) log() string {
	p.t.Helper()
	var b bytes.Buffer
	if err := logfile.Read(p.t.Context(), filepath.Join(p.Dir, "main.log"), logfile.Query{}, &b, nil); err != nil {
		p.t.Fatal(err)
	}
	return b.String()
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come", what)
		}
		<-time.After(2 * time.Millisecond)
	}
}

func TestContainerRunsAndEnds(t *testing.T) {
	p := newPod(t)
	p.watch()
	p.start(p.container(`echo $GREETING; echo bad >&2; hostname; exit 3`))
	st := p.exit()
	if st.ExitCode != 3 || st.Signal != 0 || st.Error != "" {
		t.Errorf("ended with %+v, want exit code 3", st)
	}
	if got := p.log(); !strings.Contains(got, "hello\n") || !strings.Contains(got, "bad\n") || !strings.Contains(got, "the-pod\n") {
		t.Errorf("log %q", got)
	}
	var rec shim.State
	b, err := os.ReadFile(filepath.Join(p.Dir, "main.json"))
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil || rec.ExitCode != 3 || !rec.Exited || rec.Boot != process.BootID() {
		t.Errorf("record %s, %v", b, err)
	}
}

func TestCannotStart(t *testing.T) {
	p := newPod(t)
	for _, c := range []struct {
		name   string
		change func(*shim.Container)
		want   string
	}{
		{"no such command", func(c *shim.Container) { c.Args = []string{"no-such-command"} }, "no-such-command"},
		{"no command", func(c *shim.Container) { c.Args = nil }, "command is required"},
		{"not executable", func(c *shim.Container) { c.Args = []string{"/etc/passwd"} }, "not executable"},
		{"no such directory", func(c *shim.Container) { c.Dir = "/no/such/dir" }, "/no/such/dir"},
		{"no such mount point", func(c *shim.Container) { c.Binds = []mount.Bind{{Source: "/etc", Target: "/no/such/place"}} }, "/no/such/place"},
	} {
		spec := p.container("true")
		spec.ID = c.name
		c.change(&spec)
		st := p.start(spec)
		if !st.Exited || !strings.Contains(st.Error, c.want) {
			t.Errorf("%s: %+v, want an error with %q", c.name, st, c.want)
		}
	}
}

// A start that is asked for again before the first answer came is the same start, and both answers name its process.
func TestStartAskedForTwice(t *testing.T) {
	p := newPod(t)
	c := p.container("sleep 60")
	var first, second shim.State
	var errs [2]error
	var both sync.WaitGroup
	both.Go(func() { first, errs[0] = p.Start(t.Context(), c) })
	both.Go(func() { second, errs[1] = p.Start(t.Context(), c) })
	both.Wait()
	if err := errors.Join(errs[:]...); err != nil || first.Process.Pid == 0 || first.Process != second.Process {
		t.Fatalf("%v: the answers are %+v and %+v", err, first, second)
	}
}

func TestSignals(t *testing.T) {
	p := newPod(t)
	p.watch()
	p.start(p.container(`trap 'exit 9' TERM; echo up; while :; do sleep 0.01; done`))
	await(t, "the trap", func() bool { return strings.Contains(p.log(), "up") })
	if err := p.Signal(t.Context(), "main", syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if st := p.exit(); st.ExitCode != 9 {
		t.Errorf("ended with %+v, want exit code 9", st)
	}
	p.start(p.container(`exec sleep 600`))
	if err := p.Signal(t.Context(), "main", syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if st := p.exit(); st.ExitCode != 137 || st.Signal != 9 {
		t.Errorf("ended with %+v, want 137 by signal 9", st)
	}
}

// Processes that leave their session and their parent end with the container.
func TestNothingOutlivesTheContainer(t *testing.T) {
	p := newPod(t)
	p.watch()
	pids := filepath.Join(p.Dir, "pids")
	p.start(p.container(fmt.Sprintf(`: > %s; for i in 1 2 3; do setsid sh -c 'echo $$ >> %s; exec sleep 600' & done
		while [ $(wc -l < %s) -lt 3 ]; do sleep 0.01; done; exit 0`, pids, pids, pids)))
	st := p.exit()
	if st.ExitCode != 0 {
		t.Errorf("ended with %+v", st)
	}
	if left := process.InMountNamespace(st.MountNS); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
	b, _ := os.ReadFile(pids)
	if n := len(strings.Fields(string(b))); n != 3 {
		t.Fatalf("%d children, want 3", n)
	}
	// The shim takes their exit: no zombies.
	await(t, "the last zombie's end", func() bool {
		for _, pid := range strings.Fields(string(b)) {
			if _, err := os.Stat("/proc/" + pid); err == nil {
				return false
			}
		}
		return true
	})
}

// The kernel gives the number of a mount namespace that is gone to the next one:
// the end of a pod must not take another pod's processes for its own.
func TestShutdownSparesTheNextOwnerOfTheNamespaceNumber(t *testing.T) {
	old, other := newPod(t), newPod(t)
	old.watch()
	old.start(old.container("exit 0"))
	gone := old.exit().MountNS
	for i := range 200 {
		c := other.container("exec sleep 600")
		c.Name, c.ID = fmt.Sprint("next-", i), fmt.Sprint(i)
		st := other.start(c)
		if st.MountNS != gone {
			continue
		}
		if err := old.Shutdown(t.Context()); err != nil {
			t.Fatal(err)
		}
		await(t, "the end of the shim", func() bool { return !old.id.Alive() })
		if !st.Process.Alive() {
			t.Error("the end of one pod killed a container of another")
		}
		return
	}
	t.Skip("the kernel did not reuse the number for this namespace")
}

func TestMounts(t *testing.T) {
	p := newPod(t)
	p.watch()
	hosts := filepath.Join(p.Dir, "hosts")
	if err := os.WriteFile(hosts, []byte("10.0.0.1 me\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile("/etc/hosts")
	if err != nil {
		t.Fatal(err)
	}
	c := p.container(`cat /etc/hosts; touch /mnt/x && echo wrote; exit 0`)
	c.Binds = []mount.Bind{{Source: hosts, Target: "/etc/hosts"}, {Source: p.Dir, Target: "/mnt", ReadOnly: true},
		{Source: hosts, Target: "/no/such", Optional: true}}
	p.start(c)
	p.exit()
	if got := p.log(); !strings.Contains(got, "10.0.0.1 me") || strings.Contains(got, "wrote") {
		t.Errorf("log %q", got)
	}
	after, err := os.ReadFile("/etc/hosts")
	if err != nil || !bytes.Equal(before, after) {
		t.Error("the machine's own /etc/hosts changed")
	}
}

func TestExec(t *testing.T) {
	p := newPod(t)
	c := p.container(`exec sleep 600`)
	c.Binds = []mount.Bind{{Source: p.Dir, Target: "/mnt"}}
	st := p.start(c)
	run := func(ctx context.Context, stdin string, args ...string) (int, string, error) {
		in, inW, _ := os.Pipe()
		out, outW, _ := os.Pipe()
		defer out.Close()
		fmt.Fprint(inW, stdin)
		inW.Close()
		result := make(chan string, 1)
		code, err := p.Exec(ctx, shim.Exec{Container: "main", Args: args}, shim.Streams{Stdin: in, Stdout: outW, Stderr: outW}, func() {
			in.Close()
			outW.Close()
			go func() {
				b, _ := io.ReadAll(out)
				result <- string(b)
			}()
		})
		if err != nil {
			in.Close()
			outW.Close()
			return code, "", err
		}
		return code, <-result, nil
	}
	code, out, err := run(t.Context(), "typed\n", "sh", "-c", `cat; ls /mnt; echo $GREETING; readlink /proc/self/ns/net; exit 7`)
	if err != nil || code != 7 {
		t.Errorf("exec: %d, %v; want 7", code, err)
	}
	ns, err := os.Readlink(netns.Of(st.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"typed\n", "main.log\n", "hello\n", ns} {
		if !strings.Contains(out, want) {
			t.Errorf("output %q lacks %q", out, want)
		}
	}
	if _, _, err := run(t.Context(), "", "no-such-command"); err == nil || !strings.Contains(err.Error(), "no-such-command") {
		t.Errorf("exec of no command: %v", err)
	}
	// The caller's end is the command's end.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, _, err := run(ctx, "", "sh", "-c", "echo $$ > /mnt/pid; exec sleep 600"); err == nil {
		t.Error("a cancelled exec gave no error")
	}
	b, err := os.ReadFile(filepath.Join(p.Dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	await(t, "the end of the cancelled command", func() bool {
		_, err := os.Stat("/proc/" + strings.TrimSpace(string(b)))
		return err != nil
	})
}

func TestExecTerminal(t *testing.T) {
	p := newPod(t)
	p.start(p.container(`exec sleep 600`))
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	if err := pty.Setsize(master, &pty.Winsize{Rows: 33, Cols: 77}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan int, 1)
	go func() {
		code, _ := p.Exec(t.Context(), shim.Exec{Container: "main", Args: []string{"sh", "-c", "tty; stty size; read x; echo got $x; exit 4"},
			TTY: true},
			shim.Streams{Stdin: slave, Stdout: slave}, func() { slave.Close() })
		ended <- code
	}()
	var out bytes.Buffer
	buf := make([]byte, 1000)
	for answered := false; ; {
		n, err := master.Read(buf)
		out.Write(buf[:n])
		if strings.Contains(out.String(), "33 77") && !answered {
			answered = true
			fmt.Fprint(master, "there\n")
		}
		if err != nil {
			break
		}
	}
	if code := <-ended; code != 4 || !strings.Contains(out.String(), "/dev/pts/") || !strings.Contains(out.String(), "got there") {
		t.Errorf("exit code %d, output %q", code, out.String())
	}
}

func TestAttach(t *testing.T) {
	p := newPod(t)
	c := p.container(`while read x; do echo got $x; done; echo end`)
	c.Stdin, c.StdinOnce = true, true
	p.start(c)
	in, inW, _ := os.Pipe()
	out, outW, _ := os.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- p.Attach(t.Context(), "main", shim.Streams{Stdin: in, Stdout: outW}, func() { in.Close(); outW.Close() })
	}()
	fmt.Fprint(inW, "one\n")
	inW.Close()
	b, err := io.ReadAll(out)
	if err != nil || string(b) != "got one\nend\n" {
		t.Errorf("read %q, %v", b, err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A pod whose directory is removed cannot be reached again: it ends.
func TestDirectoryRemoved(t *testing.T) {
	p := newPod(t)
	st := p.start(p.container(`exec sleep 600`))
	if err := os.RemoveAll(p.Dir); err != nil {
		t.Fatal(err)
	}
	await(t, "the end of the container", func() bool { return !st.Process.Alive() })
	await(t, "the end of the shim", func() bool { return !p.id.Alive() })
}

// A shim that dies takes the first process along; what else runs can be found
// by the mount namespace.
func TestShimKilled(t *testing.T) {
	p := newPod(t)
	st := p.start(p.container(`sleep 600 & echo up; wait`))
	await(t, "the child", func() bool { return strings.Contains(p.log(), "up") })
	if err := p.id.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await(t, "the container's end", func() bool { return !st.Process.Alive() })
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := process.KillMountNamespace(ctx, st.MountNS); err != nil {
		t.Error(err)
	}
}

func TestGarbageOnTheSocket(t *testing.T) {
	p := newPod(t)
	for _, junk := range []string{"", "x", "\x00\x00\x00\x02{", "\xff\xff\xff\xff", "\x00\x00\x00\x02{}",
		"\x00\x00\x00\x0f{\"op\":\"start\"}.", `{"op":"exec"}`} {
		c := dial(t, p.Dir)
		fmt.Fprint(c, junk)
		c.Close()
	}
	if st := p.start(p.container("exec sleep 600")); st.Process.Pid == 0 {
		t.Errorf("the shim does not serve any more: %+v", st)
	}
}
