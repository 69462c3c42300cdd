package pod

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/runner/status"
	"github.com/fairlead/fairlead/internal/runner/values"
	"github.com/fairlead/fairlead/internal/runner/volumes"
)

// volumeRetry is the time between two tries to write volumes that have changed.
const volumeRetry = 10 * time.Second

// evictionGrace is what kubelet leaves to a Pod that is over a limit of the disk.
const evictionGrace = time.Second

// files keep the volumes of a running Pod up to date, and within their limits. Its methods run on the worker's loop.
type files struct {
	w       *worker
	watched bool // the ConfigMaps and Secrets of the volumes
	tokens  values.Tokens

	changed bool // an object in a volume has changed
	retryAt time.Time
	// labels and annotations are from the last write; set reports whether there was one.
	labels, annotations map[string]string
	set                 bool

	measuring measuring
}

// measuring is the state of the measurements of a Pod's volumes.
type measuring struct {
	busy   bool
	next   time.Time
	failed string // the last error that was logged
}

// watch has changes of the objects in the volumes reported, from the first call on.
func (f *files) watch(pod *corev1.Pod) {
	if f.watched {
		return
	}
	f.watched = true
	f.w.node.objects.Want(f, volumes.ObjectsOf(pod))
}

// unwatch ends what watch began.
func (f *files) unwatch() { f.w.node.objects.Want(f, nil) }

// Changed has the volumes written again. Any goroutine may call it.
func (f *files) Changed() { f.w.post(func() { f.changed = true }) }

// refresh does what is due, and returns when to call it again, zero for never.
func (f *files) refresh(ctx context.Context, pod *corev1.Pod) time.Time {
	return earlier(f.measure(pod), earlier(f.renewTokens(ctx, pod), f.rewriteChanged(ctx, pod)))
}

// renewTokens renews the tokens that are due, and returns when to call it again; zero for never.
func (f *files) renewTokens(ctx context.Context, pod *corev1.Pod) (next time.Time) {
	now := time.Now()
	if now.Before(f.tokens.RetryAt) {
		return f.tokens.RetryAt
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		due := f.tokens.Due(v)
		if due.IsZero() {
			continue
		}
		if !volumes.Written(f.w.paths.volume(v.Name)) {
			continue // no container with this volume has started
		}
		if now.Before(due) {
			next = earlier(next, due)
			continue
		}
		if err := f.rewrite(ctx, pod, v); err != nil {
			if ctx.Err() == nil {
				f.w.log.Warn("cannot renew the pod's token; retrying", "err", err, "after", values.TokenRetry)
			}
			f.tokens.RetryAt = now.Add(values.TokenRetry)
			return f.tokens.RetryAt
		}
		// The next call finds out when it is due again.
		next = now
	}
	return next
}

// rewriteChanged writes the volumes whose content has changed, and returns when to call it again, zero for never.
// Variables stay as they were at the container's start.
func (f *files) rewriteChanged(ctx context.Context, pod *corev1.Pod) time.Time {
	if !f.set { // the containers that start now write the present content
		f.labels, f.annotations, f.set = pod.Labels, pod.Annotations, true
	}
	if !f.changed && maps.Equal(f.labels, pod.Labels) && maps.Equal(f.annotations, pod.Annotations) {
		return time.Time{}
	}
	if time.Now().Before(f.retryAt) {
		return f.retryAt
	}
	f.changed, f.labels, f.annotations = false, pod.Labels, pod.Annotations
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.ConfigMap == nil && v.Secret == nil && v.DownwardAPI == nil && v.Projected == nil {
			continue
		}
		if !volumes.Written(f.w.paths.volume(v.Name)) {
			continue // no container with this volume has started
		}
		err := f.rewrite(ctx, pod, v)
		var missing volumes.MissingError
		switch {
		case err == nil || ctx.Err() != nil:
		case errors.As(err, &missing): // the files stay; its watch reports when it exists
			f.w.event(pod, corev1.EventTypeWarning, "FailedMount", "volume "+v.Name+": "+err.Error()+"; its files stay as they are")
		default:
			f.w.log.Warn("cannot update a volume of the pod; retrying", "volume", v.Name, "err", err, "after", volumeRetry)
			f.changed, f.retryAt = true, time.Now().Add(volumeRetry)
		}
	}
	if f.changed {
		return f.retryAt
	}
	return time.Time{}
}

// rewrite writes a volume of a running Pod again, for the containers that have it.
func (f *files) rewrite(ctx context.Context, pod *corev1.Pod, v *corev1.Volume) error {
	o := volumes.Owner{}
	for _, c := range f.w.containers {
		used := func(m corev1.VolumeMount) bool { return m.Name == v.Name }
		if !slices.ContainsFunc(c.Spec.VolumeMounts, used) {
			continue
		}
		confined, err := f.w.node.Confinement.Of(pod, c.Spec)
		if err != nil {
			return err
		}
		o = volumes.OwnerOf(pod, confined)
	}
	_, err := volumes.Prepare(ctx, f.w.facts(pod), v, f.w.paths.volume(v.Name), f.w.source(pod), o)
	return err
}

// measure has the volumes with a limit measured, beside the loop, and the Pod evicted if one is over it. It returns
// when to call it again, zero if it was called too early.
func (f *files) measure(pod *corev1.Pod) time.Time {
	m := &f.measuring
	limited := volumes.SizeLimited(pod)
	if len(limited) == 0 || m.busy {
		return time.Time{}
	}
	if time.Now().Before(m.next) {
		return m.next
	}
	m.busy = true
	w := f.w
	w.tasks.Go(func() {
		over, took, err := f.overSize(w.life, limited)
		w.post(func() {
			m.busy, m.next = false, time.Now().Add(volumes.PauseAfter(took))
			if over != "" {
				f.evict(pod, over)
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

// overSize returns why one of some volumes is larger than its limit, "" if none is, and how long it took to measure
// them: waiting for the volumes of other Pods does not count.
func (f *files) overSize(ctx context.Context, limited []*corev1.Volume) (over string, took time.Duration, err error) {
	for _, v := range limited {
		select { // one at a time on this node
		case f.w.node.measures <- struct{}{}:
		case <-ctx.Done():
			return "", took, ctx.Err()
		}
		begin := time.Now()
		over, err = volumes.OverSize(ctx, v, f.w.paths.volume(v.Name))
		took += time.Since(begin)
		<-f.w.node.measures
		if over != "" || err != nil {
			break
		}
	}
	return over, took, err
}

// evict ends a Pod that is over a limit of the disk, as kubelet does.
func (f *files) evict(pod *corev1.Pod, message string) {
	w := f.w
	if w.rec.Failure != nil || w.ending != nil || w.phase != phaseActive {
		return
	}
	w.ending = &ending{at: time.Now(), grace: min(evictionGrace, grace(pod))}
	w.fail(pod, status.Failure{Reason: "Evicted", Message: message})
}
