package iptables

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// What another program changes at the end of a Restore is not taken for what Restore has
// left: without notifications from the kernel it would stay until everything is compared.
func TestChangeBesideRestore(t *testing.T) {
	tool, err := New(Legacy, svc.IPv4)
	if err != nil {
		t.Fatal(err)
	}
	testbed.NewNetwork(t).Outside("host").Do(func() {
		w, err := NewWatch(Legacy, []string{"nat", "filter"}, func(string) bool { return true }, func() {})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		watched := w.Tool(tool)
		if watched.ownLock == nil {
			t.Skip("needs programs of iptables that take their lock file from XTABLES_LOCKFILE, as Debian's 1.8.9 do")
		}
		const ours = "*nat\n:MINE - [0:0]\n-A MINE -j RETURN\nCOMMIT\n*filter\n:MINE - [0:0]\n-A MINE -j RETURN\nCOMMIT\n"
		for i := range 50 {
			if err := watched.Restore(t.Context(), []byte(ours)); err != nil {
				t.Fatal(err)
			}
			list(t, watched.Tool, "nat")
			clear(watched.foreign)
			watched.learn("nat", "filter")
			flush := exec.CommandContext(t.Context(), "iptables-legacy", "-w", "30", "-t", "nat", "-F", "MINE")
			if err := flush.Start(); err != nil {
				t.Fatal(err)
			}
			if err := watched.Restore(t.Context(), []byte(ours)); err != nil {
				t.Fatal(err)
			}
			if err := flush.Wait(); err != nil {
				t.Fatal(err)
			}
			// Whichever was first: before Restore, or after it.
			if ok, err := w.Intact(); ok || err != nil {
				t.Fatalf("round %d: the change by another program was not found (%v)", i, err)
			}
		}
	})
}

// A change by another program counts until its own table has been read: not when another table is, and not when somebody beside the
// user of the Watch reads it.
func TestSaveOfAnotherTable(t *testing.T) {
	tool, err := New(Legacy, svc.IPv4)
	if err != nil {
		t.Fatal(err)
	}
	testbed.NewNetwork(t).Outside("host").Do(func() {
		w, err := NewWatch(Legacy, []string{"nat", "filter"}, func(string) bool { return true }, func() {})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		watched := w.Tool(tool)
		const ours = "*nat\n:MINE - [0:0]\n-A MINE -j RETURN\nCOMMIT\n*filter\n:MINE - [0:0]\n-A MINE -j RETURN\nCOMMIT\n"
		if err := watched.Restore(t.Context(), []byte(ours)); err != nil {
			t.Fatal(err)
		}
		save := func(from interface {
			Save(ctx context.Context, table string, chain func(name string), rule func(chain, line string)) error
		}, table string) {
			t.Helper()
			if err := from.Save(t.Context(), table, func(string) {}, func(string, string) {}); err != nil {
				t.Fatal(err)
			}
		}
		intact := func(what string, want bool) {
			t.Helper()
			if ok, err := w.Intact(); ok != want || err != nil {
				t.Errorf("%s: intact is %t, %v", what, ok, err)
			}
		}
		save(watched, "nat")
		save(watched, "filter")
		intact("read", true)
		flush := exec.CommandContext(t.Context(), "iptables-legacy", "-w", "30", "-t", "filter", "-F", "MINE")
		if out, err := flush.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		intact("changed", false)
		nat, _, _ := strings.Cut(ours, "*filter")
		if err := watched.Restore(t.Context(), []byte(nat)); err != nil { // from now on only the mark has the change
			t.Fatal(err)
		}
		intact("written since", false)
		save(watched, "nat")
		intact("another table was read", false)
		save(watched.Unwatched(), "filter")
		intact("read by somebody else", false)
		save(watched, "filter")
		intact("read", true)
	})
}
