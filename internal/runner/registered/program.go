// Package registered keeps the Pods that stand for programs of the machine, which the node checks and does not start.
package registered

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/probe"
	"github.com/fairlead/fairlead/internal/runner/program"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/runner/status"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/systemd"
)

// Options are what registered programs need of their node.
type Options struct {
	Client  kubernetes.Interface
	Units   *systemd.Bus
	HostIPs func() []netip.Addr
	// Schedulable reports whether this node is known and not cordoned. After a change of it Nudge is called.
	Schedulable func() bool
	// Selected reports whether a Service selects a Pod.
	Selected func(*corev1.Pod) bool
	// Probed counts a probe.
	Probed func(pod *corev1.Pod, container, kind string, took time.Duration, err error)
	Events *events.Recorder
	// Found is called after what Own returns has changed.
	Found func()
	// Outage is the node's; after a change of it Publish is called.
	Outage *status.Outage
	Log    *slog.Logger
}

// Programs are the Pods that stand for programs of the machine. Its methods are safe for concurrent use.
type Programs struct {
	o       Options
	mu      sync.Mutex
	all     map[types.UID]*registered
	running sync.WaitGroup
}

// New returns Programs without Pods.
func New(o Options) *Programs {
	return &Programs{o: o, all: map[types.UID]*registered{}}
}

// Update takes in a registered Pod, or a new version of it. It is followed until ctx ends.
func (p *Programs) Update(ctx context.Context, pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.all[pod.UID]
	if g == nil {
		g = p.start(ctx, pod)
	}
	g.set(pod, false)
}

// start follows a new Pod. The caller holds mu.
func (p *Programs) start(ctx context.Context, pod *corev1.Pod) *registered {
	g := &registered{
		o: &p.o, uid: pod.UID, wake: loop.NewSignal(),
		log: p.o.Log.With("namespace", pod.Namespace, "pod", pod.Name, "uid", string(pod.UID)),
	}
	g.life, g.end = context.WithCancel(ctx)
	g.pub = status.NewPublisher(p.o.Client, g.log, p.o.Found, p.o.Outage)
	p.all[pod.UID] = g
	p.running.Go(func() {
		g.run()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.all, g.uid)
	})
	return g
}

// Remove takes in the deletion of a Pod, registered or not.
func (p *Programs) Remove(pod *corev1.Pod) {
	p.mu.Lock()
	g := p.all[pod.UID]
	p.mu.Unlock()
	if g != nil {
		g.set(pod, true)
	}
}

// Stop ends following the Pods; the programs and the objects stay. Wait waits until it has ended.
func (p *Programs) Stop() { p.each(func(g *registered) { g.end() }) }

// Wait waits until no Pod is followed.
func (p *Programs) Wait() { p.running.Wait() }

// Nudge has every Pod looked at again.
func (p *Programs) Nudge() { p.each(func(g *registered) { g.wake.Set() }) }

// Publish has the statuses of the Pods written again where they must differ.
func (p *Programs) Publish() { p.each(func(g *registered) { g.pub.Nudge() }) }

// Own adds what the node has found out of the programs, by the UIDs of their Pods.
func (p *Programs) Own(to map[string]svc.OwnPod) { p.each(func(g *registered) { g.pub.Own(to) }) }

// Has reports whether a Pod of this name is registered on this node.
func (p *Programs) Has(namespace, name string) bool {
	found := false
	p.each(func(g *registered) {
		pod := g.object()
		found = found || pod.Namespace == namespace && pod.Name == name
	})
	return found
}

func (p *Programs) each(f func(*registered)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.all {
		f(g)
	}
}

// registered is a Pod that stands for a program which this node does not start: it is
// checked, and its readiness kept. docs/design/010-registered-programs.md.
type registered struct {
	o    *Options
	uid  types.UID
	log  *slog.Logger
	pub  *status.Publisher
	life context.Context
	end  context.CancelFunc
	// tasks run with life.
	tasks sync.WaitGroup

	wake    loop.Signal
	mu      sync.Mutex
	inbox   []func()
	pod     *corev1.Pod
	deleted bool

	// The fields below belong to the goroutine of run.
	watching bool
	program  program.State
	known    bool // program is not the zero value
	since    time.Time
	restarts int32
	ready    bool
	returned bool // as of svc.ProgramReturned
	probes   context.CancelFunc
	probed   netip.Addr // the address that probes go to
	stop     stopOfUnit
}

func (g *registered) set(pod *corev1.Pod, deleted bool) {
	g.mu.Lock()
	g.pod, g.deleted = pod, g.deleted || deleted
	g.mu.Unlock()
	g.wake.Set()
}

// post has the loop call f.
func (g *registered) post(f func()) {
	g.mu.Lock()
	g.inbox = append(g.inbox, f)
	g.mu.Unlock()
	g.wake.Set()
}

func (g *registered) run() {
	defer g.tasks.Wait()
	defer g.end()
	defer func() { g.stopping("") }()
	g.tasks.Go(func() { g.pub.Run(g.life) })
	for {
		select {
		case <-g.life.Done():
			return
		case <-g.wake:
		}
		g.mu.Lock()
		inbox, pod, deleted := g.inbox, g.pod, g.deleted
		g.inbox = nil
		g.mu.Unlock()
		for _, f := range inbox {
			f()
		}
		if deleted {
			return
		}
		g.step(pod)
	}
}

// step brings the checks and the status in line with the Pod and the state of the program.
func (g *registered) step(pod *corev1.Pod) {
	if pod.DeletionTimestamp != nil {
		g.stopProbes()
		g.ready = false
		g.pub.Remove(pod, g.status(pod, nil))
		return
	}
	if err := g.check(pod); err != nil {
		g.pub.Set(pod, g.status(pod, err))
		return
	}
	if !g.watching {
		g.watching = true
		g.adopt(pod)
		watch := g.watcher(pod)
		g.tasks.Go(func() { watch(g.life, func(s program.State) { g.post(func() { g.observe(s) }) }) })
	}
	if !g.known {
		return // the watcher reports at once
	}
	g.returned = g.returned || hasReturned(&pod.Status) || g.o.Schedulable()
	ips := g.addresses(pod)
	switch {
	case !g.program.Up || len(ips) == 0:
		g.stopProbes()
	case g.probes == nil || ips[0] != g.probed:
		g.stopProbes()
		g.startProbes(pod, ips[0])
	}
	g.pub.Set(pod, g.status(pod, nil))
	g.release(pod)
}

// hasReturned reports whether a status has the condition svc.ProgramReturned.
func hasReturned(st *corev1.PodStatus) bool {
	return slices.ContainsFunc(st.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == svc.ProgramReturned && c.Status == corev1.ConditionTrue
	})
}

// state returns the state of the program for Services: one that a drain has taken out is not up before its return.
func (g *registered) state(pod *corev1.Pod) program.State {
	if pod.Annotations[svc.EvictedAnnotation] == "" || g.returned || !g.program.Up {
		return g.program
	}
	return program.State{Reason: "Evicted", Message: fmt.Sprintf("node %[1]s is cordoned: it is an endpoint again after "+
		"'kubectl uncordon %[1]s'", pod.Spec.NodeName)}
}

// check returns why a Pod is not kept. The API server has checked all of it, if it is ours.
func (g *registered) check(pod *corev1.Pod) error {
	if errs := registration.Validate(pod); len(errs) > 0 {
		return errs[0]
	}
	if confinement.Confined(pod) {
		return fmt.Errorf("a Pod of the image %s must be allowed to be privileged", svc.RegisteredImage)
	}
	return nil
}

func (g *registered) watcher(pod *corev1.Pod) program.Watcher {
	if unit := pod.Annotations[svc.UnitAnnotation]; unit != "" {
		return program.Unit(g.o.Units, unit)
	}
	if file := pod.Annotations[svc.PIDFileAnnotation]; file != "" {
		return program.PIDFile(file)
	}
	return program.Always
}

// addresses are the addresses of the program.
func (g *registered) addresses(pod *corev1.Pod) []netip.Addr {
	if a := registration.Address(pod); a.IsValid() {
		return []netip.Addr{a}
	}
	return g.o.HostIPs()
}

// containerID names a program in this boot: what an earlier agent has found out counts
// until this one knows better, but not after the machine was started again.
func (g *registered) containerID() string {
	return "registered-" + string(g.uid) + "-" + process.BootID()
}

// adopt takes over what an earlier agent has written in this boot.
func (g *registered) adopt(pod *corev1.Pod) {
	for i := range pod.Status.ContainerStatuses {
		st := &pod.Status.ContainerStatuses[i]
		g.restarts = st.RestartCount
		if st.State.Running != nil && st.ContainerID == status.ContainerID(&shim.State{ID: g.containerID()}) {
			g.ready, g.since = st.Ready, st.State.Running.StartedAt.Time
			g.program, g.known = program.State{Up: true}, true
		}
	}
}

// observe takes in what the watcher reports.
func (g *registered) observe(s program.State) {
	if s.Unknown && g.known {
		return // the last known state is the best one
	}
	was := g.program
	known := g.known
	g.program, g.known = s, true
	g.stopping(s.Stopping)
	if s == was && known {
		return
	}
	if s.Up {
		if known && !g.since.IsZero() {
			g.restarts++
		}
		g.since = time.Now()
		g.log.Info("the registered program is up")
		return
	}
	g.stopProbes()
	g.ready = false
	g.log.Info("the registered program is not up", "reason", s.Reason, "message", s.Message)
	g.o.Events.Event(g.object(), corev1.EventTypeWarning, s.Reason, s.Message)
}

func (g *registered) object() *corev1.Pod {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.pod
}

func (g *registered) startProbes(pod *corev1.Pod, ip netip.Addr) {
	ctx, cancel := context.WithCancel(g.life)
	g.probes, g.probed = cancel, ip
	c := &pod.Spec.Containers[0]
	p := c.ReadinessProbe
	if p == nil {
		g.ready = true
		return
	}
	// now has f called on the loop while these probes count.
	now := func(f func()) {
		g.post(func() {
			if ctx.Err() == nil {
				f()
			}
		})
	}
	target := probe.Target{IP: ip, Ports: c.Ports, Exec: execHere}
	watcher := probe.Watcher{
		Probe: p, Since: g.since, Eager: true,
		Answer: func(ok bool) { now(func() { g.ready = ok }) },
		Failed: func(err error) {
			now(func() {
				g.o.Events.Event(g.object(), corev1.EventTypeWarning, "Unhealthy", fmt.Sprintf("Readiness probe failed: %v", err))
			})
		},
	}
	g.tasks.Go(func() {
		defer cancel()
		watcher.Run(ctx, func(ctx context.Context) error {
			begin := time.Now()
			err := target.Once(ctx, p.ProbeHandler)
			g.o.Probed(pod, c.Name, "Readiness", time.Since(begin), err)
			return err
		})
	})
}

func (g *registered) stopProbes() {
	if g.probes != nil {
		g.probes()
		g.probes = nil
	}
}

// checkEnv are the variables of the agent that the command of a check has, too.
var checkEnv = []string{"PATH", "HOME", "USER", "LANG", "TZ"}

// execHere runs the command of a check as the agent's user, on the machine itself: a Pod
// that may be privileged may do that anyway. What is left of its process group when it
// ends is killed.
func execHere(ctx context.Context, args []string) (int, []byte, error) {
	if len(args) == 0 {
		return 0, nil, errors.New("the check has no command")
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	for _, name := range checkEnv {
		if v, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return process.KillGroup(cmd.Process.Pid) }
	cmd.WaitDelay = 100 * time.Millisecond // a child left behind may hold the pipe
	var out limitedBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	pid := cmd.Process.Pid
	_ = process.SetOOMScoreAdj(pid, 0) // the agent's own score only protects the agent
	if id, err := process.Find(pid); err == nil {
		_ = id.Wait(context.Background()) // no longer than ctx, which kills it
	}
	_ = process.KillGroup(pid) // what it has left behind; the ID is its own until it is waited for
	err := cmd.Wait()
	if cmd.ProcessState != nil && cmd.ProcessState.Exited() {
		return cmd.ProcessState.ExitCode(), out, nil
	}
	return 0, out, err
}

// limitedBuffer keeps the first probe.MaxOutput bytes that are written.
type limitedBuffer []byte

func (b *limitedBuffer) Write(p []byte) (int, error) {
	*b = append(*b, p[:min(len(p), probe.MaxOutput-len(*b))]...)
	return len(p), nil
}

// status is that of a Pod with one container, which runs while the program is up. refused
// is why the Pod is not kept.
func (g *registered) status(pod *corev1.Pod, refused error) corev1.PodStatus {
	state := g.state(pod)
	c := status.Container{Spec: &pod.Spec.Containers[0], Started: state.Up, Ready: g.ready && state.Up}
	known := *pod
	known.Status = g.pub.Known(pod)
	v := status.Pod{Pod: &known, HostIPs: g.o.HostIPs(), Containers: []*status.Container{&c}, Started: pod.CreationTimestamp.Time}
	if refused != nil {
		c.Ready, c.Started = false, false
		c.Waiting = &corev1.ContainerStateWaiting{Reason: "CreateContainerConfigError", Message: refused.Error()}
		return v.Status(time.Now())
	}
	v.Sandbox, v.IPs = true, g.addresses(pod)
	c.Now = &shim.State{Name: c.Spec.Name, Attempt: int(g.restarts), ID: g.containerID(), Started: g.since, Exited: !state.Up}
	if !state.Up {
		c.Waiting = &corev1.ContainerStateWaiting{Reason: state.Reason, Message: state.Message}
	}
	st := v.Status(time.Now())
	st.ContainerStatuses[0].LastTerminationState = corev1.ContainerState{} // how it ended is not known
	st.Reason, st.Message = status.ReasonRegistered, "the node checks this program and does not start it"
	if pod.Annotations[svc.EvictedAnnotation] != "" && g.returned && !hasReturned(&st) {
		st.Conditions = append(st.Conditions, corev1.PodCondition{
			Type: svc.ProgramReturned, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now(),
		})
	}
	g.drainCondition(&st)
	return st
}
