package static

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/loop"
)

// Delays between two tries to bring the mirrors in line.
const (
	mirrorRetry    = time.Second
	maxMirrorRetry = time.Minute
	writeTimeout   = 10 * time.Second
)

// mirrors are the Pods of the API that show static ones, by NAMESPACE/NAME. No agent
// runs them, and their deletion ends nothing.
type mirrors struct {
	wake loop.Signal

	mu      sync.Mutex
	objects map[string]*corev1.Pod
	synced  bool // all of this node have been seen
}

// MirrorSeen takes in a mirror of the API.
func (s *Pods) MirrorSeen(pod *corev1.Pod) {
	s.mirrors.mu.Lock()
	s.mirrors.objects[podKey(pod)] = pod
	s.mirrors.mu.Unlock()
	if uid, runs := s.o.Workers.Static()[podKey(pod)]; runs {
		s.o.Workers.Mirror(uid, pod)
	}
	s.mirrors.wake.Set()
}

// MirrorGone takes in the deletion of a mirror.
func (s *Pods) MirrorGone(pod *corev1.Pod) {
	s.mirrors.mu.Lock()
	if have := s.mirrors.objects[podKey(pod)]; have != nil && have.UID == pod.UID {
		delete(s.mirrors.objects, podKey(pod))
	}
	s.mirrors.mu.Unlock()
	s.mirrors.wake.Set()
}

// MirrorsSynced takes in that all mirrors of this node have been seen.
func (s *Pods) MirrorsSynced() {
	s.mirrors.mu.Lock()
	s.mirrors.synced = true
	s.mirrors.mu.Unlock()
	s.mirrors.wake.Set()
}

// mirror keeps the mirrors in line with the files until ctx ends.
func (s *Pods) mirror(ctx context.Context) {
	retry, logged := mirrorRetry, ""
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.mirrors.wake:
		case <-timer.C:
		}
		err := s.syncMirrors(ctx)
		if err == nil {
			retry, logged = mirrorRetry, ""
			timer.Stop()
			continue
		}
		if text := err.Error(); text != logged && ctx.Err() == nil {
			logged = text
			s.o.Log.Warn("cannot show static pods in the API; they run anyway; retrying", "err", err, "after", retry)
		}
		timer.Reset(retry)
		retry = min(2*retry, maxMirrorRetry)
	}
}

func (s *Pods) syncMirrors(ctx context.Context) error {
	s.mirrors.mu.Lock()
	synced, have := s.mirrors.synced, maps.Clone(s.mirrors.objects)
	s.mirrors.mu.Unlock()
	s.mu.Lock()
	wanted := maps.Clone(s.wanted)
	read := s.read
	s.mu.Unlock()
	node := s.o.NodeUID()
	if !synced || !read || node == "" {
		return nil // what completes this wakes s
	}
	var errs []error
	for key, m := range have {
		if p := wanted[key]; p != nil && shows(m, p, node) {
			continue
		}
		errs = append(errs, s.deleteMirror(ctx, m))
	}
	for key, p := range wanted {
		if m := have[key]; m == nil || !shows(m, p, node) {
			errs = append(errs, s.createMirror(ctx, p, node))
		}
	}
	return errors.Join(errs...)
}

// shows reports whether m shows the static pod p.
func shows(m, p *corev1.Pod, node types.UID) bool {
	return m.Annotations[corev1.MirrorPodAnnotationKey] == string(p.UID) && m.DeletionTimestamp == nil &&
		len(m.OwnerReferences) == 1 && m.OwnerReferences[0].UID == node
}

func (s *Pods) deleteMirror(ctx context.Context, m *corev1.Pod) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	err := s.o.Client.CoreV1().Pods(m.Namespace).Delete(ctx, m.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &m.UID},
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete the mirror Pod %s/%s: %w", m.Namespace, m.Name, err)
	}
	return nil
}

func (s *Pods) createMirror(ctx context.Context, p *corev1.Pod, node types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	m := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, Labels: p.Labels, Annotations: maps.Clone(p.Annotations),
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Node", Name: s.o.NodeName, UID: node, Controller: new(true),
			}},
		},
		Spec: *p.Spec.DeepCopy(),
	}
	m.Annotations[corev1.MirrorPodAnnotationKey] = string(p.UID)
	pods := s.o.Mirrors.CoreV1().Pods(m.Namespace)
	_, err := pods.Create(ctx, m, metav1.CreateOptions{})
	if apierrors.IsForbidden(err) && len(m.Labels) > 0 {
		reason := err
		m.Labels = nil
		if _, err = pods.Create(ctx, m, metav1.CreateOptions{}); err == nil {
			s.o.Log.Warn("a static pod is shown in the API without its labels, so that no Service selects it; "+
				"delete its mirror when the node may create Pods", "namespace", m.Namespace, "pod", m.Name, "err", reason)
		}
	}
	if err != nil {
		return fmt.Errorf("create the mirror Pod %s/%s: %w", m.Namespace, m.Name, err)
	}
	return nil
}
