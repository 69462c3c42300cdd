package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/apiserver/store"
)

// 'fairlead server remove --wipe' deletes the data of the named server of this machine, once it was removed and does not run,
// and no other.
func TestServerRemoveWipe(t *testing.T) {
	lone := t.TempDir()
	apiservertest.StartServer(t, func(o *apiserver.Options) { o.DataDir = lone })
	dir := t.TempDir()
	d, err := store.OpenDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	if _, err := pki.Open(d.File("pki"), time.Now); err != nil {
		t.Fatal(err)
	}
	state := members.State{Name: "server3", Peer: "https://192.0.2.13:2380"}
	if err := os.MkdirAll(d.File("agent"), 0o700); err != nil {
		t.Fatal(err)
	}
	kept := func() bool {
		_, err := os.Stat(d.File("pki/ca.key"))
		return err == nil
	}
	fails := func(want string, args ...string) {
		t.Helper()
		code, out, errs := fairlead(t, append([]string{"server", "remove"}, args...)...)
		if code != exitFailed || !strings.Contains(errs, want) || !kept() {
			t.Errorf("%q: exit %d, keys kept: %v; want %q\n%s%s", args, code, kept(), want, out, errs)
		}
	}
	fails("has no server of several; run it on the machine of server3: fairlead server remove server3 --wipe",
		"server3", "--wipe", "--data-dir", dir)
	if err := state.Save(d.File("etcd")); err != nil {
		t.Fatal(err)
	}
	fails("is that of server3; run it on the machine of server2", "server2", "--wipe", "--data-dir", dir)
	admin := filepath.Join(lone, "admin.kubeconfig")
	fails("has another authority than", "server3", "--wipe", "--data-dir", dir, "--kubeconfig", admin)

	state.Removed = true
	if err := state.Save(d.File("etcd")); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(time.Second, func() { d.Close() }) // the server ends a moment later
	code, out, errs := fairlead(t, "server", "remove", "192.0.2.13:2380", "--wipe", "--data-dir", dir)
	if code != exitDone || !strings.Contains(out, "are deleted") || !strings.Contains(errs, "fairlead certs rotate-ca") {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != "agent" {
		t.Errorf("left are %v, %v", left, err)
	}
}
