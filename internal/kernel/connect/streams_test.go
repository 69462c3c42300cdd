package connect

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

// accepting has programs attached, with a Service of TCP at front whose endpoint accepts connections.
func accepting(t *testing.T) *Programs {
	t.Helper()
	p, _ := attached(t)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	testbed.Serve(t, l, func(net.Conn) {})
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
	reach(t, fd)
	return fd
}

// reach connects a socket to front, which it then shows as its peer.
func reach(t *testing.T, fd int) {
	t.Helper()
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: front.Addr().As4(), Port: int(front.Port())}); err != nil {
		t.Fatal(err)
	}
	peer, err := unix.Getpeername(fd)
	if is, ok := peer.(*unix.SockaddrInet4); err != nil || !ok || is.Addr != front.Addr().As4() || is.Port != int(front.Port()) {
		t.Errorf("getpeername says %+v, %v, want %s", peer, err, front)
	}
}

// streams is the number of sockets in the map, and whether fd has storage of its own.
func streams(t *testing.T, p *Programs, fd int) (n int, stored bool) {
	t.Helper()
	var cookie uint64
	var value programConnected
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
// itself remembers, and nothing of an earlier connection stays in the map.
func TestStreamsInStorage(t *testing.T) {
	p := accepting(t)
	again := stream(t, func() {})
	root := func() {
		dir := filepath.Dir(p.cfg.Cgroup)
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			t.Fatal(err)
		}
	}
	fd := stream(t, root)
	if n, stored := streams(t, p, fd); n != 1 || !stored { // the first socket
		t.Errorf("in the root group: %d streams are remembered, and storage %v; want only storage", n, stored)
	}
	_ = unix.Close(fd)
	// connect(2): AF_UNSPEC ends the association.
	if _, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(again), uintptr(unsafe.Pointer(&unix.RawSockaddrInet4{})),
		unix.SizeofSockaddrInet4); errno != 0 {
		t.Fatal(errno)
	}
	reach(t, again)
	if n, stored := streams(t, p, again); n != 0 || !stored {
		t.Errorf("connected again: %d streams are remembered, and storage %v; want only storage", n, stored)
	}
	_ = unix.Close(again)

	if err := os.WriteFile(filepath.Join(p.cfg.Cgroup, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		t.Fatal(err)
	}
	room := int(p.maps.Streams.MaxEntries())
	cookies, values := make([]uint64, room), make([]programConnected, room)
	for i := range cookies {
		cookies[i] = 1<<60 + uint64(i)
	}
	if _, err := p.maps.Streams.BatchUpdate(cookies, values, nil); err != nil {
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
