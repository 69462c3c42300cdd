package pod

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/runner/podnet"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/svc"
)

// Snapshot is what others than the worker may know of a Pod. It does not change.
type Snapshot struct {
	Namespace, Name, UID string
	Phase                corev1.PodPhase // "" before the first status
	Created              time.Time
	Paths                Paths
	NetnsPID             int // a process in the pod's network namespace, 0 for the machine's
	HostNetwork          bool
	Client               shim.Client
	Containers           map[string]ContainerSnapshot
}

// ContainerSnapshot is what others than the worker may know of a container.
type ContainerSnapshot struct {
	Attempt int // -1 before the first
	Running bool
	TTY     bool
	stdin   bool
	Done    <-chan struct{} // closed when the attempt has ended
}

// publishSnapshot stores the Pod's snapshot.
func (w *worker) publishSnapshot(pod *corev1.Pod) {
	if pod == nil {
		return
	}
	now := &Snapshot{
		Namespace: pod.Namespace, Name: pod.Name, UID: string(w.uid), Created: pod.CreationTimestamp.Time, Paths: w.paths,
		HostNetwork: pod.Spec.HostNetwork, Client: shim.Client{Dir: w.paths.Dir}, Containers: map[string]ContainerSnapshot{},
	}
	if w.sandbox.runs() && !pod.Spec.HostNetwork {
		now.NetnsPID = w.sandbox.shim.id.Pid
	}
	for _, c := range w.containers {
		k := ContainerSnapshot{Attempt: -1, TTY: c.Spec.TTY, stdin: c.Spec.Stdin, Done: c.ended}
		if c.Now != nil {
			k.Attempt, k.Running = c.Now.Attempt, c.Running()
		}
		now.Containers[c.Spec.Name] = k
	}
	w.snapshot.Store(now)
}

// current returns the Pod's snapshot with its phase, nil before the first.
func (w *worker) current() *Snapshot {
	last := w.snapshot.Load()
	if last == nil {
		return nil
	}
	s := *last
	if p := w.apiPhase.Load(); p != nil {
		s.Phase = *p
	}
	return &s
}

// publishHostPorts hands the proxy where the Pod's host ports lead now: nowhere without a sandbox.
func (w *worker) publishHostPorts() {
	now := podnet.HeldPorts{}
	if w.sandbox.runs() {
		now = w.rec.hostPorts()
	}
	w.node.HostPorts.Set(w.uid, now)
}

func (rec *record) hostPorts() podnet.HeldPorts {
	ports := svc.HostPorts{
		Pod: svc.Name{Namespace: rec.Namespace, Name: rec.Name}, UID: string(rec.UID), IPs: slices.Clone(rec.IPs), Ports: rec.HostPorts,
	}
	return podnet.HeldPorts{HostPorts: ports, Started: rec.Started}
}
