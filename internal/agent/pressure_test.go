package agent

import (
	"errors"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// The thresholds are a kubelet's, but 1 GiB of a large disk; a condition stays for five minutes after the last sign.
func TestPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		text, failed := "MemTotal: 1000000 kB\nMemAvailable: 102400 kB\n", error(nil)
		space := fileio.Space{Total: 1000, Free: 100, Inodes: 1000, FreeInodes: 50}
		root := fstest.MapFS{"proc/meminfo": &fstest.MapFile{}}
		conditions := Pressure(root, func() (fileio.Space, error) { return space, failed })
		check := func(what string, memory, disk corev1.ConditionStatus) {
			t.Helper()
			root["proc/meminfo"].Data = []byte(text)
			for i, want := range []corev1.ConditionStatus{memory, disk} {
				if c := conditions[i](); c.Status != want || c.Reason == "" || c.Message == "" {
					t.Errorf("%s: %+v, want %s", what, c, want)
				}
			}
		}
		const no, yes, unknown = corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown
		check("at the thresholds", no, no)
		text = "MemAvailable: 102399 kB\n"
		check("memory", yes, no)
		text, space.Free = "MemAvailable: 9999999 kB\n", 99
		check("disk, memory a moment ago", yes, yes)
		space.Free = 1000
		time.Sleep(pressureLasts - time.Second)
		check("both shortly before", yes, yes)
		time.Sleep(time.Second)
		check("both over", no, no)
		space.FreeInodes = 49
		check("inodes", no, yes)
		space = fileio.Space{Total: 1 << 40, Free: 1 << 30}
		time.Sleep(pressureLasts)
		check("a large disk at its threshold", no, no)
		space.Free--
		check("a large disk", no, yes)
		text, failed = "", errors.New("no disk")
		check("cannot be read", unknown, unknown)
	})
}

// A file system without a number of inodes (btrfs) is never low on them.
func TestNoInodes(t *testing.T) {
	why, err := lowDisk(func() (fileio.Space, error) { return fileio.Space{Total: 1000, Free: 1000}, nil })
	if why != "" || err != nil {
		t.Errorf("%q, %v", why, err)
	}
}
