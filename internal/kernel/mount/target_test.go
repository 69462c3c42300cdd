package mount

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Error(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// A mount path that the machine lacks exists only for the process. The other entries of its directory stay
// as they were: writable or not, and hidden or not, for the process and for others that enter its namespace.
func TestPlaces(t *testing.T) {
	dir := t.TempDir()
	err := errors.Join(os.WriteFile(dir+"/file", []byte("content"), 0o644), os.Mkdir("/run/nosuch", 0o700), os.Remove("/run/nosuch"))
	if err != nil {
		t.Fatal(err)
	}
	const top = "/place-of-a-test"
	parents := []string{"/", "/usr/share", "/var/log"}
	made := []string{top, "/usr/share/place-of-a-test", "/var/log/place-of-a-test", "/place-file-of-a-test"}
	before := map[string][]string{}
	for _, p := range parents {
		before[p] = names(t, p)
	}
	for name, w := range map[string]*Confinement{
		"plain": nil, "read-only": {ReadOnly: true}, "confined": {Confined: true}, "confined, read-only": {Confined: true, ReadOnly: true},
	} {
		t.Run(name, func(t *testing.T) {
			volume := t.TempDir()
			binds := []Bind{
				{Source: volume, Target: top + "/data", Place: true},
				{Source: dir, Target: made[1] + "/x/y", Place: true, ReadOnly: true},
				{Source: dir, Target: made[2], Place: true},
				{Source: dir + "/file", Target: made[3], Place: true},
				{Source: dir, Target: top + "/data/inner/place", Place: true},
			}
			err := Confine(w, binds, func(ns *os.File) error {
				look := func() {
					for _, file := range []string{made[1] + "/x/y/file", made[2] + "/file", made[3], top + "/data/inner/place/file"} {
						if b, err := os.ReadFile(file); err != nil || string(b) != "content" {
							t.Errorf("%s: %q, %v", file, b, err)
						}
					}
				}
				look()
				if err := Enter(ns, func() error {
					look()
					return nil
				}); err != nil {
					t.Error(err)
				}
				checkPlaces(t, w, before)
				if err := os.WriteFile(top+"/data/mine", nil, 0o600); err != nil {
					t.Errorf("the volume: %v", err)
				}
				for _, path := range []string{"/mine-of-a-test", "/usr/share/mine-of-a-test", made[1] + "/mine", made[1] + "/x/y/mine"} {
					readOnly := w != nil || path == made[1]+"/x/y/mine"
					if err := os.WriteFile(path, nil, 0o600); readOnly != errors.Is(err, unix.EROFS) || !readOnly && err != nil {
						t.Errorf("write %s: %v", path, err)
					}
				}
				// What it starts has the same root, and may make a user namespace.
				cmd := exec.Command("/bin/ls", top+"/data")
				cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER}
				out, err := cmd.CombinedOutput()
				if want := "inner\nmine\n"; err != nil || string(out) != want {
					t.Errorf("%q, %v; want %q", out, err, want)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if st, err := os.Stat(volume + "/inner/place"); err != nil || !st.IsDir() {
				t.Errorf("the place in the own volume: %v", err)
			}
			for _, path := range append(slices.Clone(made), "/mine-of-a-test", "/usr/share/mine-of-a-test") {
				if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s is on the machine: %v", path, err)
				}
			}
		})
	}
}

// checkPlaces compares directories with what they had before.
func checkPlaces(t *testing.T, w *Confinement, before map[string][]string) {
	t.Helper()
	for dir, had := range before {
		now := slices.DeleteFunc(names(t, dir), func(name string) bool { return strings.HasSuffix(name, "-of-a-test") })
		if dir == "/var/log" && w != nil && w.Confined {
			had = nil
		}
		if !slices.Equal(now, had) {
			t.Errorf("%s has %q, before %q", dir, now, had)
		}
		for _, name := range now {
			if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
				t.Error(err)
			}
		}
	}
	if w == nil || !w.Confined {
		return
	}
	for _, dir := range []string{"/root", "/home", "/boot"} {
		if st, err := os.Stat(dir); err == nil && st.IsDir() && len(names(t, dir)) > 0 {
			t.Errorf("%s is not hidden", dir)
		}
	}
	if err := os.WriteFile("/etc/mine-of-a-test", nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("written to /etc: %v", err)
	}
}

// A cover has mode and owner of what it covers, and links stay links.
func TestCoverIsAlike(t *testing.T) {
	if err := unix.Mount("tmpfs", "/srv", "tmpfs", unix.MS_NOEXEC, "mode=755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/srv", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(os.Symlink("/nowhere", "/srv/link"), os.WriteFile("/srv/file", nil, 0o640), os.Mkdir("/srv/dir", 0o711),
		os.Chmod("/srv", os.ModeSticky|0o731)); err != nil {
		t.Fatal(err)
	}
	want := map[string]os.FileInfo{}
	for _, path := range []string{"/srv", "/srv/link", "/srv/file", "/srv/dir"} {
		st, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		want[path] = st
	}
	for _, confined := range []bool{false, true} {
		err := Confine(&Confinement{Confined: confined}, []Bind{{Source: t.TempDir(), Target: "/srv/a/b", Place: true}}, func(*os.File) error {
			for path, w := range want {
				if st, err := os.Lstat(path); err != nil || st.Mode() != w.Mode() || path != "/srv" && path != "/srv/link" && !os.SameFile(st, w) {
					t.Errorf("%s: %v, %v; want %v", path, st, err, w.Mode())
				}
			}
			if to, err := os.Readlink("/srv/link"); to != "/nowhere" {
				t.Errorf("the link leads to %q, %v", to, err)
			}
			var st unix.Statfs_t
			if err := unix.Statfs("/srv", &st); err != nil || st.Flags&unix.ST_NOEXEC == 0 || st.Flags&unix.ST_NOSUID == 0 {
				t.Errorf("flags %x, %v", st.Flags, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	if got := names(t, "/srv"); !slices.Equal(got, []string{"dir", "file", "link"}) {
		t.Errorf("/srv of the machine has %q", got)
	}
}

// No place is made by way of a link of /proc, in the kernel's file systems, or in a volume
// that is read-only; a link to nothing is followed.
func TestPlacesLeadNowhere(t *testing.T) {
	volume, other, outside := t.TempDir(), t.TempDir(), t.TempDir()
	if err := errors.Join(os.Symlink("/proc/self/root", volume+"/self"),
		os.Symlink("/no-place-of-a-test/x", volume+"/dangling")); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		target, want string
		readOnly     bool
	}{
		{"/opt/self" + outside + "/made", "too many levels of symbolic links", false},
		{"/proc/made", "is of the kernel", false},
		{"/sys/made/here", "is of the kernel", false},
		{"/opt/made/there", "make the place in the volume first", true},
		{"/opt/dangling/y", "", false},
	} {
		for _, confined := range []bool{false, true} {
			binds := []Bind{{Source: volume, Target: "/opt", ReadOnly: c.readOnly}, {Source: other, Target: c.target, Place: true}}
			err := Confine(&Confinement{Confined: confined}, binds, func(*os.File) error { return nil })
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%s, confined %v: %v, want %q", c.target, confined, err, c.want)
			}
		}
	}
	if got := names(t, outside); len(got) > 0 {
		t.Errorf("made outside: %q", got)
	}
	if got := names(t, volume); !slices.Equal(got, []string{"dangling", "self"}) {
		t.Errorf("made in the volume: %q", got)
	}
	if _, err := os.Lstat("/no-place-of-a-test"); err == nil {
		t.Error("the target of a link is on the machine")
	}
}
