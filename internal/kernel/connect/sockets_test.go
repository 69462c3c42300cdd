package connect

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A namespace is looked for by another of its processes when one has ended, and by each once more when all have. One that cannot be
// entered for another reason is not taken for handled.
func TestNamespacesOfProcessesThatEnd(t *testing.T) {
	own, err := Cookie()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		lists   [][]string // of the first walk, the second one...; the last one stays
		handled bool
		fails   bool
	}{
		"another process":    {[][]string{{"ended", "alive"}}, true, false},
		"its child":          {[][]string{{"ended"}, {"child"}}, true, false},
		"no process":         {[][]string{{"ended"}, {}}, false, false},
		"ends again":         {[][]string{{"ended"}}, false, true},
		"no files":           {[][]string{{"no files"}}, false, true},
		"others have failed": {[][]string{{"elsewhere", "alive"}}, true, true},
	} {
		n := &namespaces{
			paths: func() ([]string, error) {
				now := c.lists[0]
				c.lists = c.lists[min(1, len(c.lists)-1):]
				return now, nil
			},
			inode: func(path string) (uint64, error) { return uint64(1 + slices.Index([]string{"elsewhere"}, path)), nil },
			do: func(path string, f func() error) error {
				switch path {
				case "ended":
					return os.ErrNotExist
				case "no files", "elsewhere":
					return unix.EMFILE
				}
				return f()
			},
		}
		handled, err := n.each(map[uint64]stale{own: {}}, func(uint64) error { return nil })
		if handled[own] != c.handled || (err != nil) != c.fails {
			t.Errorf("%s: handled %v, error %v", name, handled[own], err)
		}
	}
}

// What could not be ended is ended by the next call.
func TestSocketsAreEndedAfterAFailure(t *testing.T) {
	p, _ := attached(t)
	c := dial(t, front)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	n, failed := p.EndSockets(none)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if n != 0 || !errors.Is(failed, unix.EMFILE) {
		t.Fatalf("without files: %d ended, %v", n, failed)
	}
	if n, err := p.EndSockets(none); n != 1 || err != nil {
		t.Errorf("with files again: %d ended, %v; want 1", n, err)
	}
	wantEnded(t, c)
}

// A socket that is connected with another Service while the old one's are ended stays known.
func TestSocketConnectsAgainMeanwhile(t *testing.T) {
	p, _ := attached(t)
	other, at := netip.MustParseAddrPort("10.96.0.2:80"), netip.MustParseAddrPort("127.0.0.1:9")
	if err := p.PutSlots(2, []netip.AddrPort{at}); err != nil {
		t.Fatal(err)
	}
	if err := p.PutFront(Front{Addr: other, Protocol: unix.IPPROTO_UDP}, Route{List: [2]uint32{2}, Count: [2]uint32{1}}); err != nil {
		t.Fatal(err)
	}
	fd := open(t)
	defer func() { _ = unix.Close(fd) }()
	connect := func(to netip.AddrPort) {
		t.Helper()
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
			t.Fatal(err)
		}
	}
	connect(front)
	n, err := p.EndSockets(func(f, _ netip.AddrPort) bool {
		if f == front {
			raw := make([]byte, unix.SizeofSockaddrInet4) // AF_UNSPEC is 0: it is connected no more
			if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&raw[0])), uintptr(len(raw))); errno != 0 {
				t.Fatal(errno)
			}
			connect(other)
		}
		return f != front
	})
	if n != 0 || err != nil {
		t.Errorf("%d ended, %v; want none: it is connected with another endpoint", n, err)
	}
	if n, err := p.EndSockets(none); n != 1 || err != nil {
		t.Errorf("%d ended, %v; want the socket", n, err)
	}
}

// Sockets whose notes go with the maps end before: nobody would end them when their endpoint leaves.
func TestSocketsEndWithTheMaps(t *testing.T) {
	for name, goes := range map[string]func(*Programs) error{
		"cleanup": func(p *Programs) error { return Cleanup(p.cfg.FS) },
		"another layout": func(p *Programs) error {
			if err := os.Remove(filepath.Join(p.dir, programMapOwn)); err != nil {
				return err
			}
			next, err := Open(p.cfg)
			if err != nil {
				return err
			}
			return errors.Join(next.Attach(), next.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, server := attached(t)
			c, direct := dial(t, front), dial(t, server.LocalAddr().(*net.UDPAddr).AddrPort())
			again, err := Open(p.cfg) // the same maps: it stays
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(again.Attach(), again.Close()); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write([]byte("x")); err != nil {
				t.Errorf("after a restart: %v", err)
			}
			if err := goes(p); err != nil {
				t.Fatal(err)
			}
			wantEnded(t, c)
			if _, err := direct.Write([]byte("x")); err != nil {
				t.Errorf("the socket that is connected with the endpoint itself: %v", err)
			}
		})
	}
}

// A list of attempts that may lack some comes with an error, and has the ones that were found.
func TestAttemptsInPart(t *testing.T) {
	to, from := netip.MustParseAddrPort("10.244.0.1:80"), netip.MustParseAddrPort("10.244.1.7:40000")
	noted := stale{7: {
		Cookie: 3, To: programEndpoint{Addr: as16(to.Addr()), Port: swapped(to.Port())},
		Front: programFrontKey{Addr: as16(front.Addr()), Port: swapped(front.Port())},
	}}
	message := make([]byte, diagLeast) // of sock_diag(7)
	message[0] = unix.AF_INET
	binary.BigEndian.PutUint16(message[diagPorts:], from.Port())
	binary.BigEndian.PutUint16(message[diagPorts+2:], to.Port())
	copy(message[diagSource:], from.Addr().AsSlice())
	copy(message[diagDest:], to.Addr().AsSlice())
	native.PutUint64(message[diagCookie:], 7)
	for name, broken := range map[string]error{"whole": nil, "interrupted": netlink.ErrDumpInterrupted, "failed": unix.ENOBUFS} {
		found, err := noted.attempts(func(family uint8) ([][]byte, error) {
			if family == unix.AF_INET {
				return [][]byte{message}, broken
			}
			return nil, nil
		})
		if len(found) != 1 || found[0].Front != front || found[0].To != to || found[0].From != from || !errors.Is(err, broken) {
			t.Errorf("%s: found %+v, %v", name, found, err)
		}
	}
}

// none lets no socket stay.
func none(_, _ netip.AddrPort) bool { return false }

// dial is a connected socket.
func dial(t *testing.T, to netip.AddrPort) net.Conn {
	t.Helper()
	c, err := net.Dial("udp4", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func wantEnded(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 8)); !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("the socket was not ended: %v", err)
	}
}
