package proxy

import (
	"log/slog"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// recorder records the proxy's Events.
type recorder struct {
	*events.Recorder
	host string
}

func newRecorder(client kubernetes.Interface, host string, log *slog.Logger) *recorder {
	return &recorder{events.NewRecorder(client, corev1.EventSource{Component: "fairlead-proxy", Host: host}, log), host}
}

// node records a Warning on this Node. Like a kubelet, it uses the node's name
// as UID, which is what "kubectl describe node" looks for.
func (r *recorder) node(reason, message string) {
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.host, UID: types.UID(r.host)}
	r.Event(ref, corev1.EventTypeWarning, reason, message)
}

// service records an Event on a Service, or on the Pod that has the name in a Table.
func (r *recorder) service(n svc.Name, uid types.UID, kind, reason, message string) {
	on := &corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: n.Namespace, Name: n.Name, UID: uid}
	if pod, ok := table.PodName(n); ok {
		on.Kind, on.Name = "Pod", pod.Name
	}
	r.Event(on, kind, reason, message)
}
