package runner

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/runner/shim"
)

// worker owns one pod until its directory is removed. The fields below "loop"
// belong to the goroutine of run, which other goroutines reach by post.
type worker struct {
	r   *Runner
	uid types.UID
	// namespace is that of the pod.
	namespace string
	name      string
	static    bool // it is one of a file; see staticPods
	paths     podPaths
	log       *slog.Logger
	pub       *publisher
	snapshot  atomic.Pointer[podSnapshot]
	phase     atomic.Pointer[corev1.PodPhase]

	// life ends with the worker or the agent; all goroutines of this pod run with it.
	life context.Context
	die  context.CancelFunc

	wake chan struct{}
	mu   sync.Mutex
	// inbox holds the functions posted since the last turn of the loop. It is
	// short: a sender posts a container's end, or a probe's result.
	inbox []func()
	pod   *corev1.Pod // the newest object
	// watched belongs to objects.
	watched map[objectKey]bool
	gone    bool // the object is deleted
	halt    bool // the agent ends, and its pods with it

	// loop
	rec        podRecord
	containers []*container
	sandbox    *sandbox
	retry      backoff // of the sandbox
	retryAt    time.Time
	tokens     tokens
	volumes    volumeState
	measuring  measuring
	relink     bool // the node's end of the network was removed while the agent was away
	end        *ending
	draining   draining
	over       bool
	done       bool
	tasks      sync.WaitGroup // probes, hooks and the shim's watch
}

// podSnapshot is what the HTTPS endpoint knows of a pod.
type podSnapshot struct {
	namespace, name string
	created         time.Time
	paths           podPaths
	netnsPID        int // a process in the pod's network namespace, 0 for the machine's
	hostNetwork     bool
	client          shim.Client
	containers      map[string]containerSnapshot
}

type containerSnapshot struct {
	attempt int // -1 before the first
	running bool
	tty     bool
	stdin   bool
	done    <-chan struct{} // closed when the attempt has ended
}

func newWorker(ctx context.Context, r *Runner, uid types.UID, namespace, name string) *worker {
	w := &worker{
		r: r, uid: uid, namespace: namespace, name: name,
		paths: podPaths{r.podDir(uid)}, log: r.o.Log.With("namespace", namespace, "pod", name, "uid", string(uid)),
		wake: make(chan struct{}, 1), retry: backoff{base: r.o.BackOff},
	}
	w.life, w.die = context.WithCancel(ctx)
	w.pub = newPublisher(r.o.Client, w.log, r.o.PodsChanged)
	return w
}

// post has the loop call f.
func (w *worker) post(f func()) {
	w.mu.Lock()
	w.inbox = append(w.inbox, f)
	w.mu.Unlock()
	w.nudge()
}

func (w *worker) nudge() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// update hands over a new version of the object.
func (w *worker) update(pod *corev1.Pod) {
	w.mu.Lock()
	w.pod = pod
	w.mu.Unlock()
	w.nudge()
}

// unseen reports whether the API has not shown the pod of an earlier run.
func (w *worker) unseen() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod == nil
}

// remove reports the deletion of the object; last is its last version, nil if that
// is unknown.
func (w *worker) remove(last *corev1.Pod) {
	w.mu.Lock()
	w.gone = true
	if last != nil {
		w.pod = last
	}
	w.mu.Unlock()
	w.nudge()
}

// stop ends the pod along with the agent.
func (w *worker) stop() {
	w.mu.Lock()
	w.halt = true
	w.mu.Unlock()
	w.nudge()
}

// run is the loop. It returns when the pod has ended and nothing of it is left, or
// when life ends: then the pod goes on without the agent.
func (w *worker) run() {
	ctx := w.life
	defer w.r.objects.want(w, nil)
	defer w.tasks.Wait()
	defer w.die()
	w.tasks.Go(func() { w.pub.run(ctx) })
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
		if w.done {
			return
		}
		timer.Stop()
		if !next.IsZero() {
			timer.Reset(max(0, time.Until(next)))
		}
	}
}

// step takes the next possible step and returns when to call it again, zero for
// never.
func (w *worker) step(ctx context.Context) time.Time {
	w.mu.Lock()
	pod, gone, halt := w.pod, w.gone, w.halt
	w.mu.Unlock()
	if pod == nil && !gone && !halt {
		return time.Time{} // adopted; the informer brings the object
	}
	if pod != nil {
		w.setPod(pod)
	}
	var next time.Time
	switch {
	case gone, halt, pod.DeletionTimestamp != nil:
		next = w.terminate(ctx, pod, gone, halt)
	case w.over, isOver(pod), w.rec.Failure != nil:
		next = w.finish(ctx, pod)
	default:
		next = w.advance(ctx, pod)
	}
	w.publishSnapshot(pod)
	w.publishHostPorts()
	if pod != nil && !gone && !w.done {
		st := w.state(pod).status(time.Now())
		w.phase.Store(&st.Phase)
		w.pub.set(pod, st)
	}
	return next
}

func isOver(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// setPod takes the containers from the first spec; of later ones it takes the
// images, the only part that can change.
func (w *worker) setPod(pod *corev1.Pod) {
	w.rec.UID, w.rec.Namespace, w.rec.Name = pod.UID, pod.Namespace, pod.Name
	w.rec.HostNetwork, w.rec.Static, w.rec.HostPorts = pod.Spec.HostNetwork, w.static, hostPortsOf(pod)
	w.rec.Grace = grace(pod)
	if len(w.containers) > 0 {
		for _, c := range w.containers {
			c.refresh(pod)
		}
		return
	}
	add := func(c *corev1.Container, r role) {
		k := &container{w: w, containerState: containerState{spec: c, role: r}, back: backoff{base: w.r.o.BackOff}}
		w.containers = append(w.containers, k)
		k.adopt(pod)
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if isSidecar(c) {
			add(c, roleSidecar)
		} else {
			add(c, roleInit)
		}
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], roleMain)
	}
	if w.sandbox != nil {
		w.limitAgain(pod)
	}
}

// isSidecar reports whether an init container goes on running beside the others.
func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// loadContainers takes the containers from the records on disk, for a pod whose
// object was deleted while the agent was away.
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
		c := &container{w: w, containerState: containerState{spec: &corev1.Container{Name: e.Name()}, now: &states[len(states)-1]}}
		if w.sandbox == nil {
			c.now.Exited = true
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

func (w *worker) state(pod *corev1.Pod) podState {
	known := *pod
	known.Status = w.pub.known(pod)
	v := podState{
		pod: &known, hosts: w.r.hostIPs(), ips: w.rec.Shown,
		started: w.rec.Started, sandbox: w.sandbox != nil, over: w.over, failure: w.rec.Failure,
	}
	if pod.Spec.HostNetwork && w.sandbox != nil && len(v.hosts) > 0 {
		v.ips = v.hosts
	} else if len(v.ips) == 0 {
		for _, ip := range known.Status.PodIPs {
			v.ips = append(v.ips, parseAddrs(ip.IP)...)
		}
	}
	for _, c := range w.containers {
		v.containers = append(v.containers, &c.containerState)
		v.over = v.over && !c.running() // sidecars may still be ending
	}
	return v
}

// advance takes the next step in running a pod.
func (w *worker) advance(ctx context.Context, pod *corev1.Pod) time.Time {
	if w.rec.Started.IsZero() {
		w.rec.Started = time.Now()
	}
	deadline := w.deadline(pod)
	if !deadline.IsZero() && !time.Now().Before(deadline) {
		w.fail(pod, failure{"DeadlineExceeded", "Pod was active on the node longer than the specified deadline"})
		return w.finish(ctx, pod)
	}
	return earlier(deadline, w.startPod(ctx, pod))
}

// deadline returns when spec.activeDeadlineSeconds are over, zero for never.
func (w *worker) deadline(pod *corev1.Pod) time.Time {
	if s := pod.Spec.ActiveDeadlineSeconds; s != nil {
		return w.rec.Started.Add(time.Duration(*s) * time.Second)
	}
	return time.Time{}
}

// fail records why the node ends the pod.
func (w *worker) fail(pod *corev1.Pod, why failure) {
	w.rec.Failure = &why
	if err := os.MkdirAll(w.paths.dir, 0o700); err != nil {
		w.log.Error("cannot record the end of the pod", "err", err)
	} else if err := writePod(w.paths, w.rec); err != nil {
		w.log.Error("cannot record the end of the pod", "err", err)
	}
	w.r.event(pod, corev1.EventTypeWarning, why.Reason, why.Message)
}

// startPod takes the next step in starting a pod and its containers.
func (w *worker) startPod(ctx context.Context, pod *corev1.Pod) time.Time {
	for _, c := range w.containers {
		if c.now != nil {
			continue
		}
		if err := checkContainer(&pod.Spec, c.spec); err != nil {
			c.startFailed(pod, err)
			return time.Time{} // until the object changes
		}
	}
	if w.watched == nil {
		w.r.objects.want(w, objectsOf(pod))
	}
	if w.sandbox == nil {
		if wait := time.Until(w.retryAt); wait > 0 {
			return w.retryAt
		}
		if !w.canStart(pod) {
			return time.Time{} // the runner wakes all workers when it can
		}
		if err := w.createSandbox(ctx, pod); err != nil {
			wait := max(w.retry.next(0), time.Second)
			w.retryAt = time.Now().Add(wait)
			w.log.Error("cannot start the pod; retrying", "err", err, "after", wait)
			w.r.event(pod, corev1.EventTypeWarning, "FailedCreatePodSandBox", err.Error())
			return w.retryAt
		}
	}
	if w.relink && w.canStart(pod) {
		w.relink = false
		if err := w.connect(); err != nil {
			w.log.Error("cannot connect the pod to the network again", "err", err)
		}
	}
	next, live := w.startContainers(ctx, pod)
	if !live {
		w.over = true
		return w.finish(ctx, pod)
	}
	return earlier(earlier(next, w.measure(pod)), earlier(w.refresh(ctx, pod), w.refreshVolumes(ctx, pod)))
}

// startContainers starts what may run now. live is false when every main container
// has ended for good, or an init container has failed for good.
func (w *worker) startContainers(ctx context.Context, pod *corev1.Pod) (next time.Time, live bool) {
	for _, c := range w.containers {
		if c.role == roleMain {
			break
		}
		if c.role == roleInit && c.succeeded() {
			continue
		}
		if c.failed() {
			return time.Time{}, false
		}
		next = earlier(next, c.ensure(ctx, pod))
		if c.role == roleSidecar && c.started {
			continue
		}
		return next, true // later containers wait for it
	}
	for _, c := range w.containers {
		if c.role != roleMain {
			continue
		}
		next = earlier(next, c.ensure(ctx, pod))
		if c.running() || c.waiting != nil || c.now == nil {
			live = true
		}
	}
	return next, live
}

// earlier returns the earlier of two times, where zero means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// finish ends the sidecars of a pod that is over and frees its network. Records
// and logs stay until the object is deleted.
func (w *worker) finish(ctx context.Context, pod *corev1.Pod) time.Time {
	if w.end == nil {
		w.end = &ending{at: time.Now(), grace: grace(pod)}
	}
	if next, ended := w.endContainers(ctx); !ended {
		return next
	}
	w.over = true
	w.dropSandbox(ctx)
	return time.Time{}
}

// terminate ends a pod that is being deleted, is deleted, or ends with the agent.
func (w *worker) terminate(ctx context.Context, pod *corev1.Pod, gone, halt bool) time.Time {
	if w.end == nil {
		w.end = &ending{at: time.Now(), grace: w.rec.Grace}
	}
	if pod == nil && len(w.containers) == 0 {
		w.loadContainers()
	}
	switch {
	case pod != nil && pod.DeletionGracePeriodSeconds != nil:
		w.end.shorten(time.Duration(*pod.DeletionGracePeriodSeconds) * time.Second)
	case halt:
		w.end.shorten(w.r.o.StopTimeout)
	}
	if !gone && !halt && !w.static {
		if next := w.awaitDrain(pod); !next.IsZero() {
			return next
		}
	}
	if next, ended := w.endContainers(ctx); !ended {
		return next
	}
	w.dropSandbox(ctx)
	switch {
	case gone:
		if err := removePod(w.paths); err != nil {
			w.log.Error("cannot remove the pod's state", "err", err)
		}
		w.done = true
	case halt:
		w.done = true
	default:
		w.over = true
		if pod.Spec.RestartPolicy == corev1.RestartPolicyAlways {
			for _, c := range w.containers {
				c.waiting = nil
			}
		}
		w.pub.remove(pod, w.state(pod).status(time.Now()))
	}
	return time.Time{}
}

// publishSnapshot hands the HTTPS endpoint what it may know.
func (w *worker) publishSnapshot(pod *corev1.Pod) {
	if pod == nil {
		return
	}
	now := &podSnapshot{
		namespace: pod.Namespace, name: pod.Name, created: pod.CreationTimestamp.Time, paths: w.paths, hostNetwork: pod.Spec.HostNetwork,
		client: shim.Client{Dir: w.paths.dir}, containers: map[string]containerSnapshot{},
	}
	if w.sandbox != nil && !pod.Spec.HostNetwork {
		now.netnsPID = w.sandbox.id.Pid
	}
	for _, c := range w.containers {
		k := containerSnapshot{attempt: -1, tty: c.spec.TTY, stdin: c.spec.Stdin, done: c.ended}
		if c.now != nil {
			k.attempt, k.running = c.now.Attempt, c.running()
		}
		now.containers[c.spec.Name] = k
	}
	w.snapshot.Store(now)
}

func (w *worker) String() string { return w.rec.Namespace + "/" + w.rec.Name }
