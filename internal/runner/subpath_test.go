package runner_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/runner"
)

// swapAsPod is this test's program in a container: it exchanges a directory of its volume
// with a link that leads to the machine, until it is killed.
func swapAsPod() {
	if err := errors.Join(os.Mkdir("/opt/sub", 0o777), os.Symlink(os.Getenv("OUTSIDE"), "/opt/other")); err != nil {
		fmt.Println(err)
		return
	}
	for {
		if err := unix.Renameat2(unix.AT_FDCWD, "/opt/sub", unix.AT_FDCWD, "/opt/other", unix.RENAME_EXCHANGE); err != nil {
			fmt.Println(err)
			return
		}
	}
}

// One container of a Pod exchanges what others mount by subPath with a link out of the
// volume: none of them sees the machine's files (CVE-2021-25741).
func TestSubPathRace(t *testing.T) {
	armed(t)
	c := newCluster(t, func(o *runner.Options) { o.Hide = []string{filepath.Dir(o.StateDir)} })
	outside := t.TempDir()
	if err := errors.Join(os.WriteFile(outside+"/key", []byte("key"), 0o644), os.Chmod(outside, 0o777)); err != nil {
		t.Fatal(err)
	}
	const readers = 16
	p := c.attack("baseline", func(p *corev1.Pod) {
		swap := &p.Spec.Containers[0]
		for i := range readers {
			r := *swap.DeepCopy()
			r.Name, r.VolumeMounts[0].SubPath = fmt.Sprint("reader-", i), "sub"
			r.Command, r.Env = []string{"/bin/sh", "-c", "cat /opt/key && echo stolen; true"}, nil
			p.Spec.Containers = append(p.Spec.Containers, r)
		}
		swap.Env = []corev1.EnvVar{{Name: "RUNNER_TEST_SERVE", Value: "swap"}, {Name: "OUTSIDE", Value: outside}}
		swap.Command = []string{"/srv/attack"}
		// It swaps before any other starts.
		sidecar := *swap
		sidecar.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
		ready := &corev1.ExecAction{Command: []string{"test", "-e", "/opt/sub"}}
		sidecar.StartupProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: ready}}
		p.Spec.InitContainers, p.Spec.Containers = []corev1.Container{sidecar}, p.Spec.Containers[1:]
	})
	mounted, refused := 0, 0
	await(t, "the end of the readers", func() bool {
		got, err := c.client.CoreV1().Pods(p.Namespace).Get(t.Context(), p.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		mounted, refused = 0, 0
		for _, s := range got.Status.ContainerStatuses {
			if end := s.State.Terminated; end != nil && end.Reason == "Completed" {
				mounted++
			} else if end != nil || s.State.Waiting != nil && strings.Contains(s.State.Waiting.Message, "subPath") {
				refused++
			}
		}
		return mounted+refused == readers && mounted > 0
	})
	t.Logf("%d mounted, %d refused", mounted, refused)
	for i := range readers {
		log, _ := os.ReadFile(filepath.Join(c.state, "pods", string(p.UID), "containers", fmt.Sprint("reader-", i), "0.log"))
		if strings.Contains(string(log), "stolen") {
			t.Errorf("reader %d has mounted the machine's directory: %s", i, log)
		}
	}
}

// A subPath that does not exist belongs to whom the volume does.
func TestSubPathOwner(t *testing.T) {
	armed(t)
	c := newCluster(t, nil)
	for _, group := range []bool{false, true} {
		p, got := c.ended(c.attack("baseline", func(p *corev1.Pod) {
			p.Spec.Containers[0].VolumeMounts[0].SubPath = "a/b"
			if group {
				p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: new(int64(2000))}
			}
		}))
		if got["ordinary"] != "<nil>" {
			t.Errorf("group %v: the Pod cannot write to it: %s", group, got["ordinary"])
		}
		for _, name := range []string{"a", "a/b"} {
			st, err := os.Stat(filepath.Join(c.state, "pods", string(p.UID), "volumes", "v", name))
			if err != nil {
				t.Fatal(err)
			}
			owner, base := st.Sys().(*syscall.Stat_t), runner.DefaultUIDRange.First
			wantGroup, wantMode := base+1000, os.ModeDir|0o777
			if group {
				wantGroup, wantMode = base+2000, wantMode|os.ModeSetgid
			}
			if owner.Uid != base+1000 || owner.Gid != wantGroup || st.Mode() != wantMode {
				t.Errorf("group %v: %s is of %d:%d, %v", group, name, owner.Uid-base, owner.Gid-base, st.Mode())
			}
		}
	}
}
