package pod

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/runner/volumes"
)

// Paths are the paths of one pod below the state directory.
type Paths struct{ Dir string }

func (p Paths) pod() string                  { return filepath.Join(p.Dir, "pod.json") }
func (p Paths) etc(name string) string       { return filepath.Join(p.Dir, "etc", name) }
func (p Paths) volume(name string) string    { return filepath.Join(p.Dir, "volumes", name) }
func (p Paths) containers() string           { return filepath.Join(p.Dir, "containers") }
func (p Paths) container(name string) string { return filepath.Join(p.containers(), name) }

// program is the copy of a program with this SHA-256, in hex.
func (p Paths) program(sum string) string { return filepath.Join(p.Dir, "programs", sum) }

// Log is the file of the output of an attempt.
func (p Paths) Log(name string, attempt int) string {
	return filepath.Join(p.container(name), fmt.Sprintf("%d.log", attempt))
}
func (p Paths) message(name string, attempt int) string {
	return filepath.Join(p.container(name), fmt.Sprintf("%d.message", attempt))
}
func (p Paths) record(name string, attempt int) string {
	return filepath.Join(p.container(name), fmt.Sprintf("%d.json", attempt))
}

// Remove removes all that the node has stored of a Pod whose processes have ended.
func (p Paths) Remove() error {
	return errors.Join(volumes.UnmountMemory(p.volume("")), os.RemoveAll(p.Dir))
}

// etcBinds mounts the Pod's own files over the files of /etc that the machine has.
func (p Paths) etcBinds(pod *corev1.Pod) []mount.Bind {
	names := []string{"resolv.conf", "hosts", "hostname"}
	if pod.Spec.HostNetwork {
		names = names[:1]
	}
	var out []mount.Bind
	for _, n := range names {
		out = append(out, mount.Bind{Source: p.etc(n), Target: "/etc/" + n, Optional: true})
	}
	return out
}
