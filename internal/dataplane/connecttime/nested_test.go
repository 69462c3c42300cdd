package connecttime

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// kubelets are the control groups of containers below the one that the programs are attached to, as a kubelet and containerd
// make them: with systemd and without, of a static Pod, of a container that has groups of its own, and of a sandbox with a
// machine in it.
var kubelets = []string{
	"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f3c.slice/cri-containerd-5d1e.scope",
	"kubepods/besteffort/pod77aa/9b2c",
	"kubepods.slice/kubepods-pod1a2b.slice/cri-containerd-77c0.scope/init.scope",
	"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod3d4e.slice/cri-containerd-1f2e.scope/deep/er",
	"kata_overhead/5d1e",
}

// nestedIn makes a group below another one, until the test ends.
func nestedIn(t testing.TB, top, name string) string {
	t.Helper()
	dir := top
	for part := range strings.SplitSeq(name, "/") {
		dir = filepath.Join(dir, part)
		err := os.Mkdir(dir, 0o755)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		made := dir
		t.Cleanup(func() {
			testbed.Until(t, made+" to be empty", func() error { return os.Remove(made) })
		})
	}
	return dir
}

// askedIn has a process in a control group connect to the Service from the node, and reports whether connection tracking saw it. sh
// is what begins the process, before the connection.
func askedIn(t testing.TB, e *flows.Env, group string, sh ...string) (tracked bool) {
	t.Helper()
	e.Forget(t)
	ctx, stop := context.WithTimeout(t.Context(), testbed.Patience)
	defer stop()
	script := `echo $$ > "$0/cgroup.procs" && exec "$@"`
	ask := []string{"bash", "-c", `exec 3<>/dev/tcp/` + web4.Addr().String() + `/80 && read -r line <&3 && echo "$line"`}
	args := append([]string{"-c", script, group}, append(sh, ask...)...)
	out, err := e.Node.Command(ctx, "sh", args...).CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "a ") {
		t.Errorf("in %s: %q, %v", group, out, err)
	}
	return e.Node.Tracks(svc.TCP, web4) == nil
}

// Processes of containers are translated wherever their control group hangs below the one of the programs, also in a control group
// namespace and where the hierarchy is mounted a second time. Those outside of it are left to the rules, which give the same answer.
func TestContainersGroups(t *testing.T) {
	if _, err := exec.LookPath("unshare"); err != nil {
		t.Skip("no unshare: install util-linux with test/setup.sh")
	}
	r := newRig(t)
	e := flows.NewEnv(t, r.createKnown)
	e.Apply(t, web(e, "a"), nil)
	for _, name := range kubelets {
		group := nestedIn(t, r.cfg.Cgroup, name)
		if askedIn(t, e, group) {
			t.Errorf("%s: translated by the rules", name)
		}
		if askedIn(t, e, group, "unshare", "--cgroup", "--mount") {
			t.Errorf("%s, with a control group namespace: translated by the rules", name)
		}
	}
	outside := nestedIn(t, filepath.Dir(r.cfg.Cgroup), filepath.Base(r.cfg.Cgroup)+"-outside/cri-containerd-9.scope")
	if !askedIn(t, e, outside) {
		t.Error("outside of the group of the programs: not translated by the rules")
	}
	second := t.TempDir()
	if err := unix.Mount("cgroup2", second, "cgroup2", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(second, unix.MNT_DETACH) }()
	group := filepath.Join(second, filepath.Base(r.cfg.Cgroup), kubelets[0])
	if _, err := os.Stat(group); err != nil {
		t.Skipf("needs a group for the test directly below the root control group, as on a machine without systemd: %v", err)
	}
	if askedIn(t, e, group) {
		t.Error("by the second mount: translated by the rules")
	}
}
