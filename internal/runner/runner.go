// Package runner runs the Pods bound to this node as ordinary processes of the
// machine, each pod in a network namespace of its own, and reports their status.
//
// The pieces, from the outside in: Runner follows the API and keeps one worker
// per pod; a worker is a loop that owns the state of its pod and takes the next
// possible step; the processes themselves belong to a shim (package shim) that
// outlives the agent. See README.md.
package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/fairlead/fairlead/internal/env"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/confine"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/systemd"
)

// Runner runs the Pods of one node.
type Runner struct {
	o    Options
	ipam *ipam
	cert certificate
	rec  *events.Recorder

	objects  *objects
	services corelisters.ServiceLister
	network  *network
	changed  chan struct{} // see Changed
	metrics  *metrics
	cgroups  *cgroups
	memory   int64 // of the machine
	uids     *uids
	static   *staticPods
	// hostPorts are those of the pods, for Options.PodsChanged.
	hostPorts *hostPorts
	oneUser   bool // there is only one user, as without root
	// warnOneUser tells of that when it matters.
	warnOneUser sync.Once
	// unmapped is why the range of users cannot be used, nil if it can.
	unmapped error
	units    *systemd.Bus

	mu      sync.Mutex
	workers map[types.UID]*worker
	// registered are the Pods that stand for programs of the machine.
	registered map[types.UID]*registered
	synced     bool // services are known
	held       bool // by Options.Hold
	running    sync.WaitGroup
	// starts holds one entry for each pod that is being started: starting a
	// process takes a core for a moment, and too many at once time out.
	starts chan struct{}
	// measures holds one entry while a volume is being measured.
	measures chan struct{}
}

// New prepares a Runner: it makes the state directory and, for an endpoint, a
// certificate if there is none yet.
func New(o Options) (*Runner, error) {
	if o.Client == nil || o.NodeName == "" || o.StateDir == "" {
		return nil, errors.New("runner: Client, NodeName and StateDir are required")
	}
	if o.Mirrors == nil {
		o.Mirrors = o.Client
	}
	if o.Device == "" {
		o.Device = "fl0"
	}
	if o.ClusterDomain == "" {
		o.ClusterDomain = "cluster.local"
	}
	if o.StopTimeout <= 0 {
		o.StopTimeout = 10 * time.Second
	}
	if o.UIDs == (UIDRange{}) {
		o.UIDs = DefaultUIDRange
	}
	if o.PodPIDs <= 0 {
		o.PodPIDs = DefaultPodPIDs
	}
	if o.BackOff <= 0 {
		o.BackOff = 10 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	dir, err := filepath.Abs(o.StateDir)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	o.StateDir = dir
	if err := os.MkdirAll(filepath.Join(dir, "pods"), 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if o.ShimCommand == nil {
		o.ShimCommand = shimCommand(dir, o.Log)
	}
	r := &Runner{
		o: o, ipam: newIPAM(), workers: map[types.UID]*worker{}, registered: map[types.UID]*registered{},
		units: systemd.NewBus(o.Log), starts: make(chan struct{}, 2*runtime.NumCPU()),
		measures: make(chan struct{}, 1), changed: make(chan struct{}, 1), metrics: newMetrics(),
		hostPorts: newHostPorts(dir, o.PodsChanged),
		cgroups:   openCgroups(dir), memory: memoryCapacity(), held: o.Hold != nil,
	}
	r.oneUser = confine.OneUser()
	if !r.oneUser && !confine.Mapped(o.UIDs.First, o.UIDs.Last) {
		r.unmapped = fmt.Errorf("--pod-uid-range %s is not within the users of the agent's own user namespace (/proc/self/uid_map)", o.UIDs)
		o.Log.Warn("cannot start Pods that are not allowed to be privileged", "err", r.unmapped)
	}
	if r.uids, err = loadUIDs(o.UIDs, dir); err != nil {
		return nil, err
	}
	// What this machine does not allow stands in the Node's conditions as well, and a
	// Pod with limits gets an Event: a start of every day is no reason to warn.
	if o.Protect {
		if err := process.SetOOMScoreAdj(os.Getpid(), protectedScore); err != nil {
			r.cgroups.unprotected = err
			o.Log.Info("cannot protect the agent when memory is short", "err", err)
		}
	}
	if r.cgroups.err != nil {
		o.Log.Info("cannot enforce limits of Pods", "err", r.cgroups.err)
	}
	r.network, r.static = newNetwork(r), newStaticPods(r, o.StaticDir)
	if o.Listener != nil {
		if o.ClientCA == nil {
			return nil, errors.New("runner: the endpoint needs ClientCA")
		}
		if r.cert, err = loadCertificate(dir, o.NodeName); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Fingerprint is the SHA-256 of the endpoint's certificate in DER form, in
// hexadecimal; empty without a Listener. It is published in
// svc.ServingCertAnnotation.
func (r *Runner) Fingerprint() string { return r.cert.fingerprint }

// Healthy returns why this node cannot run pods now, nil if it can.
func (r *Runner) Healthy() error { return r.network.healthy() }

// Condition returns the Node condition PodsRouted.
func (r *Runner) Condition() corev1.NodeCondition { return r.network.condition() }

// Masquerading returns the Node condition PodsMasqueraded.
func (r *Runner) Masquerading() corev1.NodeCondition { return r.network.masqueradeCondition() }

// Limits returns the Node condition PodsLimited.
func (r *Runner) Limits() corev1.NodeCondition { return r.cgroups.condition() }

// Confinement returns the Node condition PodsConfined.
func (r *Runner) Confinement() corev1.NodeCondition { return r.confinement() }

// Changed holds a token when what Healthy or Condition return may have changed.
func (r *Runner) Changed() <-chan struct{} { return r.changed }

// notify leaves a token for the receiver of Changed.
func (r *Runner) notify() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// WaitReady waits until pods bound to this node are started.
func (r *Runner) WaitReady(ctx context.Context) error {
	select {
	case <-r.network.up:
		return nil
	case <-ctx.Done():
		return errors.Join(ctx.Err(), r.Healthy())
	}
}

// Run runs pods until ctx ends. It returns an error if it cannot begin.
func (r *Runner) Run(ctx context.Context) error {
	lock, err := lockDir(r.o.StateDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	r.rec = events.NewRecorder(r.o.Client, corev1.EventSource{Component: "fairlead-runner", Host: r.o.NodeName}, r.o.Log)
	defer r.rec.Start()()
	if err := r.loadLastAddresses(); err != nil {
		r.o.Log.Warn("cannot read the last addresses of pods; they may be reused early", "err", err)
	}
	// Workers outlive ctx for as long as StopPods needs.
	workCtx, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	r.objects = newObjects(workCtx, r.o.Client)
	defer func() { // after the workers, which make groups
		if err := r.cgroups.release(); err != nil {
			r.o.Log.Warn("cannot take the limits from pods; systemd before 254 may not start the agent's unit again while they live", "err", err)
		}
	}()
	defer r.objects.running.Wait()
	defer r.running.Wait()
	defer stopWork()
	if err := r.adopt(workCtx); err != nil {
		return err
	}
	infCtx, stopInformers := context.WithCancel(ctx)
	var others sync.WaitGroup
	others.Go(func() { r.follow(infCtx, workCtx) })
	others.Go(func() { r.network.run(infCtx) })
	others.Go(func() { r.units.Run(infCtx) })
	others.Go(func() { r.static.run(infCtx, workCtx) })
	others.Go(func() { r.static.mirror(infCtx) })
	others.Go(func() { r.awaitHold(infCtx) })
	if r.o.Listener != nil {
		others.Go(func() { r.serve(infCtx) })
	}
	<-ctx.Done()
	r.stopRegistered()
	if r.o.StopPods {
		r.stopAll()
	}
	stopInformers()
	others.Wait()
	return nil
}

// awaitHold starts the pods that wait for Options.Hold.
func (r *Runner) awaitHold(ctx context.Context) {
	select {
	case <-r.o.Hold: // never, if it is nil
	case <-ctx.Done():
		return
	}
	r.mu.Lock()
	r.held = false
	r.mu.Unlock()
	r.each((*worker).nudge)
}

// stopAll ends all pods in parallel and removes the network.
func (r *Runner) stopAll() {
	r.mu.Lock()
	all := make([]*worker, 0, len(r.workers))
	for _, w := range r.workers {
		all = append(all, w)
	}
	r.mu.Unlock()
	for _, w := range all {
		w.stop()
	}
	ended := make(chan struct{})
	go func() { // ends with the workers, for which Run waits too
		r.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(r.o.StopTimeout + 20*time.Second):
		r.o.Log.Error("some pods did not end in time")
	}
	if err := r.network.remove(); err != nil {
		r.o.Log.Error("cannot remove the pods' network", "err", err)
	}
}

// ErrRunning is the error where an agent uses the state directory.
var ErrRunning = errors.New("in use by another fairlead agent")

// lockFile is the file of a state directory that its agent has locked, knownDir is KnownDir.
const (
	lockFile = "lock"
	knownDir = "known"
)

// lockDir locks the state directory against a second agent.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if err := fileio.Lock(f); err != nil {
		_ = f.Close()
		if errors.Is(err, fileio.ErrLocked) {
			err = ErrRunning
		}
		return nil, fmt.Errorf("%s is %w: stop that one or choose another directory", dir, err)
	}
	return f, nil
}

func (r *Runner) podDir(uid types.UID) string {
	return filepath.Join(r.o.StateDir, "pods", string(uid))
}

// start runs w until it is done.
func (r *Runner) start(w *worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.workers[w.uid] = w
	r.running.Go(func() {
		w.run()
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.workers, w.uid)
		r.static.nudge()
		r.metrics.forget(w.rec.Namespace, w.rec.Name, string(w.uid))
	})
}

// nudgeAll has every Pod take its next step.
func (r *Runner) nudgeAll() {
	r.each((*worker).nudge)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.registered {
		g.nudge()
	}
}

// each calls f with every worker.
func (r *Runner) each(f func(*worker)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.workers {
		f(w)
	}
}

// canStart reports whether what a new pod needs is known: the Services, so that
// none is missing in its environment (behaviour 71), and the node's ranges. A static pod
// does without the API server: it gets the Services that are known, and an address of the
// ranges that the node had last.
func (w *worker) canStart(pod *corev1.Pod) bool {
	r := w.r
	if w.static {
		return pod.Spec.HostNetwork || r.network.usable()
	}
	r.mu.Lock()
	synced := r.synced && !r.held
	r.mu.Unlock()
	return synced && (r.network.ready() || pod.Spec.HostNetwork && len(r.hostIPs()) > 0)
}

func (r *Runner) hostIPs() []netip.Addr { return r.network.hostIPs() }

// serviceVars returns the Service variables of a pod that starts now.
func (r *Runner) serviceVars(pod *corev1.Pod) []corev1.EnvVar {
	r.mu.Lock()
	services := r.services
	r.mu.Unlock()
	if services == nil {
		return nil // a static pod, before the API has been asked
	}
	var list []*corev1.Service
	own, err := services.Services(pod.Namespace).List(everything)
	if err == nil {
		list = own
	}
	if pod.Namespace != corev1.NamespaceDefault {
		if api, err := services.Services(corev1.NamespaceDefault).Get("kubernetes"); err == nil {
			list = append(list, api)
		}
	}
	links := pod.Spec.EnableServiceLinks == nil || *pod.Spec.EnableServiceLinks
	return env.For(pod.Namespace, list, links)
}

func (r *Runner) event(pod *corev1.Pod, kind, reason, message string) {
	r.rec.Event(pod, kind, reason, message)
}
