package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/svc"
)

// recorder writes Events. Calls never wait: what does not fit into the queue is
// dropped and counted. The same Event within its hour is one object that counts.
type recorder struct {
	client kubernetes.Interface
	host   string
	log    *slog.Logger
	queue  chan corev1.Event

	// Used by run alone.
	recent map[eventKey]*corev1.Event
}

type eventKey struct {
	kind            string
	name            svc.Name
	reason, message string
}

const (
	eventComponent = "fairlead-proxy"
	eventQueue     = 256
	eventMemory    = 1024
	eventTimeout   = 10 * time.Second
	maxMessage     = 1024 // the API's limit on an Event's note
)

func newRecorder(client kubernetes.Interface, host string, log *slog.Logger) *recorder {
	return &recorder{client: client, host: host, log: log, queue: make(chan corev1.Event, eventQueue), recent: map[eventKey]*corev1.Event{}}
}

// node records an Event on this Node. Like a kubelet, it uses the node's name
// as UID, which is what "kubectl describe node" looks for.
func (r *recorder) node(kind, reason, message string) {
	r.record(corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.host, UID: types.UID(r.host)}, kind, reason, message)
}

// service records an Event on a Service.
func (r *recorder) service(n svc.Name, uid types.UID, kind, reason, message string) {
	r.record(corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: n.Namespace, Name: n.Name, UID: uid}, kind, reason, message)
}

func (r *recorder) record(on corev1.ObjectReference, kind, reason, message string) {
	if len(message) > maxMessage {
		message = message[:maxMessage-3] + "..."
	}
	namespace := on.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	now := metav1.Now()
	e := corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s.%x", on.Name, now.UnixNano())},
		InvolvedObject: on, Type: kind, Reason: reason, Message: message,
		Source:              corev1.EventSource{Component: eventComponent, Host: r.host},
		ReportingController: eventComponent, ReportingInstance: r.host,
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}
	select {
	case r.queue <- e:
	default:
		r.log.Warn("event dropped, too many at once", "reason", reason, "message", message)
	}
}

// run writes Events until ctx ends.
func (r *recorder) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-r.queue:
			if err := r.write(ctx, &e); err != nil && ctx.Err() == nil {
				r.log.Warn("writing an event failed", "reason", e.Reason, "message", e.Message, "err", err)
			}
		}
	}
}

func (r *recorder) write(ctx context.Context, e *corev1.Event) error {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	key := eventKey{e.InvolvedObject.Kind, svc.Name{Namespace: e.Namespace, Name: e.InvolvedObject.Name}, e.Reason, e.Message}
	events := r.client.CoreV1().Events(e.Namespace)
	if last := r.recent[key]; last != nil && e.LastTimestamp.Sub(last.LastTimestamp.Time) < time.Hour {
		patch := fmt.Appendf(nil, `{"count":%d,"lastTimestamp":%q}`, last.Count+1, e.LastTimestamp.UTC().Format(time.RFC3339))
		if done, err := events.Patch(ctx, last.Name, types.MergePatchType, patch, metav1.PatchOptions{}); err == nil {
			r.recent[key] = done
			return nil
		} // it may have expired: write a new one
	}
	done, err := events.Create(ctx, e, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if len(r.recent) >= eventMemory {
		clear(r.recent)
	}
	r.recent[key] = done
	return nil
}
