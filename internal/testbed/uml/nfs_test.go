package uml

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/testbed"
)

// A file system of NFS is mounted from a Service's address by connect-time alone, and what is remembered of the kernel's
// own sockets goes with them.
func TestNFSByConnectTime(t *testing.T) {
	if _, err := exec.LookPath("rpc.nfsd"); err != nil {
		t.Skip("no rpc.nfsd: install nfs-kernel-server with test/setup.sh")
	}
	mount := func(kind, at, data string) {
		if err := os.MkdirAll(at, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(kind, at, kind, 0, data); err != nil {
			t.Fatalf("mount %s: %v", at, err)
		}
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	}
	n := testbed.NewNetwork(t)
	node, server := n.Host("node"), n.Host("server")
	vip := netip.MustParseAddrPort("10.96.0.20:2049")

	dir := t.TempDir()
	run := func(h *testbed.Host, name string, args ...string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if out, err := h.Command(ctx, name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, out)
		}
	}
	run(node, modprobe, "-a", "nfs", "nfsv4", "nfsd")
	mount("tmpfs", "/var/lib/nfs", "")
	server.Do(func() { mount("nfsd", "/proc/fs/nfsd", "") })
	exported := filepath.Join(dir, "exported")
	mount("tmpfs", exported, "")
	for _, f := range []string{"etab", "rmtab"} {
		if err := os.WriteFile("/var/lib/nfs/"+f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"v4recovery", "nfsdcltrack"} {
		if err := os.Mkdir("/var/lib/nfs/"+d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(exported, "greeting"), []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"nfsv4leasetime", "nfsv4gracetime"} {
		server.Do(func() {
			if err := os.WriteFile("/proc/fs/nfsd/"+f, []byte("10"), 0); err != nil {
				t.Fatal(err)
			}
		})
	}
	run(server, "exportfs", "-i", "-o", "rw,fsid=0,no_root_squash,insecure", "*:"+exported) //nolint:misspell // the program
	mountd := server.Command(t.Context(), "rpc.mountd", "--foreground", "--no-nfs-version", "3", "--no-udp")
	if err := mountd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mountd.Process.Kill(); _ = mountd.Wait() })
	run(server, "rpc.nfsd", "--no-nfs-version", "3", "--no-udp", "2")
	t.Cleanup(func() { run(server, "rpc.nfsd", "0") })

	group, bpffs := filepath.Join(dir, "cgroup"), filepath.Join(dir, "bpf")
	mount("cgroup2", group, "")
	mount("bpf", bpffs, "")
	node.Do(func() {
		p, err := connect.Open(connect.Config{Cgroup: group, FS: bpffs})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		if err := p.PutSlots(1, []netip.AddrPort{netip.AddrPortFrom(server.Addr4(), vip.Port())}); err != nil {
			t.Fatal(err)
		}
		front := connect.Front{Addr: vip, Protocol: unix.IPPROTO_TCP}
		if err := p.PutFront(front, connect.Route{List: [2]uint32{1}, Count: [2]uint32{1}}); err != nil {
			t.Fatal(err)
		}
		if err := p.Attach(); err != nil {
			t.Fatal(err)
		}
		at := filepath.Join(dir, "mounted")
		if err := os.Mkdir(at, 0o700); err != nil {
			t.Fatal(err)
		}
		options := fmt.Sprintf("vers=4.2,proto=tcp,addr=%s,clientaddr=%s,soft,timeo=50", vip.Addr(), node.Addr4())
		if err := unix.Mount(vip.Addr().String()+":/", at, "nfs4", 0, options); err != nil {
			t.Fatalf("mount from the Service: %v", err)
		}
		defer func() { _ = unix.Unmount(at, unix.MNT_DETACH) }()
		if b, err := os.ReadFile(filepath.Join(at, "greeting")); err != nil || string(b) != "hello" {
			t.Errorf("read %q: %v", b, err)
		}
		if err := os.WriteFile(filepath.Join(at, "answer"), []byte("written"), 0o600); err != nil {
			t.Error(err)
		}
		if b, err := os.ReadFile(filepath.Join(exported, "answer")); err != nil || string(b) != "written" {
			t.Errorf("the server has %q: %v", b, err)
		}
		pins, err := filepath.Glob(filepath.Join(bpffs, "fairlead", "*", "streams"))
		if err != nil || len(pins) != 1 {
			t.Fatalf("%v: %v", pins, err)
		}
		m, err := ebpf.LoadPinnedMap(pins[0], nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = m.Close() }()
		var key, value []byte
		if all := m.Iterate(); all.Next(&key, &value) || all.Err() != nil {
			t.Errorf("the map has a socket of the kernel's, which would never leave it: %x, %v", key, all.Err())
		}
	})
}
