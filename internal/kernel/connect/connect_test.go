package connect

import (
	"bytes"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// The object that is checked in is what 'make bpf' compiles from its source.
func TestObjectIsCompiledFromItsSource(t *testing.T) {
	for _, tool := range []string{"clang-14", "llvm-strip-14"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%v: only Debian 12 and Ubuntu 22.04 have clang-14 and llvm-14, which 'make setup' installs there", err)
		}
	}
	out := t.TempDir()
	// The test's namespaces have no network: 'make fetch' has downloaded the tool.
	cmd := exec.Command("make", "-s", "-C", "../../..", "bpf", "BPFFLAGS=-output-dir "+out)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make bpf: %v ('make fetch' downloads bpf2go)\n%s", err, text)
	}
	for _, name := range []string{"program_bpfel.go", "program_bpfel.o"} {
		has, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join(out, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(has, want) {
			t.Errorf("%s is not what bpf/connect.c compiles to: run 'make bpf'", name)
		}
	}
}

// Other programs on the group stay when ours come, are replaced, and go.
func TestOtherProgramsStay(t *testing.T) {
	group, fs := testbed.Group(t), testbed.BPFFS(t)
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "MIT",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	l, err := link.AttachCgroup(link.CgroupOptions{Path: group.Dir, Attach: ebpf.AttachCGroupInet4Connect, Program: other})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	want := func(n int, when string) {
		t.Helper()
		dir, err := os.Open(group.Dir)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = dir.Close() }()
		got, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupInet4Connect})
		if err != nil || len(got.Programs) != n {
			t.Errorf("%s: %d programs are on the group, want %d: %v", when, len(got.Programs), n, err)
		}
	}
	want(1, "before")
	cfg := Config{Cgroup: group.Dir, FS: fs}
	for _, when := range []string{"attached", "attached again"} {
		p, err := Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Attach(); err != nil {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		want(2, when)
	}
	if err := Cleanup(fs); err != nil {
		t.Fatal(err)
	}
	want(1, "after the cleanup")
}

// Maps of another layout, as another version's, are replaced as a whole, and its programs with them.
func TestAnotherLayoutIsReplaced(t *testing.T) {
	cfg := Config{Cgroup: testbed.Group(t).Dir, FS: testbed.BPFFS(t)}
	p, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Attach(); err != nil {
		t.Fatal(err)
	}
	if err := p.PutFront(Front{Addr: front, Protocol: 6}, Route{}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(p.dir, programMapOwn)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	if err := m.Pin(path); err != nil {
		t.Fatal(err)
	}
	if p, err = Open(cfg); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	if err := p.Fronts(func(f Front, _ Route) { t.Errorf("%v is in a new map", f) }); err != nil {
		t.Error(err)
	}
	if err := p.Attach(); err != nil {
		t.Fatal(err)
	}
	if err := p.PutOwn(1, front.Addr()); err != nil {
		t.Fatal(err)
	}
	again, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close() }()
	n := 0
	if err := again.Own(func(uint32, netip.Addr) { n++ }); err != nil || n != 1 {
		t.Errorf("the new map is not kept: %d entries, %v", n, err)
	}
}

var front = netip.MustParseAddrPort("10.96.0.1:80")
