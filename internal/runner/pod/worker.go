// Package pod runs Pods. Each has a worker: a loop that owns the state of its Pod and takes the next possible step.
// The processes belong to a shim (package shim) that outlives the agent.
package pod

import (
	"context"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/runner/podnet"
	"github.com/fairlead/fairlead/internal/runner/status"
	"github.com/fairlead/fairlead/internal/runner/values"
)

// worker owns one Pod until its directory is removed. The fields below "loop" belong to the goroutine of run, which
// other goroutines reach by post.
type worker struct {
	node      *node
	uid       types.UID
	namespace string
	name      string
	static    bool // it is one of a file
	paths     Paths
	log       *slog.Logger
	pub       *status.Publisher
	snapshot  atomic.Pointer[Snapshot]
	apiPhase  atomic.Pointer[corev1.PodPhase]

	// life ends with the worker or the agent; all goroutines of this Pod run with it.
	life context.Context
	die  context.CancelFunc

	wake loop.Signal
	mu   sync.Mutex
	// inbox holds the functions posted since the last turn of the loop. It is short: a sender posts a container's end,
	// or a probe's result.
	inbox []func()
	pod   *corev1.Pod // the newest object
	asked cause       // by Remove and stop

	// loop
	phase      phase
	admitted   bool // no other Pod has its ports of the node
	cause      cause
	ending     *ending // nil while the Pod is not being ended
	rec        record
	containers []*container
	sandbox    *sandbox
	files      *files
	draining   *draining
	tasks      sync.WaitGroup // probes, hooks and the shim's watch
}

// newWorker returns the worker of a Pod, which Pods.start runs until ctx ends.
func newWorker(ctx context.Context, n *node, uid types.UID, namespace, name string) *worker {
	w := &worker{
		node: n, uid: uid, namespace: namespace, name: name,
		paths: Paths{n.podDir(uid)}, log: n.Log.With("namespace", namespace, "pod", name, "uid", string(uid)),
		wake: loop.NewSignal(),
	}
	w.files, w.sandbox = &files{w: w}, &sandbox{w: w, retry: backoff{base: n.BackOff}}
	w.draining = &draining{w: w}
	w.life, w.die = context.WithCancel(ctx)
	w.pub = status.NewPublisher(n.Client, w.log, n.Found, n.Outage)
	return w
}

// post has the loop call f.
func (w *worker) post(f func()) {
	w.mu.Lock()
	w.inbox = append(w.inbox, f)
	w.mu.Unlock()
	w.wake.Set()
}

// update hands over a new version of the object.
func (w *worker) update(pod *corev1.Pod) {
	w.mu.Lock()
	w.pod = pod
	w.mu.Unlock()
	w.wake.Set()
}

// object returns the newest version of the Pod, nil if there was none: the API has not shown a Pod of an earlier run.
func (w *worker) object() *corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod
}

// remove reports the deletion of the object; last is its last version, nil if that is unknown.
func (w *worker) remove(last *corev1.Pod) {
	w.mu.Lock()
	w.asked = causeRemoved
	if last != nil {
		w.pod = last
	}
	w.mu.Unlock()
	w.wake.Set()
}

// stop ends the Pod along with the agent.
func (w *worker) stop() {
	w.mu.Lock()
	w.asked = max(w.asked, causeStopping)
	w.mu.Unlock()
	w.wake.Set()
}

// run is the loop. It returns when the Pod has ended and nothing of it is left, or when life ends: then the Pod goes
// on without the agent.
func (w *worker) run() {
	ctx := w.life
	defer w.files.unwatch()
	defer w.tasks.Wait()
	defer w.die()
	w.tasks.Go(func() { w.pub.Run(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-timer.C:
		}
		w.mu.Lock()
		inbox := w.inbox
		w.inbox = nil
		w.mu.Unlock()
		for _, f := range inbox {
			f()
		}
		next := w.step(ctx)
		if w.phase == phaseLeft {
			return
		}
		timer.Stop()
		if !next.IsZero() {
			timer.Reset(max(0, time.Until(next)))
		}
	}
}

// setPod takes the containers from the first spec; of later ones it takes the images, the only part that can change.
func (w *worker) setPod(pod *corev1.Pod) {
	w.rec.UID, w.rec.Namespace, w.rec.Name = pod.UID, pod.Namespace, pod.Name
	w.rec.HostNetwork, w.rec.Static, w.rec.HostPorts = pod.Spec.HostNetwork, w.static, podnet.HostPortsOf(pod)
	w.rec.Grace = grace(pod)
	if len(w.containers) > 0 {
		for _, c := range w.containers {
			c.refresh(pod)
		}
		return
	}
	add := func(c *corev1.Container, r status.Role) {
		k := &container{w: w, Container: status.Container{Spec: c, Role: r}, back: backoff{base: w.node.BackOff}}
		w.containers = append(w.containers, k)
		k.adopt(pod)
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if podspec.IsSidecar(c) {
			add(c, status.Sidecar)
		} else {
			add(c, status.Init)
		}
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], status.Main)
	}
	if w.sandbox.runs() {
		w.sandbox.limitAgain(pod)
	}
}

// loadContainers takes the containers from the records on disk, for a Pod whose object was deleted while the agent
// was away.
func (w *worker) loadContainers() {
	entries, err := os.ReadDir(w.paths.containers())
	if err != nil {
		return
	}
	for _, e := range entries {
		states := readStates(w.paths, e.Name())
		if len(states) == 0 {
			continue
		}
		c := &container{w: w, Container: status.Container{Spec: &corev1.Container{Name: e.Name()}, Now: &states[len(states)-1]}}
		if !w.sandbox.runs() {
			c.Now.Exited = true
		}
		w.containers = append(w.containers, c)
	}
}

func grace(pod *corev1.Pod) time.Duration {
	if g := pod.Spec.TerminationGracePeriodSeconds; g != nil {
		return time.Duration(*g) * time.Second
	}
	return corev1.DefaultTerminationGracePeriodSeconds * time.Second
}

// state is all that is known about the Pod.
func (w *worker) state(pod *corev1.Pod) status.Pod {
	known := *pod
	known.Status = w.pub.Known(pod)
	v := status.Pod{
		Pod: &known, HostIPs: w.node.Network.HostIPs(), IPs: w.rec.Shown,
		Started: w.rec.Started, Sandbox: w.sandbox.runs(), Over: w.phase >= phaseFinished, Failure: w.rec.Failure,
	}
	if pod.Spec.HostNetwork && w.sandbox.runs() && len(v.HostIPs) > 0 {
		v.IPs = v.HostIPs
	} else if len(v.IPs) == 0 {
		v.IPs = status.ParseIPs(known.Status.PodIPs)
	}
	for _, c := range w.containers {
		v.Containers = append(v.Containers, &c.Container)
		v.Over = v.Over && !c.Running() // sidecars may still be ending
	}
	return v
}

// facts are the values of the downward API.
func (w *worker) facts(pod *corev1.Pod) values.Facts {
	return values.Facts{
		Pod: pod, IPs: w.state(pod).IPs, HostIPs: w.node.Network.HostIPs(), Allocatable: corev1.ResourceList{
			corev1.ResourceCPU:    *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI),
			corev1.ResourceMemory: *resource.NewQuantity(w.node.memory, resource.BinarySI),
		},
	}
}

// source reads the objects that the Pod refers to.
func (w *worker) source(pod *corev1.Pod) values.Source {
	return values.Source{Client: w.node.Client, Namespace: pod.Namespace, Tokens: &w.files.tokens}
}

func (w *worker) event(pod *corev1.Pod, kind, reason, message string) {
	w.node.Events.Event(pod, kind, reason, message)
}

func (w *worker) String() string { return w.rec.Namespace + "/" + w.rec.Name }
