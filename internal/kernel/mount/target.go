package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// places makes the targets of binds that do not exist, and nothing on the machine: only in
// what is the process's own, or in a cover.
type places struct {
	confined bool
	// own are the mounts in which a place is simply made, by their IDs; true for a bind.
	own    map[int]bool
	covers []cover
}

// cover is a file system in memory that lies over a directory of the machine and shows what
// the directory had.
type cover struct {
	root     *os.File
	readOnly bool // once all places are made
}

// newPlaces begins with dirs, file systems in memory that the process has already.
func newPlaces(confined bool, dirs []string) (*places, error) {
	p := &places{confined: confined, own: map[int]bool{}}
	for _, dir := range dirs {
		f, err := os.OpenFile(dir, unix.O_PATH, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the machine has no /var/tmp
		}
		if err == nil {
			err = p.add(f, false)
			_ = f.Close()
		}
		if err != nil {
			return nil, err
		}
	}
	return p, nil
}

// add makes the mount of f the process's own.
func (p *places) add(f *os.File, bind bool) error {
	id, err := mountID(f)
	if err == nil {
		p.own[id] = bind
	}
	return err
}

// settle ends the making of places: covers are as writable as what they cover.
func (p *places) settle() error {
	for _, c := range p.covers {
		if !c.readOnly {
			continue
		}
		fd := int(c.root.Fd())
		err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
		if errors.Is(err, unix.ENOSYS) { // before Linux 5.12
			const flags = unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
			err = unix.Mount("", fdPath(c.root), "", flags, "")
		}
		if err != nil {
			return fmt.Errorf("make a cover of %s read-only: %w", c.root.Name(), err)
		}
	}
	return nil
}

func (p *places) close() {
	for _, c := range p.covers {
		_ = c.root.Close()
	}
}

// prepare makes the target of b if it does not exist and b asks for that.
func (p *places) prepare(b source) error {
	if _, err := os.Stat(b.Target); !errors.Is(err, fs.ErrNotExist) {
		return nil // whoever mounts there reports other errors
	}
	switch {
	case b.Make && !p.confined:
		err := os.MkdirAll(b.Target, 0o755)
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) {
			err = p.make(b.Target, false)
		}
		return err
	case b.Make:
		return p.make(b.Target, false)
	case b.MakeFile:
		return p.make(b.Target, true)
	case b.Place:
		var st unix.Stat_t
		if err := unix.Fstat(int(b.file.Fd()), &st); err != nil {
			return err
		}
		return p.make(b.Target, st.Mode&unix.S_IFMT != unix.S_IFDIR)
	case b.Optional && p.confined:
		// /etc/resolv.conf is a link to /run on many machines, which is the process's own by now.
		if _, err := os.Readlink(b.Target); err == nil {
			return p.make(b.Target, true)
		}
	}
	return nil
}

// make makes target, a directory or a file, and the directories above it.
func (p *places) make(target string, file bool) error {
	dir, missing, err := nearest(target)
	if err != nil {
		return err
	}
	defer dir.Close()
	if len(missing) == 0 {
		return nil
	}
	in, err := p.writable(dir)
	if err != nil {
		return err
	}
	return makeBelow(in, missing, file)
}

// maxLinks bounds the links to nothing that lead to one place, as the kernel bounds others.
const maxLinks = 40

// nearest opens the deepest directory above target that exists, and returns the names that
// are missing below it. No link of /proc is followed on the way: a volume of the Pod may have
// links, and /proc/1/root leads past the confinement.
func nearest(target string) (dir *os.File, missing []string, err error) {
	at := filepath.Clean(target)
	for links := 0; ; {
		fd, err := openPlace(at)
		if err == nil {
			slices.Reverse(missing)
			return os.NewFile(uintptr(fd), at), missing, nil
		}
		if !errors.Is(err, unix.ENOENT) || at == "/" {
			return nil, nil, &fs.PathError{Op: "open", Path: at, Err: err}
		}
		if to, err := os.Readlink(at); err == nil { // it leads to nothing yet
			if links++; links > maxLinks {
				return nil, nil, &fs.PathError{Op: "open", Path: at, Err: unix.ELOOP}
			}
			if !filepath.IsAbs(to) {
				to = filepath.Join(filepath.Dir(at), to)
			}
			at = filepath.Clean(to)
			continue
		}
		missing, at = append(missing, filepath.Base(at)), filepath.Dir(at)
	}
}

func openPlace(path string) (int, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &how)
	if errors.Is(err, unix.ENOSYS) { // before Linux 5.6, where nothing is confined
		fd, err = unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	}
	return fd, err
}

// writable returns dir, if it is the process's own, or a cover of it.
func (p *places) writable(dir *os.File) (*os.File, error) {
	id, err := mountID(dir)
	if err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return nil, &fs.PathError{Op: "statfs", Path: dir.Name(), Err: err}
	}
	readOnly := st.Flags&unix.ST_RDONLY != 0
	bind, own := p.own[id]
	switch {
	case own && !readOnly:
		return dir, nil
	case own && bind:
		return nil, fmt.Errorf("%s is in a volume that is mounted read-only: make the place in the volume first: %w", dir.Name(), unix.EROFS)
	}
	return p.cover(dir, st)
}

// makeBelow makes the file or directory that names lead to, below dir.
func makeBelow(dir *os.File, names []string, file bool) error {
	last := len(names) - 1
	for i, name := range names {
		var next int
		var err error
		if i == last && file {
			next, err = unix.Openat(int(dir.Fd()), name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
			if errors.Is(err, unix.EEXIST) {
				return nil
			}
		} else {
			made := unix.Mkdirat(int(dir.Fd()), name, 0o755)
			if err = made; err == nil || errors.Is(err, unix.EEXIST) {
				next, err = unix.Openat(int(dir.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			}
			if err == nil && made == nil { // whatever the umask is
				err = os.Chmod(fmt.Sprintf("/proc/self/fd/%d", next), 0o755)
			}
		}
		if err != nil {
			return &fs.PathError{Op: "make", Path: filepath.Join(dir.Name(), name), Err: err}
		}
		dir = os.NewFile(uintptr(next), filepath.Join(dir.Name(), name))
		defer dir.Close()
	}
	return nil
}

// maxEntries bounds the mounts of a cover.
const maxEntries = 20000

// fixed are file systems of the kernel, which are not covered.
var fixed = []int64{unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEVPTS_SUPER_MAGIC}

// cover lays an empty file system over the directory under and shows in it what under had:
// mounts over it, too, so that what is hidden stays hidden. What others make in under later
// does not appear. A cover of / becomes the root of the calling thread, and with it of what
// it starts; whoever enters the namespace later begins there, too.
func (p *places) cover(under *os.File, st unix.Statfs_t) (*os.File, error) {
	if slices.Contains(fixed, int64(st.Type)) {
		return nil, fmt.Errorf("%s is of the kernel: choose another place", under.Name())
	}
	at, err := os.Readlink(fdPath(under))
	if err != nil {
		return nil, err
	}
	list, err := os.Open(fdPath(under))
	if err != nil {
		return nil, err
	}
	entries, err := list.ReadDir(-1)
	_ = list.Close()
	if err != nil {
		return nil, err
	}
	if len(entries) > maxEntries {
		return nil, fmt.Errorf("%s has %d entries, and at most %d can be shown beside a new one: make the place on the machine first", at,
			len(entries), maxEntries)
	}
	readOnly := st.Flags&unix.ST_RDONLY != 0
	over, err := memory(under, st, readOnly)
	if err != nil {
		return nil, fmt.Errorf("cover %s: %w", at, err)
	}
	p.covers = append(p.covers, cover{over, readOnly})
	if err := p.add(over, false); err != nil {
		return nil, err
	}
	err = unix.MoveMount(int(over.Fd()), "", int(under.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("cover %s: %w", at, err)
	}
	for _, e := range entries {
		err := show(int(under.Fd()), int(over.Fd()), e)
		// What cannot be shown is left out: it could not be used either.
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) && !errors.Is(err, unix.EINVAL) {
			return nil, fmt.Errorf("cover %s: show %s: %w", at, e.Name(), err)
		}
	}
	if at != "/" {
		return over, nil
	}
	if err := errors.Join(unix.Fchdir(int(over.Fd())), unix.Chroot(".")); err != nil {
		return nil, fmt.Errorf("change to a cover of /: %w", err)
	}
	return over, nil
}

// memory makes a file system in memory with owner, mode and restrictions of the directory
// under, which is mounted nowhere yet. It needs Linux 5.2.
func memory(under *os.File, how unix.Statfs_t, readOnly bool) (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(under.Fd()), &st); err != nil {
		return nil, err
	}
	fd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a file system in memory: %w; Linux 5.2 is needed", err)
	}
	defer unix.Close(fd)
	options := map[string]string{"size": scratch, "mode": strconv.FormatUint(uint64(st.Mode&0o7777), 8)}
	if readOnly {
		options["size"] = "1m"
	}
	for _, k := range slices.Sorted(maps.Keys(options)) {
		if err := unix.FsconfigSetString(fd, k, options[k]); err != nil {
			return nil, err
		}
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return nil, err
	}
	attributes := unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	if how.Flags&unix.ST_NOEXEC != 0 {
		attributes |= unix.MOUNT_ATTR_NOEXEC
	}
	mounted, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return nil, err
	}
	// An owner from outside of the user namespace cannot be set.
	_ = unix.Fchownat(mounted, "", int(st.Uid), int(st.Gid), unix.AT_EMPTY_PATH)
	return os.NewFile(uintptr(mounted), under.Name()), nil
}

// show makes an entry of the directory under appear in the directory over.
func show(under, over int, e fs.DirEntry) error {
	name := e.Name()
	if e.Type()&fs.ModeSymlink != 0 {
		link := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(under, name, link)
		if err != nil {
			return err
		}
		return unix.Symlinkat(string(link[:n]), over, name)
	}
	const flags = unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_RECURSIVE | unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	tree, err := unix.OpenTree(under, name, flags)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	if e.IsDir() {
		err = unix.Mkdirat(over, name, 0o755)
	} else {
		err = unix.Mknodat(over, name, unix.S_IFREG|0o644, 0)
	}
	if err != nil {
		return err
	}
	return unix.MoveMount(tree, "", over, name, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// mountID is the identity of the mount that f is in, which only one mount has at a time.
func mountID(f *os.File) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if id, found := strings.CutPrefix(line, "mnt_id:"); found {
			return strconv.Atoi(strings.TrimSpace(id))
		}
	}
	return 0, fmt.Errorf("the kernel does not tell which mount %s is in", f.Name())
}
