package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/runner/probe"
	"github.com/fairlead/fairlead/internal/runner/program"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// statusRegistered is the reason in the status of a registered Pod; tables show it.
const statusRegistered = "Registered"

// registered is a Pod that stands for a program which this node does not start: it is
// checked, and its readiness kept. docs/design/010-registered-programs.md.
type registered struct {
	r    *Runner
	uid  types.UID
	log  *slog.Logger
	pub  *publisher
	life context.Context
	end  context.CancelFunc
	// tasks are those that run with life.
	tasks sync.WaitGroup

	wake  chan struct{}
	mu    sync.Mutex
	inbox []func()
	pod   *corev1.Pod
	gone  bool

	// The fields below belong to the goroutine of run.
	watching bool
	program  program.State
	known    bool // program is not the zero value
	since    time.Time
	restarts int32
	ready    bool
	probes   context.CancelFunc
	probed   netip.Addr // the address that probes go to
	stop     stopOfUnit
	done     bool
}

// register hands a registered Pod to its goroutine, which it starts if there is none.
func (r *Runner) register(ctx context.Context, pod *corev1.Pod) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.registered[pod.UID]
	if g == nil {
		g = &registered{
			r: r, uid: pod.UID, wake: make(chan struct{}, 1),
			log: r.o.Log.With("namespace", pod.Namespace, "pod", pod.Name, "uid", string(pod.UID)),
		}
		g.life, g.end = context.WithCancel(ctx)
		g.pub = newPublisher(r.o.Client, g.log, r.o.PodsChanged)
		r.registered[pod.UID] = g
		r.running.Go(func() {
			g.run()
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.registered, g.uid)
		})
	}
	g.set(pod, false)
}

// deregister reports that the object of a registered Pod is gone.
func (r *Runner) deregister(pod *corev1.Pod) {
	r.mu.Lock()
	g := r.registered[pod.UID]
	r.mu.Unlock()
	if g != nil {
		g.set(pod, true)
	}
}

// stopRegistered ends what keeps registered Pods; the programs and the objects stay.
func (r *Runner) stopRegistered() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.registered {
		g.end()
	}
}

func (g *registered) set(pod *corev1.Pod, gone bool) {
	g.mu.Lock()
	g.pod, g.gone = pod, g.gone || gone
	g.mu.Unlock()
	g.nudge()
}

func (g *registered) nudge() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// post has the loop call f.
func (g *registered) post(f func()) {
	g.mu.Lock()
	g.inbox = append(g.inbox, f)
	g.mu.Unlock()
	g.nudge()
}

func (g *registered) run() {
	defer g.tasks.Wait()
	defer g.end()
	defer func() { g.stopping("") }()
	g.tasks.Go(func() { g.pub.run(g.life) })
	for !g.done {
		select {
		case <-g.life.Done():
			return
		case <-g.wake:
		}
		g.mu.Lock()
		inbox, pod, gone := g.inbox, g.pod, g.gone
		g.inbox = nil
		g.mu.Unlock()
		for _, f := range inbox {
			f()
		}
		if gone {
			return
		}
		g.step(pod)
	}
}

// step brings the checks and the status in line with what is known.
func (g *registered) step(pod *corev1.Pod) {
	if pod.DeletionTimestamp != nil {
		g.stopProbes()
		g.ready = false
		g.pub.remove(pod, g.status(pod, nil))
		return
	}
	if err := g.check(pod); err != nil {
		g.pub.set(pod, g.status(pod, err))
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
	ips := g.addresses(pod)
	switch {
	case !g.program.Up || len(ips) == 0:
		g.stopProbes()
	case g.probes == nil || ips[0] != g.probed:
		g.stopProbes()
		g.startProbes(pod, ips[0])
	}
	g.pub.set(pod, g.status(pod, nil))
	g.release(pod)
}

// check returns why a Pod is not kept. The API server has checked all of it, if it is ours.
func (g *registered) check(pod *corev1.Pod) error {
	if errs := registration.Validate(pod); len(errs) > 0 {
		return errs[0]
	}
	if confined(pod) {
		return fmt.Errorf("a Pod of the image %s must be allowed to be privileged", registration.Image)
	}
	return nil
}

func (g *registered) watcher(pod *corev1.Pod) program.Watcher {
	if unit := pod.Annotations[registration.UnitAnnotation]; unit != "" {
		return program.Unit(g.r.units, unit)
	}
	if file := pod.Annotations[registration.PIDFileAnnotation]; file != "" {
		return program.PIDFile(file)
	}
	return program.Always
}

// addresses are those of the program.
func (g *registered) addresses(pod *corev1.Pod) []netip.Addr {
	if a := registration.Address(pod); a.IsValid() {
		return []netip.Addr{a}
	}
	return g.r.hostIPs()
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
		if st.State.Running != nil && st.ContainerID == containerID(&shim.State{ID: g.containerID()}) {
			g.ready, g.since = st.Ready, st.State.Running.StartedAt.Time
			g.program, g.known = program.State{Up: true}, true
		}
	}
}

// observe takes in what the watcher reports.
func (g *registered) observe(s program.State) {
	if s.Unknown && g.known {
		return // what was known last is the best there is
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
	g.r.event(g.object(), corev1.EventTypeWarning, s.Reason, s.Message)
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
				g.r.event(g.object(), corev1.EventTypeWarning, "Unhealthy", fmt.Sprintf("Readiness probe failed: %v", err))
			})
		},
	}
	g.tasks.Go(func() {
		defer cancel()
		watcher.Run(ctx, func(ctx context.Context) error {
			begin := time.Now()
			err := target.Once(ctx, p.ProbeHandler)
			g.r.metrics.probed(pod, c.Name, "Readiness", time.Since(begin), err)
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
	_ = process.SetOOMScoreAdj(pid, 0) // the agent's own protects the agent alone
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

// limitedBuffer keeps the first maxCapture bytes that are written.
type limitedBuffer []byte

func (b *limitedBuffer) Write(p []byte) (int, error) {
	*b = append(*b, p[:min(len(p), maxCapture-len(*b))]...)
	return len(p), nil
}

// status is that of a Pod with one container, which runs while the program is up. refused
// is why the Pod is not kept.
func (g *registered) status(pod *corev1.Pod, refused error) corev1.PodStatus {
	c := containerState{spec: &pod.Spec.Containers[0], started: g.program.Up, ready: g.ready && g.program.Up}
	known := *pod
	known.Status = g.pub.known(pod)
	v := podState{pod: &known, hosts: g.r.hostIPs(), containers: []*containerState{&c}, started: pod.CreationTimestamp.Time}
	if refused != nil {
		c.ready, c.started = false, false
		c.waiting = &corev1.ContainerStateWaiting{Reason: "CreateContainerConfigError", Message: refused.Error()}
		return v.status(time.Now())
	}
	v.sandbox, v.ips = true, g.addresses(pod)
	c.now = &shim.State{Name: c.spec.Name, Attempt: int(g.restarts), ID: g.containerID(), Started: g.since, Exited: !g.program.Up}
	if !g.program.Up {
		c.waiting = &corev1.ContainerStateWaiting{Reason: g.program.Reason, Message: g.program.Message}
	}
	st := v.status(time.Now())
	st.ContainerStatuses[0].LastTerminationState = corev1.ContainerState{} // how it ended is not known
	st.Reason, st.Message = statusRegistered, "the node checks this program and does not start it"
	g.drainCondition(&st)
	return st
}

// registeredHere reports whether a Pod of this name is registered on this node.
func (r *Runner) registeredHere(namespace, name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.registered {
		if p := g.object(); p.Namespace == namespace && p.Name == name {
			return true
		}
	}
	return false
}

// ofRegistered reports whether a status is to be written whole: its reason is the node's.
func ofRegistered(st *corev1.PodStatus) bool { return st.Reason == statusRegistered }
