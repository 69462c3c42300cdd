package volumes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner/confinement"
)

// How often empty directories with a limit are measured: at most every minMeasure, and
// so that it takes a hundredth of a processor's time.
const (
	minMeasure   = time.Second
	measureShare = 100
	// maxMeasure is how long one may keep others waiting.
	maxMeasure = 30 * time.Second
	// maxPause is the longest time between two measurements of a pod, also of one that was
	// given up: a disk that fills until then shows as DiskPressure.
	maxPause = 10 * time.Minute
)

// inMemory reports whether a volume is an empty directory in memory.
func inMemory(v *corev1.Volume) bool {
	return v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory
}

// ofFiles reports whether a volume has files of Secrets, tokens or fields, which as in Kubernetes are never on the disk.
func ofFiles(v *corev1.Volume) bool {
	return v.Secret != nil || v.Projected != nil || v.DownwardAPI != nil
}

// usedBefore reports whether an earlier start of the Pod has processes with a mount at dir. Only then does it look at
// the mounts of all processes of the machine, which takes a millisecond for each Pod that runs.
func usedBefore(dir string) bool {
	_, err := os.Lstat(dir)
	return err == nil && process.MountedAt(dir)
}

// MountMemory makes the volumes of a Pod that are in memory: path returns the directory of a volume, machine is the
// machine's memory. It is called before the Pod's shim starts, which has its own mounts from then on.
func MountMemory(pod *corev1.Pod, path func(volume string) string, machine int64) error {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		var err error
		switch dir := path(v.Name); {
		case inMemory(v):
			if err = os.MkdirAll(dir, 0o777); err == nil {
				err = mount.Memory(dir, memorySize(pod, v.EmptyDir, machine))
			}
		case ofFiles(v) && !usedBefore(dir):
			// Earlier agents had the files on the disk, and a shim that was killed has left a mount.
			if err = errors.Join(mount.Unmount(dir), os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err == nil {
				err = errors.Join(mount.Memory(dir, memorySize(pod, &corev1.EmptyDirVolumeSource{}, machine)), os.Chmod(dir, 0o755))
			}
		}
		if err != nil {
			return fmt.Errorf("volume %s: %w", v.Name, err)
		}
	}
	return nil
}

// memorySize is the size of a volume in memory, kubelet's: the least of its limit, that of
// the pod's memory, and the machine's memory.
func memorySize(pod *corev1.Pod, e *corev1.EmptyDirVolumeSource, machine int64) int64 {
	size := machine
	for _, limit := range []int64{confinement.PodLimits(pod).Memory, sizeLimit(e)} {
		if limit > 0 && (size == 0 || limit < size) {
			size = limit
		}
	}
	return size
}

// sizeLimit is the limit of a volume, 0 for none.
func sizeLimit(e *corev1.EmptyDirVolumeSource) int64 {
	if e.SizeLimit == nil {
		return 0
	}
	return e.SizeLimit.Value()
}

// UnmountMemory gives back the memory of the volumes whose directories are in dir.
func UnmountMemory(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, mount.Unmount(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

// SizeLimited are the empty directories of a pod on the disk that have a limit.
func SizeLimited(pod *corev1.Pod) []*corev1.Volume {
	var out []*corev1.Volume
	for i := range pod.Spec.Volumes {
		if v := &pod.Spec.Volumes[i]; v.EmptyDir != nil && !inMemory(v) && sizeLimit(v.EmptyDir) > 0 {
			out = append(out, v)
		}
	}
	return out
}

// PauseAfter is how long to wait after a measurement of a Pod's volumes that took so long. Waiting for the volumes of
// other Pods does not count: a slow volume would keep the others from being measured.
func PauseAfter(took time.Duration) time.Duration {
	return min(max(minMeasure, measureShare*took), maxPause)
}

// OverSize returns why a volume, whose directory is dir, is larger than its limit, "" if it is not.
func OverSize(ctx context.Context, v *corev1.Volume, dir string) (over string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, maxMeasure, fmt.Errorf("gave up after %s", maxMeasure))
	defer cancel()
	limit := v.EmptyDir.SizeLimit
	used, err := fileio.Usage(ctx, dir, limit.Value())
	switch {
	case errors.Is(err, os.ErrNotExist): // no container has started yet
		return "", nil
	case errors.Is(err, fileio.ErrTooDeep), errors.Is(err, fileio.ErrTooMany):
		return fmt.Sprintf("EmptyDir volume %q has a limit of %q, and its %v. ", v.Name, limit.String(), errors.Unwrap(err)), nil
	case err == nil && used > limit.Value():
		return fmt.Sprintf("Usage of EmptyDir volume %q exceeds the limit %q. ", v.Name, limit.String()), nil
	}
	return "", err
}
