package sysctl_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/sysctl"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// values are all parameters of IP in this network namespace that may be written.
func values(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir("/proc/sys/net", func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !sysctl.Writable(strings.TrimPrefix(path, "/proc/sys/")) {
			return nil
		}
		if text, err := os.ReadFile(path); err == nil {
			out[path] = string(text)
		}
		return nil
	})
	if err != nil || len(out) < 50 {
		t.Fatalf("%d parameters, %v", len(out), err)
	}
	return out
}

// What was set comes back, with what the kernel has changed beside it; what another
// program has changed since stays, and so does what no Set has changed.
func TestRestore(t *testing.T) {
	const forward, redirects, localnet = "net/ipv4/ip_forward", "net/ipv4/conf/all/accept_redirects", "net/ipv4/conf/all/route_localnet"
	before := values(t)
	for _, value := range []string{"1", "0", "1"} { // the first of all records counts
		if err := sysctl.Set(forward, value, redirects, "net/ipv4/conf/all/forwarding", "net/ipv4/conf/default/forwarding",
			"net/ipv4/conf/lo/forwarding"); err != nil {
			t.Fatal(err)
		}
	}
	if err := sysctl.Set(localnet, "1"); err != nil {
		t.Fatal(err)
	}
	const foreign, refused = "net/ipv4/conf/all/arp_ignore", "net/ipv4/conf/all/arp_announce"
	if err := sysctl.Set(foreign, "1"); err != nil {
		t.Fatal(err)
	}
	if err := sysctl.Write(foreign, "2"); err != nil { // an administrator
		t.Fatal(err)
	}
	if err := sysctl.Set(refused, "nonsense"); err == nil {
		t.Fatalf("%s took nonsense", refused)
	}
	records, err := filepath.Glob("/run/fairlead/sysctl/*/*" + filepath.Base(refused))
	if err != nil || len(records) != 1 {
		t.Fatalf("%q, %v: want the record before the change", records, err)
	}
	if err := os.Truncate(records[0], 10); err != nil { // as an earlier build left it that was killed
		t.Fatal(err)
	}
	for range 2 {
		if err := sysctl.Restore(); err != nil {
			t.Fatal(err)
		}
	}
	if got := sysctl.Value(foreign); got != "2" {
		t.Errorf("%s is %s: what another program has set must stay", foreign, got)
	}
	if err := sysctl.Write(foreign, "0"); err != nil {
		t.Fatal(err)
	}
	after := values(t)
	for file, value := range before {
		if after[file] != value {
			t.Errorf("%s is %q, was %q", file, after[file], value)
		}
	}
	if _, err := os.Stat("/run/fairlead"); !os.IsNotExist(err) {
		t.Errorf("records are left: %v", err)
	}
}

// One parameter comes back alone, unless another program has changed it since.
func TestRestoreOne(t *testing.T) {
	const one, other = "net/ipv4/conf/all/route_localnet", "net/ipv4/conf/all/arp_ignore"
	for key, value := range map[string]string{one: "1", other: "1"} {
		if err := sysctl.Set(key, value); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := sysctl.RestoreOne(one); err != nil || sysctl.Value(one) != "0" || sysctl.Value(other) != "1" {
			t.Errorf("%v; %s is %s, %s is %s", err, one, sysctl.Value(one), other, sysctl.Value(other))
		}
		if err := sysctl.Write(one, "0"); err != nil {
			t.Fatal(err)
		}
	}
	if err := sysctl.Write(other, "2"); err != nil {
		t.Fatal(err)
	}
	if err := sysctl.RestoreOne(other); err != nil || sysctl.Value(other) != "2" {
		t.Errorf("%v; %s is %s: what another program has set must stay", err, other, sysctl.Value(other))
	}
	if err := sysctl.Write(other, "0"); err != nil {
		t.Fatal(err)
	}
}
