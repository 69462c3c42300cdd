package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/mount"
)

// How often empty directories with a limit are measured: at most every minMeasure, and
// so that it takes a hundredth of a processor's time.
const (
	minMeasure   = time.Second
	measureShare = 100
	// maxMeasure is how long one may keep others waiting.
	maxMeasure = 30 * time.Second
	// maxPause is the longest time between two measurements of a pod, also of one that was
	// given up: what fills the disk meanwhile shows as DiskPressure.
	maxPause = 10 * time.Minute
)

// evictionGrace is what kubelet leaves to a pod that is over a limit of the disk.
const evictionGrace = time.Second

// measuring is what a worker knows of the size of its pod's volumes.
type measuring struct {
	busy   bool
	next   time.Time
	failed string // the last error that was logged
}

// inMemory reports whether a volume is an empty directory in memory.
func inMemory(v *corev1.Volume) bool {
	return v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory
}

// mountMemory makes the volumes of a pod that are in memory. It is called before its shim
// starts, whose mounts are its own from then on.
func (r *Runner) mountMemory(pod *corev1.Pod, p podPaths) error {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if !inMemory(v) {
			continue
		}
		dir := p.volume(v.Name)
		err := os.MkdirAll(dir, 0o777)
		if err == nil {
			err = mount.Memory(dir, memorySize(pod, v.EmptyDir, r.memory))
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
	for _, limit := range []int64{podLimits(pod).Memory, sizeLimit(e)} {
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

// unmountMemory gives back the memory of a pod's volumes.
func unmountMemory(p podPaths) error {
	entries, err := os.ReadDir(p.volume(""))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, mount.Unmount(p.volume(e.Name())))
		}
	}
	return err
}

// removePod removes all that the node has stored of a pod whose processes have ended.
func removePod(p podPaths) error {
	return errors.Join(unmountMemory(p), os.RemoveAll(p.dir))
}

// sizeLimited are the empty directories of a pod on the disk that have a limit.
func sizeLimited(pod *corev1.Pod) []*corev1.Volume {
	var out []*corev1.Volume
	for i := range pod.Spec.Volumes {
		if v := &pod.Spec.Volumes[i]; v.EmptyDir != nil && !inMemory(v) && sizeLimit(v.EmptyDir) > 0 {
			out = append(out, v)
		}
	}
	return out
}

// measure has the volumes with a limit measured, beside the loop, and the pod evicted if
// one is over it. It returns when to call it again, zero if it was called too early.
func (w *worker) measure(pod *corev1.Pod) time.Time {
	m := &w.measuring
	volumes := sizeLimited(pod)
	if len(volumes) == 0 || m.busy {
		return time.Time{}
	}
	if time.Now().Before(m.next) {
		return m.next
	}
	m.busy = true
	w.tasks.Go(func() {
		var took, one time.Duration
		over, err := "", error(nil)
		for _, v := range volumes {
			over, one, err = w.overSize(w.life, v)
			if took += one; over != "" || err != nil {
				break
			}
		}
		w.post(func() {
			m.busy, m.next = false, time.Now().Add(pauseAfter(took))
			if over != "" {
				w.evict(pod, over)
			}
			text := ""
			if err != nil && w.life.Err() == nil {
				text = err.Error()
			}
			if m.failed != text && text != "" {
				w.log.Warn("cannot measure a volume of the pod; retrying", "err", err, "after", time.Until(m.next).Round(time.Second))
			}
			m.failed = text
		})
	})
	return time.Time{}
}

// pauseAfter is how long a pod's volumes are left alone after a measurement that took so
// long. What it waited for other pods' does not count: a slow volume would keep those of
// others from being measured.
func pauseAfter(took time.Duration) time.Duration {
	return min(max(minMeasure, measureShare*took), maxPause)
}

// overSize returns why a volume is larger than it may be, "" if it is not, and how long it
// took to measure it.
func (w *worker) overSize(ctx context.Context, v *corev1.Volume) (over string, took time.Duration, err error) {
	select { // one at a time on this node
	case w.r.measures <- struct{}{}:
		defer func() { <-w.r.measures }()
	case <-ctx.Done():
		return "", 0, ctx.Err()
	}
	begin := time.Now()
	defer func() { took = time.Since(begin) }()
	ctx, cancel := context.WithTimeoutCause(ctx, maxMeasure, fmt.Errorf("gave up after %s", maxMeasure))
	defer cancel()
	limit := v.EmptyDir.SizeLimit
	used, err := fileio.Usage(ctx, w.paths.volume(v.Name), limit.Value())
	switch {
	case errors.Is(err, os.ErrNotExist): // no container has started yet
		return "", 0, nil
	case errors.Is(err, fileio.ErrTooDeep), errors.Is(err, fileio.ErrTooMany):
		return fmt.Sprintf("EmptyDir volume %q has a limit of %q, and its %v. ", v.Name, limit.String(), errors.Unwrap(err)), 0, nil
	case err == nil && used > limit.Value():
		return fmt.Sprintf("Usage of EmptyDir volume %q exceeds the limit %q. ", v.Name, limit.String()), 0, nil
	}
	return "", 0, err
}

// evict ends a pod as kubelet does that is over a limit of the disk.
func (w *worker) evict(pod *corev1.Pod, message string) {
	if w.rec.Failure != nil || w.end != nil || w.over {
		return
	}
	w.end = &ending{at: time.Now(), grace: min(evictionGrace, grace(pod))}
	w.fail(pod, failure{"Evicted", message})
}
