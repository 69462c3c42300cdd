package web

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// crowdVariable is set in a process of this test that opens connections: "ADDRESS".
const crowdVariable = "FAIRLEAD_TEST_CROWD"

// crowd is how many connections it opens, as far as files may be open.
const crowd = 20_000

// raiseFiles has as many files be open as the crowd needs, if this user may, and returns how many may.
func raiseFiles() int {
	var l syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l) != nil {
		return 0
	}
	more := syscall.Rlimit{Cur: 5 * crowd, Max: max(l.Max, 5*crowd)}
	if l.Cur < more.Cur && syscall.Setrlimit(syscall.RLIMIT_NOFILE, &more) == nil {
		l = more
	}
	return int(l.Cur)
}

// TestCrowdProcess is what TestCrowd starts.
func TestCrowdProcess(t *testing.T) {
	at := os.Getenv(crowdVariable)
	if at == "" {
		t.Skip("is the process with the clients, which TestCrowd runs")
	}
	n := min(crowd, raiseFiles()-200)
	conns := make([]net.Conn, 0, n)
	for i := range n {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		text := []string{"", "GET / HTTP/1.1\r\nHost: ", "GET / HTTP/1.1\r\nHost: web\r\n\r\n", "\x00\xff\x80garbage"}[i%4]
		_, _ = io.WriteString(c, text) // it may be closed already
	}
	fmt.Println(len(conns))
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// A crowd of clients at once, more than may be, has what its Service may have: memory is bounded, another Service is served, and when
// the crowd has gone nothing is left.
func TestCrowd(t *testing.T) {
	raiseFiles()
	r := newRig(t, map[string]string{lbProtocol: "http"})
	pod := r.Web(lbtest.Tell)
	r.set(pod)
	before := inUse()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestCrowdProcess$")
	cmd.Env = append(os.Environ(), crowdVariable+"="+r.At.String())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	r.Must(err)
	out, err := cmd.StdoutPipe()
	r.Must(err)
	r.Must(cmd.Start())
	n := 0
	if _, err := fmt.Fscanln(bufio.NewReader(out), &n); err != nil || n < 100 {
		t.Fatalf("%d connections: %v", n, err)
	}
	deadline := time.Now().Add(lbtest.Patience)
	for ; r.connections()+int(r.server.Rejected()) < n*3/4; <-time.After(time.Millisecond) { // garbage ends
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d connections are there, %d were rejected", r.connections(), n, r.server.Rejected())
		}
	}
	held := r.connections()
	if most := socket.MaxFiles() * 3 / 16; held > most {
		t.Errorf("%d connections of one Service, which may have %d", held, most)
	}
	used := inUse() - before
	t.Logf("%d of %d connections have %d MiB, %d were rejected", held, n, used>>20, r.server.Rejected())
	if used > int64(held)*32<<10+32<<20 { // and what the peak has left
		t.Errorf("%d connections have %d bytes each", held, used/int64(held))
	}
	crowded := r.service
	r.At = r.Free()
	r.service.Name.Name, r.service.Addrs = "other", []netip.Addr{r.At.Addr()}
	r.ask(map[string]string{lbProtocol: "http"})
	r.service.Backends = map[uint16][]netip.AddrPort{r.At.Port(): {pod}}
	if failed := r.server.Set([]*proxied.Service{&crowded, &r.service}); len(failed) > 0 {
		t.Fatal(failed)
	}
	r.served("another Service beside a crowd")
	r.Must(in.Close())
	_ = cmd.Wait()
	for deadline := time.Now().Add(lbtest.Patience); r.connections() > 1; <-time.After(time.Millisecond) { // the other client's
		if time.Now().After(deadline) {
			t.Fatalf("%d connections are left of a crowd", r.connections())
		}
	}
}
