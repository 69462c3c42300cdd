package uml

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// Mode iptables works on a kernel without ipset, and on one that has it but not
// its match and target for iptables. It says so, and counts nothing.
func TestIptablesWithoutSets(t *testing.T) {
	const match = "*xt_set* | *ipt_set* | *ipt_SET* | *ip6t_set* | *ip6t_SET*"
	for _, name := range []string{"ipset", "xt_set"} {
		t.Run(name, func(t *testing.T) {
			if name == "ipset" {
				without(t, match+" | *ip_set* | *subsys-6*")
			} else {
				without(t, match)
			}
			var log bytes.Buffer
			e := flows.NewEnv(t, func(t testing.TB, _ *testbed.Host) dataplane.Applier {
				t.Helper()
				p, err := iptables.New(iptables.Config{Variant: iptables.Legacy, Log: slog.New(slog.NewTextHandler(&log, nil))})
				if err != nil {
					t.Fatal(err)
				}
				return p
			})
			for _, r := range []flows.Row{
				{Services: []flows.Service{{Name: "web", Fronts: []flows.Front{{To: "a"}}}}, From: "c", To: "cluster", Want: flows.Want{Reach: "a"}},
				{Services: []flows.Service{{Name: "web", Fronts: []flows.Front{{}}}}, From: "c", To: "cluster", Want: flows.Want{Refused: true}},
				{Services: []flows.Service{{Name: "web", Fronts: []flows.Front{{Drop: true}}}}, From: "c", To: "cluster",
					Want: flows.Want{Dropped: true}},
			} {
				e.Apply(t, e.Table(svc.IPv4, svc.TCP, &r), nil)
				e.Forget(t)
				e.Check(t, svc.IPv4, svc.TCP, &r)
			}
			for _, m := range []string{"xt_set", "ip_set"} {
				if _, err := os.Stat("/sys/module/" + m); (err == nil) != (m == "ip_set" && name == "xt_set") {
					t.Errorf("the kernel's module %s: %v", m, err)
				}
			}
			if n := strings.Count(log.String(), "not counted by Service"); n != 1 {
				t.Errorf("told %d times that nothing is counted: %s", n, log.String())
			}
			t.Log(log.String())
			if counts, err := e.Dataplane.(dataplane.Counter).Drops(t.Context()); len(counts) > 0 || err != nil {
				t.Errorf("Lost = %v, %v, want nothing", counts, err)
			}
		})
	}
}

// without takes modules from the guest's kernel, and keeps it from loading those
// whose names match a pattern of the shell, until the test ends.
func without(t *testing.T, pattern string) {
	t.Helper()
	for _, m := range []string{"xt_set", "ip_set_hash_ipport", "ip_set"} {
		// Namespaces of tests before this one take some time to go.
		for deadline := time.Now().Add(30 * time.Second); ; <-time.After(10 * time.Millisecond) {
			if _, err := os.Stat("/sys/module/" + m); err != nil {
				break
			}
			out, err := exec.CommandContext(t.Context(), modprobe, "-r", m).CombinedOutput()
			if err != nil && time.Now().After(deadline) {
				t.Fatalf("unload %s: %v: %s", m, err, out)
			}
		}
	}
	script := filepath.Join(t.TempDir(), "modprobe")
	text := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in %s) exit 1;; esac\nexec %s \"$@\"\n", pattern, modprobe)
	if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	set := func(path string) {
		if err := os.WriteFile("/proc/sys/kernel/modprobe", []byte(path), 0); err != nil {
			t.Fatal(err)
		}
	}
	set(script)
	t.Cleanup(func() { set(modprobe) })
}
