package mount

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// Whoever can write to a volume exchanges a directory in it with a link to the machine's,
// without pause, while that directory is mounted: what is mounted is of the volume.
func TestSourceStaysWithin(t *testing.T) {
	dir := t.TempDir()
	volume, outside, at := filepath.Join(dir, "volume"), filepath.Join(dir, "outside"), filepath.Join(dir, "at")
	if err := errors.Join(
		os.MkdirAll(volume+"/sub/inner", 0o755), os.Mkdir(volume+"/real", 0o755), os.MkdirAll(outside+"/inner", 0o755), os.Mkdir(at, 0o755),
		os.WriteFile(outside+"/inner/key", nil, 0o600), os.Symlink(outside, volume+"/other"),
		os.Symlink("real", volume+"/link"),
	); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	swapped := make(chan error, 1)
	go func() {
		n := 0
		for ; !stop.Load(); n++ {
			if err := unix.Renameat2(unix.AT_FDCWD, volume+"/sub", unix.AT_FDCWD, volume+"/other", unix.RENAME_EXCHANGE); err != nil {
				swapped <- err
				return
			}
		}
		swapped <- nil
	}()
	mounted, refused := 0, 0
	for deadline := time.Now().Add(testbed.Patience); (mounted < 20 || refused < 20) && time.Now().Before(deadline); {
		err := Confine(nil, []Bind{{Source: volume + "/sub/inner", Within: volume, Target: at}}, func(*os.File) error {
			if _, err := os.Stat(at + "/key"); err == nil {
				t.Error("the machine's directory is mounted")
			}
			return nil
		})
		switch {
		case err == nil:
			mounted++
		case strings.Contains(err.Error(), "leads out of the volume"):
			refused++
		default:
			t.Fatal(err)
		}
		if t.Failed() {
			break
		}
	}
	stop.Store(true)
	if err := <-swapped; err != nil {
		t.Fatal(err)
	}
	t.Logf("%d mounted, %d refused", mounted, refused)
	if !t.Failed() && (mounted < 20 || refused < 20) {
		t.Error("the race was not seen")
	}
	// A link that stays within is one.
	if err := Confine(nil, []Bind{{Source: volume + "/link", Within: volume, Target: at}}, func(*os.File) error { return nil }); err != nil {
		t.Error(err)
	}
}

// A kernel without openat2 mounts nothing.
func TestSourceNeedsOpenat2(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(dir+"/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	answer := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the filter ends with the thread
		if err := without(unix.SYS_OPENAT2); err != nil {
			answer <- err
			return
		}
		_, err := Bind{Source: dir + "/sub", Within: dir}.open()
		answer <- err
	}()
	if err := <-answer; !errors.Is(err, unix.ENOSYS) || !strings.Contains(err.Error(), "Linux 5.6 is needed") {
		t.Error(err)
	}
}

// without makes a system call one that the kernel does not have, for this thread.
func without(call uint32) error {
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
}

// What is mounted on the machine while a confined process runs does not arrive at it; at
// others it does.
func TestLaterMounts(t *testing.T) {
	if err := unix.Mount("tmpfs", "/srv", "tmpfs", 0, "mode=755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/srv", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	// As systemd makes all mounts of a machine.
	if err := errors.Join(unix.Mount("", "/srv", "", unix.MS_SHARED, ""), os.Mkdir("/srv/disk", 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, confined := range []bool{true, false} {
		err := Confine(&Confinement{Confined: confined}, nil, func(*os.File) error {
			later := make(chan error)
			go func() { // on a thread of the machine
				err := unix.Mount("tmpfs", "/srv/disk", "tmpfs", 0, "")
				later <- errors.Join(err, os.WriteFile("/srv/disk/file", nil, 0o600))
			}()
			if err := <-later; err != nil {
				return err
			}
			if _, err := os.Stat("/srv/disk/file"); (err == nil) == confined {
				t.Errorf("confined %v: a file of the new disk: %v", confined, err)
			}
			if err := os.WriteFile("/srv/disk/made", nil, 0o600); confined && !errors.Is(err, unix.EROFS) {
				t.Errorf("written to the machine: %v", err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Unmount("/srv/disk", unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
}
