package status

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// Publisher writes the newest status of one pod to the API when it has changed,
// and deletes the object at the end.
type Publisher struct {
	client kubernetes.Interface
	log    *slog.Logger
	// found is called after what own returns has changed; it may be nil.
	found  func()
	outage *Outage // may be nil
	wake   loop.Signal

	mu     sync.Mutex
	base   *corev1.Pod // the newest object, of the informer or of an own write
	want   *corev1.PodStatus
	delete bool
	// Static has the status written to the mirror of the pod, which is base.
	Static bool
}

const (
	patchTimeout = 10 * time.Second
	minRetry     = 100 * time.Millisecond
	maxRetry     = 10 * time.Second
)

// NewPublisher returns a Publisher that writes nothing before Run. found is called after what Own adds has changed, and
// outage is the node's; both may be nil.
func NewPublisher(client kubernetes.Interface, log *slog.Logger, found func(), outage *Outage) *Publisher {
	return &Publisher{client: client, log: log, found: found, outage: outage, wake: loop.NewSignal()}
}

// Nudge has the status written again if it must differ, as after a change of the outage.
func (p *Publisher) Nudge() { p.wake.Set() }

// Set sets the status to write; pod is the object as the informer has it.
func (p *Publisher) Set(pod *corev1.Pod, st corev1.PodStatus) {
	p.mu.Lock()
	if !p.Static {
		p.learn(pod)
	}
	changed := p.want == nil || !sameFindings(p.want, &st)
	p.want = &st
	p.mu.Unlock()
	if changed && p.found != nil {
		p.found()
	}
	p.wake.Set()
}

// Remove has the object deleted after this last status is written.
func (p *Publisher) Remove(pod *corev1.Pod, st corev1.PodStatus) {
	p.mu.Lock()
	p.delete = true
	p.mu.Unlock()
	p.Set(pod, st)
}

// Known returns the newest status known to be in the API.
func (p *Publisher) Known(pod *corev1.Pod) corev1.PodStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.Static {
		p.learn(pod)
	}
	if p.base == nil {
		return pod.Status
	}
	return p.base.Status
}

// Mirror gives the publisher of a static pod the mirror of that pod, whose UID is uid, as
// the API has it.
func (p *Publisher) Mirror(m *corev1.Pod, uid types.UID) {
	if m.Annotations[corev1.MirrorPodAnnotationKey] != string(uid) {
		return
	}
	p.mu.Lock()
	p.learn(m)
	p.mu.Unlock()
	p.wake.Set()
}

// learn keeps the newer of two objects: the informer may be behind the publisher's
// own writes, and the last of those behind the writes of others. It is called with mu held.
func (p *Publisher) learn(pod *corev1.Pod) {
	if p.base == nil || newer(pod.ResourceVersion, p.base.ResourceVersion) {
		p.base = pod
	}
}

// newer reports whether resource version a is newer than b. They are growing
// numbers (documented since Kubernetes v1.35); an invalid number counts as old.
func newer(a, b string) bool {
	x, err1 := strconv.ParseUint(a, 10, 64)
	y, err2 := strconv.ParseUint(b, 10, 64)
	return err1 == nil && (err2 != nil || x > y)
}

// Run writes the status until ctx ends.
func (p *Publisher) Run(ctx context.Context) {
	retry := minRetry
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-again:
		}
		again = nil
		err := p.write(ctx)
		if err == nil {
			retry = minRetry
			continue
		}
		if ctx.Err() != nil {
			return
		}
		p.log.Warn("cannot write the pod's status; retrying", "err", err, "after", retry)
		again = time.After(retry)
		retry = min(2*retry, maxRetry)
	}
}

// write brings the API in line with want and delete.
func (p *Publisher) write(ctx context.Context) error {
	p.mu.Lock()
	base, want, del := p.base, p.want, p.delete
	p.mu.Unlock()
	if want == nil || base == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, patchTimeout)
	defer cancel()
	pods := p.client.CoreV1().Pods(base.Namespace)
	patch, err := statusPatch(base, p.outage.cover(&base.Status, want, time.Now()))
	if err != nil {
		return err
	}
	if patch != nil {
		now, err := pods.Patch(ctx, base.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		switch {
		case apierrors.IsNotFound(err), apierrors.IsConflict(err):
			return nil // another pod of this name, or none: the informer brings the news
		case err != nil:
			return fmt.Errorf("patch status of pod %s/%s: %w", base.Namespace, base.Name, err)
		}
		p.mu.Lock()
		if p.base == base || newer(now.ResourceVersion, p.base.ResourceVersion) {
			p.base = now
		}
		p.mu.Unlock()
	}
	if !del {
		return nil
	}
	err = pods.Delete(ctx, base.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &base.UID},
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete pod %s/%s: %w", base.Namespace, base.Name, err)
	}
	return nil
}

// ownConditions are the conditions that a node sets.
var ownConditions = map[corev1.PodConditionType]bool{
	corev1.PodReadyToStartContainers: true, corev1.PodInitialized: true, corev1.ContainersReady: true, corev1.PodReady: true,
	svc.ProgramReturned: true,
}

// statusPatch is the patch that gives base the fields of want that a node
// owns, nil if it has them. The UID in it keeps it from another pod of the
// same name.
func statusPatch(base *corev1.Pod, want *corev1.PodStatus) ([]byte, error) {
	next := base.Status.DeepCopy()
	next.Phase, next.QOSClass, next.StartTime, next.ObservedGeneration = want.Phase, want.QOSClass, want.StartTime, want.ObservedGeneration
	if want.Phase == corev1.PodFailed && want.Reason != "" || ofRegistered(want) {
		next.Reason, next.Message = want.Reason, want.Message // the node has ended it, or does not start it
	}
	next.HostIP, next.HostIPs, next.PodIP, next.PodIPs = want.HostIP, want.HostIPs, want.PodIP, want.PodIPs
	next.InitContainerStatuses, next.ContainerStatuses = want.InitContainerStatuses, want.ContainerStatuses
	for _, c := range want.Conditions {
		i := conditionIndex(next.Conditions, c.Type)
		switch {
		case i < 0 && (ownConditions[c.Type] || c.Type == corev1.PodScheduled):
			next.Conditions = append(next.Conditions, c)
		case i >= 0 && ownConditions[c.Type]:
			next.Conditions[i] = c
		}
	}
	if ofRegistered(want) {
		next.Conditions = askDrained(next.Conditions, want.Conditions)
	}
	if apiequality.Semantic.DeepEqual(&base.Status, next) {
		return nil, nil
	}
	before, err1 := json.Marshal(corev1.Pod{Status: base.Status})
	after, err2 := json.Marshal(corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: base.UID}, Status: *next})
	if err1 != nil || err2 != nil {
		return nil, fmt.Errorf("encode pod status: %w, %w", err1, err2)
	}
	return strategicpatch.CreateTwoWayMergePatch(before, after, corev1.Pod{})
}

// askDrained gives conditions the question that want asks by barrier.Drained, or none. What
// asks the same already, or is the answer, stays.
func askDrained(conditions, want []corev1.PodCondition) []corev1.PodCondition {
	i, j := conditionIndex(conditions, barrier.Drained), conditionIndex(want, barrier.Drained)
	switch {
	case j < 0 && i >= 0:
		return slices.Delete(conditions, i, i+1)
	case j >= 0 && i < 0:
		return append(conditions, want[j])
	case j >= 0 && conditions[i].Message != want[j].Message:
		conditions[i] = want[j]
	}
	return conditions
}

func conditionIndex(list []corev1.PodCondition, t corev1.PodConditionType) int {
	for i := range list {
		if list[i].Type == t {
			return i
		}
	}
	return -1
}
