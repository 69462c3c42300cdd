package connect

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// accepting has programs attached, with a Service of TCP at front whose endpoint accepts connections.
func accepting(t *testing.T) *Programs {
	t.Helper()
	p, _ := attached(t)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	if err := p.PutSlots(2, []netip.AddrPort{l.Addr().(*net.TCPAddr).AddrPort()}); err != nil {
		t.Fatal(err)
	}
	if err := p.PutFront(Front{Addr: front, Protocol: unix.IPPROTO_TCP}, Route{List: [2]uint32{2}, Count: [2]uint32{1}}); err != nil {
		t.Fatal(err)
	}
	return p
}

// stream is a socket of TCP that is connected to front, and shows it as its peer. between is called before it connects.
func stream(t *testing.T, between func()) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	between()
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: front.Addr().As4(), Port: int(front.Port())}); err != nil {
		t.Fatal(err)
	}
	peer, err := unix.Getpeername(fd)
	if is, ok := peer.(*unix.SockaddrInet4); err != nil || !ok || is.Addr != front.Addr().As4() || is.Port != int(front.Port()) {
		t.Errorf("getpeername says %+v, %v, want %s", peer, err, front)
	}
	return fd
}

// streams is the number of sockets in the map, and whether fd has storage of its own.
func streams(t *testing.T, p *Programs, fd int) (n int, stored bool) {
	t.Helper()
	var cookie uint64
	var value programFrontKey
	all := p.maps.Streams.Iterate()
	for all.Next(&cookie, &value) {
		n++
	}
	if err := all.Err(); err != nil {
		t.Fatal(err)
	}
	b, err := p.maps.Peers.LookupBytes(int32(fd))
	if err != nil {
		t.Fatal(err)
	}
	return n, b != nil
}

// What is remembered of a socket of TCP goes when it is closed.
func TestStreamsLeaveNothing(t *testing.T) {
	p := accepting(t)
	held := stream(t, func() {})
	if n, stored := streams(t, p, held); n != 1 || stored {
		t.Errorf("%d streams are remembered, and storage %v; want only 1", n, stored)
	}
	for range 1000 {
		_ = unix.Close(stream(t, func() {}))
	}
	if n, _ := streams(t, p, held); n != 1 {
		t.Errorf("%d streams are remembered, want the open one", n)
	}
	_ = unix.Close(held)
	fresh := open(t)
	if n, _ := streams(t, p, fresh); n != 0 {
		t.Errorf("%d streams are remembered, want none", n)
	}
	_ = unix.Close(fresh)
}

// Where there is no room in the map, and in the root of the control groups, where the kernel's own sockets are, the socket
// itself remembers.
func TestStreamsInStorage(t *testing.T) {
	p := accepting(t)
	root := func() {
		dir := filepath.Dir(p.cfg.Cgroup)
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			t.Fatal(err)
		}
	}
	fd := stream(t, root)
	if n, stored := streams(t, p, fd); n != 0 || !stored {
		t.Errorf("in the root group: %d streams are remembered, and storage %v; want only storage", n, stored)
	}
	_ = unix.Close(fd)

	if err := os.WriteFile(filepath.Join(p.cfg.Cgroup, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		t.Fatal(err)
	}
	room := int(p.maps.Streams.MaxEntries())
	cookies, fronts := make([]uint64, room), make([]programFrontKey, room)
	for i := range cookies {
		cookies[i] = 1<<60 + uint64(i)
	}
	if _, err := p.maps.Streams.BatchUpdate(cookies, fronts, nil); err != nil {
		t.Fatal(err)
	}
	fd = stream(t, func() {})
	if n, stored := streams(t, p, fd); n != room || !stored {
		t.Errorf("without room: %d streams are remembered, and storage %v; want %d and storage", n, stored, room)
	}
	_ = unix.Close(fd)
	if _, err := p.maps.Streams.BatchDelete(cookies, nil); err != nil {
		t.Fatal(err)
	}
	fd = stream(t, func() {})
	if n, stored := streams(t, p, fd); n != 1 || stored {
		t.Errorf("with room again: %d streams are remembered, and storage %v; want only 1", n, stored)
	}
	_ = unix.Close(fd)
}
