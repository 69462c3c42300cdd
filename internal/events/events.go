// Package events records Events on objects of the API. Recording never blocks:
// Events are queued, correlated as Kubernetes' own components do it
// (k8s.io/client-go/tools/record: equal ones are counted in one object, similar
// ones are combined, and each object has a rate limit), and written by one
// goroutine.
package events

import (
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/tools/reference"
)

const (
	queueSize    = 256
	writeTimeout = 10 * time.Second
	// An Event that does not reach the API server is retried as client-go does.
	maxTries    = 12
	retryPeriod = 10 * time.Second
	// drainTimeout bounds how long stop waits for Events that are still queued.
	drainTimeout = 2 * time.Second
	// maxMessage is the limit of the events.k8s.io API on an Event's note, in bytes.
	maxMessage = 1024
)

// Recorder records the Events of one component. It is safe for concurrent use.
type Recorder struct {
	client     kubernetes.Interface
	source     corev1.EventSource
	log        *slog.Logger
	queue      chan *corev1.Event
	correlator *record.EventCorrelator
}

// NewRecorder returns a Recorder that writes nothing before Start.
func NewRecorder(client kubernetes.Interface, source corev1.EventSource, log *slog.Logger) *Recorder {
	return &Recorder{
		client: client, source: source, log: log, queue: make(chan *corev1.Event, queueSize),
		// 25 Events on an object at once, then one per minute.
		correlator: record.NewEventCorrelatorWithOptions(record.CorrelatorOptions{LRUCacheSize: 1024, BurstSize: 25, QPS: 1. / 60}),
	}
}

// Event records an Event on object, which may be a *corev1.ObjectReference.
// eventType is corev1.EventTypeNormal or EventTypeWarning. If the queue is full
// the Event is dropped and logged. A message of more than 1,024 bytes is cut.
func (r *Recorder) Event(object runtime.Object, eventType, reason, message string) {
	r.record(object, eventType, reason, message, func(*corev1.Event) string { return fmt.Sprintf("%x", time.Now().UnixNano()) })
}

// Once is Event for what other processes of the component may have recorded: as long as the API server
// keeps an Event (an hour on Kubernetes), one with the same content is not written again.
func (r *Recorder) Once(object runtime.Object, eventType, reason, message string) {
	r.record(object, eventType, reason, message, func(e *corev1.Event) string {
		h := fnv.New64a()
		_, _ = fmt.Fprintf(h, "%s\x00%s\x00%s\x00%s", e.Source.Component, e.InvolvedObject.UID, e.Reason, e.Message)
		return fmt.Sprintf("%016x", h.Sum64())
	})
}

// record queues an Event. name returns the end of its name.
func (r *Recorder) record(object runtime.Object, eventType, reason, message string, name func(*corev1.Event) string) {
	ref, err := reference.GetReference(scheme.Scheme, object)
	if err != nil {
		r.log.Error("cannot record an Event: its object has no reference", "reason", reason, "message", message, "err", err)
		return
	}
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage-3], "") + "..."
	}
	namespace := ref.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	now := metav1.Now()
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: namespace},
		InvolvedObject: *ref, Type: eventType, Reason: reason, Message: message,
		Source: r.source, ReportingController: r.source.Component, ReportingInstance: r.source.Host,
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}
	e.Name = ref.Name + "." + name(e)
	select {
	case r.queue <- e:
	default:
		r.log.Warn("Event dropped: too many are queued", "reason", reason, "message", message)
	}
}

// Start writes Events until stop is called. stop returns when the queued ones
// are written, after 2 s at the latest. Start may be called once.
func (r *Recorder) Start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	stopping := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { r.run(ctx, stopping) })
	return func() {
		close(stopping)
		defer time.AfterFunc(drainTimeout, cancel).Stop()
		wg.Wait()
		cancel()
	}
}

func (r *Recorder) run(ctx context.Context, stopping <-chan struct{}) {
	for ctx.Err() == nil { // also here: with both ready, select takes either
		select {
		case e := <-r.queue:
			r.write(ctx, e, stopping)
		case <-stopping:
			for ctx.Err() == nil {
				select {
				case e := <-r.queue:
					r.write(ctx, e, stopping)
				default:
					return
				}
			}
			return
		}
	}
}

// write writes an Event, retrying until stopping while the API server cannot be reached.
func (r *Recorder) write(ctx context.Context, e *corev1.Event, stopping <-chan struct{}) {
	result, err := r.correlator.EventCorrelate(e)
	if err != nil {
		r.log.Warn("cannot correlate an Event", "reason", e.Reason, "message", e.Message, "err", err)
	}
	if result == nil || result.Skip {
		return
	}
	for try := 1; ; try++ {
		err := r.send(ctx, result)
		if err == nil || apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return
		}
		// An answer of the API server is final.
		if apierrors.ReasonForError(err) != metav1.StatusReasonUnknown || try == maxTries {
			r.log.Warn("cannot write an Event", "reason", e.Reason, "message", e.Message, "err", err)
			return
		}
		if try == 1 {
			r.log.Warn("cannot write an Event; retrying", "reason", e.Reason, "message", e.Message, "every", retryPeriod, "err", err)
		}
		select {
		case <-stopping:
			return
		case <-time.After(retryPeriod):
		}
	}
}

// send makes one attempt: a new Event, or the count of one that is there.
func (r *Recorder) send(ctx context.Context, result *record.EventCorrelateResult) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	e := result.Event
	client := r.client.CoreV1().Events(e.Namespace)
	if e.Count > 1 {
		written, err := client.Patch(ctx, e.Name, types.StrategicMergePatchType, result.Patch, metav1.PatchOptions{})
		if err == nil {
			r.correlator.UpdateState(written)
		}
		if !apierrors.IsNotFound(err) {
			return err
		} // it has expired
	}
	e.ResourceVersion = ""
	written, err := client.Create(ctx, e, metav1.CreateOptions{})
	if err == nil {
		r.correlator.UpdateState(written)
	}
	return err
}
