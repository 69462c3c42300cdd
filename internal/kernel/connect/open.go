package connect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
)

// ownNamespace is the path of the calling thread's network namespace.
const ownNamespace = "/proc/thread-self/ns/net"

// native is the byte order of the object, that of all machines that fairlead is built for.
var native = binary.LittleEndian

// pinned are the maps that outlive the process: all of them. By the maps of peers and sends a socket is known that programs
// of an earlier process translated.
var pinned = []string{
	programMapFronts, programMapSlots, programMapOwn, programMapMembers, programMapNodes, programMapClients, programMapAsks,
	programMapPeers, programMapSends, programMapSockets, programMapStreams,
}

// hooks are the programs by the name of their link.
var hooks = []struct {
	name   string
	attach ebpf.AttachType
}{
	{programProgConnect4, ebpf.AttachCGroupInet4Connect},
	{programProgConnect6, ebpf.AttachCGroupInet6Connect},
	{programProgGetpeername4, ebpf.AttachCgroupInet4GetPeername},
	{programProgGetpeername6, ebpf.AttachCgroupInet6GetPeername},
	{programProgRecvmsg4, ebpf.AttachCGroupUDP4Recvmsg},
	{programProgRecvmsg6, ebpf.AttachCGroupUDP6Recvmsg},
	{programProgSendmsg4, ebpf.AttachCGroupUDP4Sendmsg},
	{programProgSendmsg6, ebpf.AttachCGroupUDP6Sendmsg},
	{programProgReleased, ebpf.AttachCgroupInetSockRelease},
}

// Programs are the programs and maps of one network namespace. Fronts to DelNode have one user at a
// time; Clients may work beside it.
type Programs struct {
	cfg    Config
	cookie uint64
	dir    string
	col    *ebpf.Collection
	maps   programMaps
	links  map[string]link.Link // nil until Attach
	home   *os.File             // the network namespace
	unable error
}

// Unable returns why connected sockets of UDP are left to the packet filter, or nil: they could not be ended.
func (p *Programs) Unable() error { return p.unable }

// Open loads the programs for the network namespace of the calling thread, with the maps that an earlier
// process pinned, if they have the same layout. Nothing is translated by them until Attach; what is attached
// already goes on.
func Open(cfg Config) (*Programs, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	if err := checkFS(cfg.FS, unix.BPF_FS_MAGIC, "a BPF file system (type 'mount -t bpf bpf "+cfg.FS+"', or mount the machine's into "+
		"the container)"); err != nil {
		return nil, err
	}
	cookie, err := Cookie()
	if err != nil {
		return nil, err
	}
	p := &Programs{cfg: cfg, cookie: cookie, dir: cfg.dir(cookie), unable: canEnd()}
	spec, err := loadProgram()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[programVarNodeNamespace].Set(cookie); err != nil {
		return nil, err
	}
	if p.unable == nil {
		if err := spec.Variables[programVarEndsSockets].Set(uint32(1)); err != nil {
			return nil, err
		}
	}
	adopted := p.adopt(spec)
	p.col, err = ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: adopted})
	for _, m := range adopted {
		_ = m.Close()
	}
	if err != nil {
		return nil, explain("load the programs of connect-time", err)
	}
	m := p.col.Maps
	p.maps = programMaps{
		Asks: m[programMapAsks], Clients: m[programMapClients], Fronts: m[programMapFronts], Nodes: m[programMapNodes],
		Own: m[programMapOwn], Members: m[programMapMembers], Peers: m[programMapPeers], Sends: m[programMapSends], Slots: m[programMapSlots],
		Sockets: m[programMapSockets], Streams: m[programMapStreams],
	}
	if p.home, err = os.Open(ownNamespace); err != nil {
		p.col.Close()
		return nil, fmt.Errorf("open the node's network namespace: %w", err)
	}
	return p, nil
}

// adopt opens the pinned maps. If one is missing or of another layout, all are made new: they belong together.
func (p *Programs) adopt(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	out := map[string]*ebpf.Map{}
	for _, name := range pinned {
		m, err := ebpf.LoadPinnedMap(filepath.Join(p.dir, name), nil)
		if err == nil {
			out[name] = m
			err = spec.Maps[name].Compatible(m)
		}
		if err != nil {
			for _, m := range out {
				_ = m.Close()
			}
			return nil
		}
	}
	return out
}

// Attach puts the programs in force, in place of an earlier process's, and pins them with their maps: they go on
// when this process ends. Other programs on the control group stay. A second call does nothing.
func (p *Programs) Attach() error {
	if p.links != nil {
		return nil
	}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return fmt.Errorf("cannot keep the programs of connect-time: %w", err)
	}
	var all steps
	links := map[string]link.Link{}
	for _, h := range hooks {
		l, step, err := p.attach(h.name, h.attach)
		if err != nil {
			return errors.Join(explain("attach "+h.name+" to "+p.cfg.Cgroup, err), all.back())
		}
		links[h.name] = l
		all = append(all, step)
	}
	if err := p.keepMaps(); err != nil {
		return errors.Join(err, all.back())
	}
	all.done()
	p.links = links
	_ = removeDead(p.cfg.FS, p.cookie) // they only cost time; the next Cleanup tries again, and reports
	return nil
}

// step is a hook that was attached. back puts into force what was there before, and closes the link; done lets go of it.
type step struct {
	back func() error
	done func()
}

// steps go back together: programs of two processes have different maps.
type steps []step

func (s steps) back() error {
	var errs []error
	for _, one := range slices.Backward(s) {
		errs = append(errs, one.back())
	}
	return errors.Join(errs...)
}

func (s steps) done() {
	for _, one := range s {
		one.done()
	}
}

// keepMaps pins the maps. Before others of an earlier process go, the sockets end that were noted there: programs that note
// sockets there are not attached any more.
func (p *Programs) keepMaps() error {
	if err := endPinned(p.dir, p.homePath(), p.maps.Sockets); err != nil {
		return err
	}
	for _, name := range pinned {
		if err := p.pin(name); err != nil {
			return fmt.Errorf("cannot keep map %s: %w", name, err)
		}
	}
	return nil
}

// endPinned ends all sockets that are noted in the map that is pinned in dir, if that is not kept. Nobody would end them when their
// endpoint leaves. In a map of another layout nothing can be read.
func endPinned(dir, home string, kept *ebpf.Map) error {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, programMapSockets), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return explain("read connected sockets", err)
	}
	defer func() { _ = m.Close() }()
	if kept != nil {
		if same, err := sameMap(m, kept); err != nil || same {
			return err
		}
	}
	spec, err := loadProgram()
	if err != nil {
		return err
	}
	if spec.Maps[programMapSockets].Compatible(m) != nil {
		return nil
	}
	_, err = endSockets(m, home, func(_, _ netip.AddrPort) bool { return false })
	return err
}

// pin keeps a map, in the place of another one.
func (p *Programs) pin(name string) error {
	path := filepath.Join(p.dir, name)
	m := p.col.Maps[name]
	if old, err := ebpf.LoadPinnedMap(path, nil); err == nil {
		same, err := sameMap(old, m)
		_ = old.Close()
		if err != nil || same {
			return err
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	clone, err := m.Clone() // a Map knows of one pin only
	if err != nil {
		return err
	}
	return errors.Join(clone.Pin(path), clone.Close())
}

func sameMap(a, b *ebpf.Map) (bool, error) {
	x, err := a.Info()
	if err != nil {
		return false, err
	}
	y, err := b.Info()
	if err != nil {
		return false, err
	}
	i, _ := x.ID()
	j, _ := y.ID()
	return i == j, nil
}

// attach updates the link of a program that is pinned for the same group, or makes a new one. A link to another group goes when the
// new one is there.
func (p *Programs) attach(name string, at ebpf.AttachType) (link.Link, step, error) {
	path, program := filepath.Join(p.dir, "link-"+name), p.col.Programs[name]
	group, err := os.Open(p.cfg.Cgroup)
	if err != nil {
		return nil, step{}, err
	}
	defer group.Close()
	old, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		old = nil
	}
	if old != nil && onGroup(old, group) {
		if one, ok := update(old, program); ok {
			return old, one, nil
		}
	}
	closeOld := func() {
		if old != nil {
			_ = old.Close()
		}
	}
	l, err := link.AttachRawLink(link.RawLinkOptions{Target: int(group.Fd()), Program: program, Attach: at})
	if err != nil {
		closeOld()
		return nil, step{}, err
	}
	back := func() error {
		err := errors.Join(gonePin(l.Unpin()), l.Detach(), l.Close())
		if old != nil {
			err = errors.Join(err, old.Pin(path), old.Close())
		}
		return err
	}
	if old != nil {
		err = old.Unpin()
	} else if err = os.Remove(path); errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		closeOld()
		return nil, step{}, errors.Join(err, l.Detach(), l.Close())
	}
	if err := l.Pin(path); err != nil {
		return nil, step{}, errors.Join(err, back())
	}
	return l, step{back, closeOld}, nil
}

// update replaces the program of a link in one step. The earlier one can be put back with the capability CAP_SYS_ADMIN only, by which the
// kernel gives it out.
func update(l link.Link, program *ebpf.Program) (step, bool) {
	was := programOf(l)
	closeWas := func() error {
		if was == nil {
			return nil
		}
		return was.Close()
	}
	if l.Update(program) != nil {
		_ = closeWas()
		return step{}, false
	}
	return step{
		back: func() error {
			if was == nil {
				return l.Close()
			}
			return errors.Join(l.Update(was), closeWas(), l.Close())
		},
		done: func() { _ = closeWas() },
	}, true
}

// gonePin is err, but nil for a pin that is not there.
func gonePin(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// programOf returns the program of a link, nil where that cannot be had.
func programOf(l link.Link) *ebpf.Program {
	info, err := l.Info()
	if err != nil {
		return nil
	}
	p, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return nil
	}
	return p
}

// onGroup reports whether a link is to the open group.
func onGroup(l link.Link, group *os.File) bool {
	var st unix.Stat_t
	info, err := l.Info()
	if err != nil || info.Cgroup() == nil || unix.Fstat(int(group.Fd()), &st) != nil {
		return false
	}
	return info.Cgroup().CgroupId == st.Ino
}

func closeLinks(links map[string]link.Link) {
	for _, l := range links {
		_ = l.Close()
	}
}

// Close releases what this process holds. What was attached goes on.
func (p *Programs) Close() error {
	closeLinks(p.links)
	p.col.Close()
	return p.home.Close()
}

var _ io.Closer = (*Programs)(nil)

// Present reports whether the calling thread's network namespace has programs, of this process or another one, as far as this process may
// look. bpffs is a BPF file system, "" for DefaultFS.
func Present(bpffs string) (bool, error) {
	dir, err := kept(bpffs)
	return dir != "", err
}

// kept returns the directory with the pins of the calling thread's network namespace, "" if there is none that this process may see.
func kept(bpffs string) (dir string, err error) {
	if bpffs == "" {
		bpffs = DefaultFS
	}
	if checkFS(bpffs, unix.BPF_FS_MAGIC, "") != nil {
		return "", nil
	}
	cookie, err := Cookie()
	if err != nil {
		return "", nil //nolint:nilerr // a kernel that is too old has none of our programs
	}
	cfg := Config{FS: bpffs}
	dir = cfg.dir(cookie)
	switch _, err := os.Lstat(dir); {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("cannot look for the programs of connect-time: %w", err)
	}
	return dir, nil
}

// Cleanup takes the programs of the calling thread's network namespace from their group, ends the connected sockets of UDP that
// they translated, and frees their maps. The same is done for network namespaces that are gone. Where there are no programs it does
// nothing. Nor does it where this process may not look: systemd mounts the BPF file system for root only, and a node without root has
// a network namespace that no program of root is for.
func Cleanup(bpffs string) error {
	dir, err := kept(bpffs)
	if dir == "" {
		return err
	}
	cookie, err := Cookie()
	if err != nil {
		return err
	}
	return errors.Join(cleanup(dir), removeDead(filepath.Dir(filepath.Dir(dir)), cookie))
}

// cleanup is Cleanup for the pins in dir.
func cleanup(dir string) error {
	for _, h := range hooks {
		if err := detach(filepath.Join(dir, "link-"+h.name)); err != nil {
			return err
		}
	}
	if err := endPinned(dir, ownNamespace, nil); err != nil {
		return err // the maps stay for the next try
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(dir)) // if no other namespace has anything there
	return nil
}

// initialPIDs is the inode of the machine's first PID namespace (PROC_PID_INIT_INO of the kernel).
const initialPIDs = 0xeffffffc

// removeDead removes the pins of network namespaces that are gone, such as a container's that has ended: their programs would run with
// each connection until the machine starts again. own is the cookie of the caller's. It does nothing where a namespace may be hidden.
func removeDead(bpffs string, own uint64) error {
	if pids, err := netns.Inode("/proc/self/ns/pid"); err != nil || pids != initialPIDs {
		return nil //nolint:nilerr // the processes of the machine are not seen
	}
	return removeMissing(bpffs, own, allNamespaces(ownNamespace))
}

func removeMissing(bpffs string, own uint64, in *namespaces) error {
	dirs, err := filepath.Glob(filepath.Join(bpffs, "fairlead", "connect-*"))
	if err != nil {
		return err
	}
	pinned, wanted := map[uint64]string{}, map[uint64]stale{}
	for _, dir := range dirs {
		cookie, err := strconv.ParseUint(strings.TrimPrefix(filepath.Base(dir), "connect-"), 10, 64)
		if err == nil && cookie != own {
			pinned[cookie], wanted[cookie] = dir, stale{}
		}
	}
	if len(pinned) == 0 {
		return nil
	}
	alive, err := in.each(wanted, func(uint64) error { return nil })
	if err != nil || in.barred {
		return err
	}
	var errs []error
	for cookie, dir := range pinned {
		if !alive[cookie] {
			errs = append(errs, cleanup(dir))
		}
	}
	return errors.Join(errs...)
}

// detach ends a pinned link at once: to remove only the pin would end it some time later.
func detach(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) { // bpf(2) would ask for CAP_BPF first
		return nil
	}
	l, err := link.LoadPinnedLink(path, nil)
	if err == nil {
		err = l.Detach()
		_ = l.Close()
	}
	if err != nil && !errors.Is(err, unix.EINVAL) { // that says its group is gone
		return explain("detach "+filepath.Base(path), err)
	}
	return os.Remove(path)
}

// Probe returns why the programs cannot work here, or nil. It loads them and attaches others, which do nothing, for a moment. It
// leaves nothing.
func Probe(cfg Config) error {
	p, err := Open(cfg)
	if err != nil {
		return err
	}
	return errors.Join(p.tryAttach(), p.Close())
}

// tryAttach attaches a program to each hook that lets everything pass, and takes it away.
func (p *Programs) tryAttach() error {
	group, err := os.Open(p.cfg.Cgroup)
	if err != nil {
		return err
	}
	defer group.Close()
	for _, h := range hooks {
		program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: p.col.Programs[h.name].Type(), AttachType: h.attach, License: "Apache-2.0",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
		})
		if err != nil {
			return explain("load a program for "+h.name, err)
		}
		l, err := link.AttachRawLink(link.RawLinkOptions{Target: int(group.Fd()), Program: program, Attach: h.attach})
		if err == nil {
			err = errors.Join(l.Detach(), l.Close())
		}
		if err = errors.Join(err, program.Close()); err != nil {
			return explain("attach "+h.name+" to "+p.cfg.Cgroup, err)
		}
	}
	return nil
}
