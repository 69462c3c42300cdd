package iptables

import (
	"os/exec"
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
			watched.foreign = false
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
