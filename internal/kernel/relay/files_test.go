package relay

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// fewFilesEnv marks the process of TestRunsOutOfFiles that has few.
const fewFilesEnv = "FAIRLEAD_TEST_FEW_FILES"

// Without files, or at the bound of its own, it stops accepting; what is open
// goes on, and what waits is served once there is room.
func TestRunsOutOfFiles(t *testing.T) {
	if arg := os.Getenv(fewFilesEnv); arg != "" {
		withFewFiles(t, arg)
		return
	}
	for name, bound := range map[string]int{"the system's limit": 1 << 20, "its own bound": 60} {
		t.Run(name, func(t *testing.T) {
			ep := serve(t, svc.IPv4, echo)
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRunsOutOfFiles$")
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", fewFilesEnv, ep, bound))
			cmd.Stderr = os.Stderr
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewReader(stdout)
			at, err := lines.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			outOfFiles(t, strings.TrimSpace(at))
			_ = stdin.Close()
			last, _ := lines.ReadString('\n')
			if err := cmd.Wait(); err != nil {
				t.Errorf("the process with few files: %v", err)
			}
			var accepted, paused int64
			if _, err := fmt.Sscan(last, &accepted, &paused); err != nil || accepted != 2*manyConnections || paused == 0 {
				t.Errorf("accepted and paused are %q, want %d and more than 0", last, 2*manyConnections)
			}
		})
	}
}

// manyConnections need twice as many files as there are.
const manyConnections = 60

func outOfFiles(t *testing.T, at string) {
	var conns []*net.TCPConn
	for range 2 * manyConnections {
		conns = append(conns, dial(t, at)) // the backlog takes them
	}
	served := 0
	for ; served < len(conns); served++ {
		_ = conns[served].SetDeadline(time.Now().Add(time.Second))
		if ask(conns[served], "hello") != nil {
			break
		}
	}
	if served < 10 || served == len(conns) {
		t.Fatalf("%d of %d connections were served at once", served, len(conns))
	}
	for _, c := range conns[:served] {
		_ = c.SetDeadline(time.Now().Add(waitLimit))
		if err := ask(c, "still there?"); err != nil {
			t.Errorf("an open connection: %v", err)
		}
	}
	for i, c := range conns {
		_ = c.SetDeadline(time.Now().Add(waitLimit))
		word := "at last"
		if i == served {
			word = "" // was sent before
			b := make([]byte, len("hello"))
			if _, err := c.Read(b); err != nil {
				t.Errorf("connection %d: %v", i, err)
			}
		}
		if err := ask(c, word); err != nil {
			t.Errorf("connection %d: %v", i, err)
		}
		_ = c.Close()
	}
}

// withFewFiles is the process with few files.
func withFewFiles(t *testing.T, arg string) {
	endpoint, bound, _ := strings.Cut(arg, " ")
	cfg := Config{}
	if _, err := fmt.Sscan(bound, &cfg.MaxFiles); err != nil {
		t.Fatal(err)
	}
	e, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := e.Listen(svc.TCP, svc.IPv4, 0, &inOrder{endpoints: []netip.AddrPort{netip.MustParseAddrPort(endpoint)}})
	if err != nil {
		t.Fatal(err)
	}
	limit := unix.Rlimit{Cur: manyConnections * 2, Max: manyConnections * 2}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	fmt.Printf("127.0.0.1:%d\n", l.Port)
	_, _ = os.Stdin.Read(make([]byte, 1)) // until the other process has seen enough
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	if err := e.Close(ctx); err != nil {
		t.Error(err)
	}
	fmt.Println(e.Stats().Accepted, e.Stats().Paused)
}

// Connections that carry much, to clients that do not read, leave files for others.
func TestPipesLeaveRoom(t *testing.T) {
	ep := serve(t, svc.IPv4, func(c *net.TCPConn) {
		var kind [1]byte
		if _, err := io.ReadFull(c, kind[:]); err != nil {
			return
		}
		if kind[0] == 'b' {
			much := make([]byte, 1<<20)
			for _, err := c.Write(much); err == nil; _, err = c.Write(much) {
			}
		}
		_, _ = c.Write(kind[:])
	})
	e, _, at := start(t, Config{Threads: 1, MaxFiles: 24}, svc.TCP, svc.IPv4, &inOrder{endpoints: []netip.AddrPort{ep}})
	for range 6 {
		c := dial(t, at)
		_, _ = c.Write([]byte("b"))
		if _, err := io.CopyN(io.Discard, c, 4<<20); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3 {
		if err := ask(dial(t, at), "x"); err != nil {
			t.Fatalf("connection %d beside those that are stuck: %v, %+v", i, err, e.Stats())
		}
	}
	if n := e.Stats().Pipes; n == 0 {
		t.Error("no pipe was used")
	}
}

// Each Engine has a thread for a processor, although the first one has raised GOMAXPROCS.
func TestThreadsOfSeveralEngines(t *testing.T) {
	a, _, _ := start(t, Config{}, svc.TCP, svc.IPv4, &inOrder{})
	b, _, _ := start(t, Config{}, svc.TCP, svc.IPv4, &inOrder{})
	if len(a.workers) != len(b.workers) {
		t.Errorf("%d and %d threads", len(a.workers), len(b.workers))
	}
}
