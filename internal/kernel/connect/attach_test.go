package connect

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/testbed"
)

// inForce are the programs of the pinned links, by the name of their hook.
func inForce(t *testing.T, dir string) map[string]ebpf.ProgramID {
	t.Helper()
	out := map[string]ebpf.ProgramID{}
	for _, h := range hooks {
		l, err := link.LoadPinnedLink(filepath.Join(dir, "link-"+h.name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			continue // a directory
		}
		info, err := l.Info()
		if err != nil {
			t.Fatal(err)
		}
		out[h.name] = info.Program
		_ = l.Close()
	}
	return out
}

// Where one program cannot be attached, all others are as before: of an earlier process, or none. The next try attaches all.
func TestAttachGoesBack(t *testing.T) {
	cfg := Config{Cgroup: testbed.Group(t).Dir, FS: testbed.BPFFS(t)}
	open := func() *Programs {
		t.Helper()
		p, err := Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		return p
	}
	for _, earlier := range []bool{false, true} {
		p := open()
		if earlier {
			if err := open().Attach(); err != nil {
				t.Fatal(err)
			}
		}
		blocked := filepath.Join(p.dir, "link-"+hooks[len(hooks)-1].name)
		if err := os.Remove(blocked); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(blocked, "x"), 0o700); err != nil {
			t.Fatal(err)
		}
		was := inForce(t, p.dir)
		if err := p.Attach(); err == nil {
			t.Fatal("attached to a hook whose link cannot be kept")
		}
		is := inForce(t, p.dir)
		if want := len(hooks) - 1; len(is) != len(was) || earlier != (len(is) == want) {
			t.Errorf("%d programs are in force, %d were", len(is), len(was))
		}
		for name, id := range was {
			if is[name] != id {
				t.Errorf("the program of %s is %d, was %d", name, is[name], id)
			}
		}
		if err := errors.Join(os.Remove(filepath.Join(blocked, "x")), os.Remove(blocked)); err != nil {
			t.Fatal(err)
		}
		if err := p.Attach(); err != nil {
			t.Fatal(err)
		}
		now := inForce(t, p.dir)
		for name, id := range was {
			if now[name] == id {
				t.Errorf("the program of %s is still the earlier one", name)
			}
		}
		if len(now) != len(hooks) {
			t.Errorf("%d programs are in force, want %d", len(now), len(hooks))
		}
	}
}

// The programs of a namespace that is gone are taken away; the ones of a namespace that a process has stay.
func TestNamespacesThatAreGone(t *testing.T) {
	p, _ := attached(t)
	other := testbed.NewNetwork(t).Outside("other")
	var cookie uint64
	other.Do(func() {
		var err error
		if cookie, err = Cookie(); err != nil {
			t.Fatal(err)
		}
	})
	process := other.Command(t.Context(), "sleep", "60")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = process.Process.Kill(); _ = process.Wait() })
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "the process is in its namespace", func() error {
		is, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", process.Process.Pid))
		if err == nil && is == own {
			err = errors.New(is)
		}
		return err
	})
	const gone = 1 << 60
	for _, c := range []uint64{cookie, gone} {
		if err := os.Mkdir(p.cfg.dir(c), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(filepath.Join(p.dir, "link-"+hooks[0].name), filepath.Join(p.cfg.dir(gone), "link-"+hooks[0].name)); err != nil {
		t.Fatal(err)
	}
	there := func(c uint64) bool {
		_, err := os.Lstat(p.cfg.dir(c))
		return err == nil
	}
	barred := allNamespaces(ownNamespace)
	barred.do = func(string, func() error) error { return unix.EPERM }
	if err := removeMissing(p.cfg.FS, p.cookie, barred); err != nil || !there(gone) {
		t.Errorf("where a namespace may not be entered: %v, kept %v", err, there(gone))
	}
	if err := removeMissing(p.cfg.FS, p.cookie, allNamespaces(ownNamespace)); err != nil {
		t.Fatal(err)
	}
	if there(gone) || !there(cookie) || !there(p.cookie) {
		t.Errorf("kept: gone %v, another %v, own %v", there(gone), there(cookie), there(p.cookie))
	}
	info, err := p.links[hooks[0].name].Info()
	if err != nil || info.Cgroup() != nil && info.Cgroup().CgroupId != 0 {
		t.Errorf("the link of a namespace that is gone is still in force: %+v, %v", info, err)
	}
}

// A socket in a namespace that no process has is ended once the namespace is found.
func TestSocketsOfANamespaceWithoutAProcess(t *testing.T) {
	p, _ := attached(t)
	other := testbed.NewNetwork(t).Outside("other")
	var c net.Conn
	var v programConnected
	var k uint64
	other.Do(func() {
		peer, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = peer.Close() })
		at := peer.LocalAddr().(*net.UDPAddr).AddrPort()
		c = dial(t, at)
		v.To = endpointOf(at)
		if v.Cookie, err = Cookie(); err != nil {
			t.Fatal(err)
		}
	})
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { k, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE) }); err != nil {
		t.Fatal(err)
	}
	if err := p.maps.Sockets.Put(k, &v); err != nil {
		t.Fatal(err)
	}
	look := func(want int) {
		t.Helper()
		n, err := p.EndSockets(none)
		noted := p.maps.Sockets.Lookup(k, &v) == nil
		if err != nil || n != want || noted != (want == 0) {
			t.Errorf("%d sockets ended, %v, noted %v; want %d", n, err, noted, want)
		}
	}
	look(0)
	process := other.Command(t.Context(), "sleep", "60")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = process.Process.Kill(); _ = process.Wait() })
	testbed.Until(t, "the process in its namespace", func() error {
		id, err := netns.Inode(netns.Of(process.Process.Pid))
		if own, _ := netns.Inode(ownNamespace); err == nil && id == own {
			err = errors.New("it is not there yet")
		}
		return err
	})
	look(1)
	wantEnded(t, c)
}
