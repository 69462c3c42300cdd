package runner

import (
	"context"
	"errors"
	"maps"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// volumeRetry is the time between two tries to write volumes that have changed.
const volumeRetry = 10 * time.Second

// volumeState is what a worker knows of the volumes of files of its pod.
type volumeState struct {
	changed bool // an object in one of them has changed
	retryAt time.Time
	// labels and annotations are those of the last write; set reports whether there was one.
	labels, annotations map[string]string
	set                 bool
}

// volumesChanged has the volumes of files written again. It is called on the loop.
func (w *worker) volumesChanged() { w.volumes.changed = true }

// refreshVolumes writes the volumes of files of a running pod whose content has changed,
// and returns when to call it again, zero for never. Variables stay as they were at the
// container's start.
func (w *worker) refreshVolumes(ctx context.Context, pod *corev1.Pod) time.Time {
	v := &w.volumes
	if !v.set { // the containers that start now write what is there now
		v.labels, v.annotations, v.set = pod.Labels, pod.Annotations, true
	}
	if !v.changed && maps.Equal(v.labels, pod.Labels) && maps.Equal(v.annotations, pod.Annotations) {
		return time.Time{}
	}
	if now := time.Now(); now.Before(v.retryAt) {
		return v.retryAt
	}
	v.changed, v.labels, v.annotations = false, pod.Labels, pod.Annotations
	f := facts{pod: pod, ips: w.state(pod).ips, hostIPs: w.r.hostIPs()}
	from := source{client: w.r.o.Client, namespace: pod.Namespace, tokens: &w.tokens}
	for i := range pod.Spec.Volumes {
		volumeOf := &pod.Spec.Volumes[i]
		if volumeOf.ConfigMap == nil && volumeOf.Secret == nil && volumeOf.DownwardAPI == nil && volumeOf.Projected == nil {
			continue
		}
		if _, err := os.Stat(w.paths.volume(volumeOf.Name)); err != nil {
			continue // no container with this volume has started
		}
		err := w.rewrite(ctx, f, volumeOf, from)
		var missing missingError
		switch {
		case err == nil || ctx.Err() != nil:
		case errors.As(err, &missing): // the files stay; its watch reports when it is there
			w.r.event(pod, corev1.EventTypeWarning, "FailedMount", "volume "+volumeOf.Name+": "+err.Error()+"; its files stay as they are")
		default:
			w.log.Warn("cannot update a volume of the pod; retrying", "volume", volumeOf.Name, "err", err, "after", volumeRetry)
			v.changed, v.retryAt = true, time.Now().Add(volumeRetry)
		}
	}
	if v.changed {
		return v.retryAt
	}
	return time.Time{}
}
