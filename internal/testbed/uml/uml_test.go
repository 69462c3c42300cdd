package uml

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { Main(m) }

// The tests run in the guest, as root, and it has what the machine may lack.
func TestGuest(t *testing.T) {
	version, err := os.ReadFile("/proc/version")
	if err != nil {
		t.Fatal(err)
	}
	cpu, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(cpu), "User Mode Linux") || os.Getuid() != 0 {
		t.Errorf("uid %d on %s, want root in User Mode Linux", os.Getuid(), version)
	}
	if !testbed.HasSCTP() {
		t.Error("no SCTP sockets: modules are not loaded when they are needed")
	}
	if err := os.WriteFile("/fairlead-uml-test", nil, 0o600); err == nil {
		t.Error("the machine's own file system can be written")
	}
	dir := t.TempDir()
	if !strings.HasPrefix(dir, "/tmp/") {
		t.Errorf("temporary directory %s", dir)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Errorf("temporary files are on a file system of type %#x (%v), want one of the guest", fs.Type, err)
	}
}

func TestFlagsThatStay(t *testing.T) {
	for args, want := range map[string]bool{
		"-test.v -test.run=X": false, "-test.fuzz=FuzzX": true, "-test.fuzz=": false, "-test.list=.": true, "": false,
	} {
		if got := stays(strings.Fields(args)); got != want {
			t.Errorf("stays(%q) = %v", args, got)
		}
	}
}
