package pod

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/logfile"
	"github.com/fairlead/fairlead/internal/runner/podnet"
	"github.com/fairlead/fairlead/internal/runner/status"
	"github.com/fairlead/fairlead/internal/runner/volumes"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options are what Pods need of their node. All but ClusterDNS, Found and Ended is required.
type Options struct {
	Client kubernetes.Interface
	// Dir has a directory for each Pod.
	Dir         string
	ShimCommand []string
	LogLimit    logfile.Limit
	// Images are the programs that stand for images.
	Images        podspec.Images
	ClusterDNS    []netip.Addr
	ClusterDomain string
	// BackOff is the delay before the second restart of a container.
	BackOff time.Duration
	// StopTimeout bounds the grace periods of Pods that end with the agent, DrainWait the wait for nodes before a Pod
	// ends that is being deleted.
	StopTimeout, DrainWait time.Duration

	Network     *podnet.Network
	HostPorts   *podnet.HostPorts
	Confinement *confinement.Confinement
	Groups      *confinement.Groups
	Metrics     *Metrics
	Events      *events.Recorder

	// MayStart reports whether Pods of the API server may start. When that changes, Nudge is called.
	MayStart func() bool
	// ServiceVars are the Service variables of a Pod that starts now.
	ServiceVars func(*corev1.Pod) []corev1.EnvVar
	// Selected reports whether a Service selects a Pod.
	Selected func(*corev1.Pod) bool
	// Found is called after what Own returns has changed, Ended after a Pod has ended and nothing of it is left.
	Found, Ended func()
	// Outage is the node's; after a change of it Publish is called.
	Outage *status.Outage
	Log    *slog.Logger
}

// node is what the workers of a node share.
type node struct {
	Options
	objects *volumes.Objects
	ports   *nodePorts
	// starts holds one entry for each Pod that is being started: starting a process takes a core for a moment, and too
	// many at once time out.
	starts chan struct{}
	// measures holds one entry while a volume is being measured.
	measures chan struct{}
	memory   int64 // of the machine
}

func (n *node) podDir(uid types.UID) string { return filepath.Join(n.Dir, string(uid)) }

// Pods are the Pods that this node runs. Its methods are safe for concurrent use.
type Pods struct {
	node *node

	mu      sync.Mutex
	workers map[types.UID]*worker
	running sync.WaitGroup
	life    context.Context // of the workers, set by Begin
}

// New returns a Pods that runs nothing before Begin.
func New(o Options) *Pods {
	return &Pods{workers: map[types.UID]*worker{}, node: &node{
		Options: o, objects: volumes.NewObjects(o.Client), starts: make(chan struct{}, 2*runtime.NumCPU()), measures: make(chan struct{}, 1),
		memory: confinement.MachineMemory(), ports: &nodePorts{held: map[types.UID]heldPorts{}},
	}}
}

// Begin adopts the Pods of an earlier run. All Pods are followed until ctx ends; their processes go on.
func (p *Pods) Begin(ctx context.Context) error {
	p.mu.Lock()
	p.life = ctx
	p.mu.Unlock()
	p.node.objects.Begin(ctx)
	return p.adopt(ctx)
}

// Wait waits for the end of all workers.
func (p *Pods) Wait() {
	p.running.Wait()
	p.node.objects.Wait()
}

// start runs w until it has nothing left to do. The caller holds mu.
func (p *Pods) start(w *worker) {
	p.workers[w.uid] = w
	p.running.Go(func() {
		w.run()
		p.mu.Lock()
		delete(p.workers, w.uid)
		p.mu.Unlock()
		p.node.Metrics.forget(w.rec.Namespace, w.rec.Name, string(w.uid))
		if p.node.Ended != nil {
			p.node.Ended()
		}
	})
}

// each calls f with every worker.
func (p *Pods) each(f func(*worker)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range p.workers {
		f(w)
	}
}

// Nudge has every Pod take its next step.
func (p *Pods) Nudge() { p.each(func(w *worker) { w.wake.Set() }) }

// Update takes in a Pod of the API server, or a new version of one, and starts it.
func (p *Pods) Update(pod *corev1.Pod) { p.update(pod, false) }

// UpdateStatic takes in the Pod of a file, as Update does.
func (p *Pods) UpdateStatic(pod *corev1.Pod) { p.update(pod, true) }

func (p *Pods) update(pod *corev1.Pod, static bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.workers[pod.UID]
	if w != nil {
		w.update(pod)
		return
	}
	w = newWorker(p.life, p.node, pod.UID, pod.Namespace, pod.Name)
	w.static, w.pub.Static = static, static
	w.update(pod)
	p.start(w)
}

// Remove ends a Pod whose object is gone; last is its last version, nil if that is unknown.
func (p *Pods) Remove(uid types.UID, last *corev1.Pod) {
	p.node.ports.release(uid) // at once: the next Pod may be here before this one has ended
	if w := p.worker(uid); w != nil {
		w.remove(last)
	}
}

func (p *Pods) worker(uid types.UID) *worker {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.workers[uid]
}

// Static returns the UIDs of the static Pods that run, by NAMESPACE/NAME.
func (p *Pods) Static() map[string]types.UID {
	out := map[string]types.UID{}
	p.each(func(w *worker) {
		if w.static {
			out[w.namespace+"/"+w.name] = w.uid
		}
	})
	return out
}

// Mirror has the status of a static Pod written to its mirror.
func (p *Pods) Mirror(uid types.UID, mirror *corev1.Pod) {
	if w := p.worker(uid); w != nil {
		w.pub.Mirror(mirror, uid)
	}
}

// Snapshots returns the snapshot of each Pod.
func (p *Pods) Snapshots() (out []*Snapshot) {
	p.each(func(w *worker) {
		if s := w.current(); s != nil {
			out = append(out, s)
		}
	})
	return out
}

// Publish has the statuses of the Pods written again where they must differ.
func (p *Pods) Publish() { p.each(func(w *worker) { w.pub.Nudge() }) }

// Own adds what the node has found out of its Pods, by the UIDs that the API has for them.
func (p *Pods) Own(to map[string]svc.OwnPod) { p.each(func(w *worker) { w.pub.Own(to) }) }

// Has reports whether the node has a Pod of a namespace.
func (p *Pods) Has(namespace string) bool {
	found := false
	p.each(func(w *worker) { found = found || w.namespace == namespace })
	return found
}

// Stop ends all Pods in parallel, within StopTimeout and some seconds.
func (p *Pods) Stop() {
	p.each((*worker).stop)
	ended := make(chan struct{})
	go func() { // ends with the workers, for which Wait waits too
		p.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(p.node.StopTimeout + 20*time.Second):
		p.node.Log.Error("some pods did not end in time")
	}
}

// orphanRetry is the time between two tries to find out whether a Pod's object is gone.
const orphanRetry = 5 * time.Second

// DropOrphans ends the Pods of an earlier run whose objects are gone. The first list of an informer may be the last
// known state (package offline), so it asks for the latest; selector selects the Pods of this node.
func (p *Pods) DropOrphans(ctx context.Context, selector metav1.ListOptions) {
	var orphans []*worker
	p.each(func(w *worker) {
		if !w.static && w.object() == nil {
			orphans = append(orphans, w)
		}
	})
	if len(orphans) == 0 {
		return
	}
	logged := ""
	api := p.node.Client.CoreV1().Pods(metav1.NamespaceAll)
	list, err := api.List(ctx, selector)
	for ; err != nil; list, err = api.List(ctx, selector) {
		if logged != err.Error() {
			logged = err.Error()
			p.node.Log.Warn("cannot list this node's pods; keeping those without an object; retrying in "+orphanRetry.String(), "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(orphanRetry):
		}
	}
	exists := map[types.UID]bool{}
	for i := range list.Items {
		exists[list.Items[i].UID] = true
	}
	for _, w := range orphans {
		if !exists[w.uid] && w.object() == nil {
			w.remove(nil)
		}
	}
}

// Describe implements prometheus.Collector.
func (p *Pods) Describe(out chan<- *prometheus.Desc) { p.node.Metrics.describe(out) }

// Collect implements prometheus.Collector.
func (p *Pods) Collect(out chan<- prometheus.Metric) {
	p.node.Metrics.collect(out, p.Snapshots(), p.node.Groups)
	forged, err := p.node.Network.Sources.Forged()
	if err != nil {
		p.node.Log.Warn("cannot read the counts of packets with forged sources", "err", err)
		return
	}
	p.node.Metrics.collectForged(out, forged)
}
