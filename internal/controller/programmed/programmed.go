// Package programmed reports on Services and Pods whether all nodes have programmed their last change
// (docs/design/013-programmed-barrier.md).
package programmed

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/selection"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// programmed waits, for others, until all nodes have programmed something (package
// barrier): that Pods which are being deleted get no new connections any more, and the
// present state of Services that ask for it. It writes what it waits for into one Lease,
// reads what the nodes report, and writes the outcome into the Pod or the Service: for
// any number of changes at once that is one write and one report a node.
type programmed struct {
	*kit.Kit
	index *selection.Index
	// store has the EndpointSlices by bySliceOwner. It is the informer's: what an event
	// tells of is in it.
	store cache.Indexer
	pods  *loop.Loop[svc.Name] // Pods to write the condition Drained of
	asks  *loop.Loop[svc.Name] // Services with barrier.AskAnnotation
	wake  loop.Signal

	mu    sync.Mutex
	nodes map[string]*nodeReport
	// drains are the Pods that wait, byService their names by the Services that select them.
	drains    map[svc.Name]*drain
	byService map[svc.Name]map[svc.Name]bool
	services  map[svc.Name]*ask
	pending   map[svc.Name]*ask // services that wait
	// deleted is the newest version of a deleted slice of a Service that is waited for.
	deleted   map[svc.Name]uint64
	published barrier.Versions // what is awaited, as the nodes see it
	last      time.Time        // when it was written
}

// nodeReport is what is known of a node.
type nodeReport struct {
	versions barrier.Versions
	reports  bool
	// agent is set for a node of fairlead's own, whose runner waits for Drained. drains is set for another one if a kubelet's
	// requests wait for that.
	agent, drains bool
	rejected      []string
	// more is set if it rejects Services that it does not name.
	more    bool
	renewed string
	seen    time.Time // when this process saw it renewed
	lasts   time.Duration
	behind  time.Time // since when it does not cover what is published; zero if it does
	late    bool      // that was logged
	// highest are the newest versions that it has ever reported.
	highest barrier.Versions
}

const (
	// reportPace is the least time between two things to wait for; for every node that
	// reports it is reportPacePerNode at least, so that all nodes together report at most
	// 2,000 times a second.
	reportPace        = 50 * time.Millisecond
	reportPacePerNode = 500 * time.Microsecond
	// lateAfter is how long a node may be behind before that is logged.
	lateAfter = time.Second
	// laggardAfter is how long a node may be behind before Pods no longer wait for it.
	laggardAfter = 10 * time.Second
	// defaultLease is how long a Lease lasts that does not tell, and at most.
	defaultLease = 40 * time.Second
)

// New returns the controller.
func New(k *kit.Kit, name string, index *selection.Index) (kit.Task, error) {
	c := &programmed{
		Kit: k, index: index, wake: loop.NewSignal(),
		nodes: map[string]*nodeReport{}, drains: map[svc.Name]*drain{}, byService: map[svc.Name]map[svc.Name]bool{},
		services: map[svc.Name]*ask{}, pending: map[svc.Name]*ask{}, deleted: map[svc.Name]uint64{},
	}
	c.pods = loop.New(k.Log, name+"-pods", k.Workers, c.syncPod)
	c.asks = loop.New(k.Log, name, k.Workers, c.syncService)
	if err := k.Handle(k.Informers.Core().V1().Pods().Informer(), kit.Handlers(c.podChanged, c.podDeleted)); err != nil {
		return nil, err
	}
	if err := k.Handle(k.Informers.Core().V1().Services().Informer(), kit.Handlers(c.serviceChanged, c.serviceDeleted)); err != nil {
		return nil, err
	}
	slices := k.Informers.Discovery().V1().EndpointSlices().Informer()
	if err := slices.AddIndexers(cache.Indexers{bySliceOwner: func(o any) ([]string, error) {
		owner, ok := kit.ServiceOf(o.(*discoveryv1.EndpointSlice))
		if !ok {
			return nil, nil
		}
		return []string{owner.String()}, nil
	}}); err != nil {
		return nil, err
	}
	c.store = slices.GetIndexer()
	if err := k.Handle(slices, kit.Handlers(c.sliceChanged, c.sliceDeleted)); err != nil {
		return nil, err
	}
	beats := k.Narrow(corev1.NamespaceNodeLease, "").Coordination().V1().Leases().Informer()
	if err := k.Handle(beats, kit.Handlers(c.heartbeat, c.heartbeatDeleted)); err != nil {
		return nil, err
	}
	own := k.Narrow(barrier.Namespace, barrier.ReportLabel)
	if err := k.Handle(own.Coordination().V1().Leases().Informer(), kit.Handlers(c.ownReport, c.ownReportDeleted)); err != nil {
		return nil, err
	}
	return kit.Together(c.pods.Run, c.asks.Run, c.run), nil
}

// report changes what is known of a node.
func (c *programmed) report(name string, change func(*nodeReport)) {
	c.mu.Lock()
	n := c.nodes[name]
	if n == nil {
		n = &nodeReport{seen: time.Now(), lasts: defaultLease}
		c.nodes[name] = n
	}
	before := n.versions
	was, rejected, more := n.reports, n.rejected, n.more
	change(n)
	if !n.highest.Covers(n.versions) {
		n.behind = time.Time{} // it moves on, behind what moves as well
		n.highest = n.highest.Max(n.versions)
	}
	moved := n.versions != before || n.reports != was || !slices.Equal(n.rejected, rejected) || n.more != more
	c.mu.Unlock()
	if moved {
		c.wake.Set()
	}
}

// heartbeat takes the Lease of a node, which has the report of fairlead's own.
func (c *programmed) heartbeat(l *coordinationv1.Lease) {
	c.report(l.Name, func(n *nodeReport) {
		if at := kit.Renewal(l); at != n.renewed {
			n.renewed, n.seen = at, time.Now()
		}
		if s := l.Spec.LeaseDurationSeconds; s != nil {
			n.lasts = min(time.Duration(*s)*time.Second, defaultLease)
		}
		if _, ok := l.Annotations[barrier.ProgrammedAnnotation]; ok || n.agent {
			n.take(l)
			n.agent = n.reports
		}
	})
}

func (n *nodeReport) take(l *coordinationv1.Lease) {
	n.versions, n.reports = barrier.ParseReport(l.Annotations[barrier.ProgrammedAnnotation])
	n.rejected, n.more = nil, false
	if text := l.Annotations[barrier.RejectedAnnotation]; text != "" {
		n.rejected = strings.SplitN(text, ",", barrier.MaxRejected+1)
	}
	if len(n.rejected) > barrier.MaxRejected {
		n.rejected, n.more = n.rejected[:barrier.MaxRejected], true
	}
}

func (c *programmed) heartbeatDeleted(l *coordinationv1.Lease) {
	c.mu.Lock()
	delete(c.nodes, l.Name)
	c.mu.Unlock()
	c.wake.Set()
}

// ownReport takes the report of a proxy on a node whose Lease another program keeps.
func (c *programmed) ownReport(l *coordinationv1.Lease) {
	if name, ok := barrier.NodeOf(l.Name); ok {
		c.report(name, func(n *nodeReport) {
			n.drains = l.Annotations[barrier.DrainsAnnotation] == "true"
			if !n.agent {
				n.take(l)
			}
		})
	}
}

func (c *programmed) ownReportDeleted(l *coordinationv1.Lease) {
	if name, ok := barrier.NodeOf(l.Name); ok {
		c.report(name, func(n *nodeReport) { n.reports, n.drains = n.reports && n.agent, false })
	}
}

// counts reports whether a node may be waited for: it is alive, and has programmed
// something since it started.
func (n *nodeReport) counts(now time.Time) bool {
	return n.reports && n.versions.Started() && now.Sub(n.seen) < n.lasts
}

// floors returns what all nodes have reached that count, and what those have that are not
// behind for long; any is false where there is none. It is called with mu held.
func (c *programmed) floors(now time.Time) (all, prompt barrier.Versions, any bool) {
	all, prompt = barrier.Serving(), barrier.Serving()
	for _, n := range c.nodes {
		if !n.counts(now) {
			continue
		}
		any = true
		all = all.Min(n.versions)
		switch {
		case n.versions.Covers(c.published):
			n.behind = time.Time{}
		case n.behind.IsZero():
			n.behind = now
		}
		if n.behind.IsZero() || now.Sub(n.behind) < laggardAfter {
			prompt = prompt.Min(n.versions)
		}
	}
	return all, prompt, any
}

// late returns the nodes that have been behind for lateAfter, each once until it has caught up. It is called with mu held.
func (c *programmed) late(now time.Time) (names []string) {
	for name, n := range c.nodes {
		is := n.counts(now) && !n.behind.IsZero() && now.Sub(n.behind) >= lateAfter
		if is && !n.late {
			names = append(names, name)
		}
		n.late = is
	}
	slices.Sort(names)
	return names
}

// waits reports whether the Pods of a node wait for Drained.
func (n *nodeReport) waits() bool { return n != nil && (n.agent || n.drains) }

// run waits until ctx ends.
func (c *programmed) run(ctx context.Context) {
	for c.begin(ctx) != nil {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-timer.C:
		}
		timer.Reset(c.step(ctx))
	}
}

// begin reads what an earlier leader waited for, or makes the Lease.
func (c *programmed) begin(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, loop.Timeout)
	defer cancel()
	leases := c.Client.CoordinationV1().Leases(barrier.Namespace)
	l, err := leases.Get(ctx, svc.ProgrammedLease, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		l, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: svc.ProgrammedLease}}, metav1.CreateOptions{})
	}
	if err != nil {
		c.Log.Warn("cannot wait for nodes: no Lease to tell them; retrying", "lease", barrier.Namespace+"/"+svc.ProgrammedLease, "err", err)
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.published = barrier.ParseWanted(l.Annotations[barrier.WantedAnnotation])
	return nil
}

// step looks at all that wait, and returns when to do so again at the latest.
func (c *programmed) step(ctx context.Context) time.Duration {
	c.mu.Lock()
	now := time.Now()
	all, prompt, any := c.floors(now)
	late := c.late(now)
	var want barrier.Versions
	next := time.Hour
	for name, d := range c.drains {
		switch {
		case !d.out || !c.nodes[d.pod.Spec.NodeName].waits():
		case !any || prompt.Covers(d.need):
			c.pods.Queue.Add(name)
		default:
			want, next = want.Max(d.need), time.Second // for nodes that die or lag
		}
	}
	for name, a := range c.pending {
		if all.Covers(a.need) {
			c.asks.Queue.Add(name)
		} else {
			want, next = want.Max(a.need), time.Second
		}
	}
	due := c.last.Add(max(reportPace, time.Duration(len(c.nodes))*reportPacePerNode)).Sub(now)
	publish := !c.published.Covers(want)
	if publish && due <= 0 {
		want = want.Max(c.published)
		c.published, c.last = want, now
	}
	c.mu.Unlock()
	if len(late) > 0 {
		c.Log.Warn("nodes are late to report what they have programmed; Pods that end wait for them", "nodes", listNodes(late),
			"after", lateAfter, "limit", laggardAfter)
	}
	switch {
	case !publish:
		return next
	case due > 0:
		return due
	}
	if err := c.publish(ctx, want); err != nil {
		if ctx.Err() == nil {
			c.Log.Warn("cannot tell the nodes what is awaited; retrying", "err", err)
		}
		c.mu.Lock()
		c.published = barrier.Versions{}
		c.mu.Unlock()
		return time.Second
	}
	return next
}

func (c *programmed) publish(ctx context.Context, want barrier.Versions) error {
	ctx, cancel := context.WithTimeout(ctx, loop.Timeout)
	defer cancel()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"annotations": map[string]string{barrier.WantedAnnotation: want.String()},
	}})
	if err != nil {
		return err
	}
	_, err = c.Client.CoordinationV1().Leases(barrier.Namespace).Patch(ctx, svc.ProgrammedLease, types.MergePatchType, patch,
		metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		return c.begin(ctx)
	}
	return err
}

// lagging are the nodes that count and do not cover need, sorted, and how many count.
// It is called with mu held.
func (c *programmed) lagging(need barrier.Versions) (names []string, of int) {
	now := time.Now()
	for name, n := range c.nodes {
		if n.counts(now) {
			if of++; !n.versions.Covers(need) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names, of
}

// maxNamed bounds how many nodes a message names.
const maxNamed = 5

func listNodes(names []string) string {
	text := strings.Join(names[:min(len(names), maxNamed)], ", ")
	if more := len(names) - maxNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

func (c *programmed) sliceChanged(s *discoveryv1.EndpointSlice) {
	if owner, ok := kit.ServiceOf(s); ok {
		c.slicesChanged(owner, 0)
	}
}

func (c *programmed) sliceDeleted(s *discoveryv1.EndpointSlice) {
	if owner, ok := kit.ServiceOf(s); ok {
		c.slicesChanged(owner, barrier.Of(s))
	}
}

// slicesChanged looks again at what waits for the slices of a Service. gone is the version
// at which one was deleted, else 0.
func (c *programmed) slicesChanged(owner svc.Name, gone uint64) {
	c.mu.Lock()
	waiting := c.byService[owner]
	a := c.services[owner]
	if len(waiting) == 0 && a == nil {
		c.mu.Unlock()
		return
	}
	if gone > 0 {
		c.deleted[owner] = max(c.deleted[owner], gone)
	}
	var again []*drain
	for name := range waiting {
		again = append(again, c.drains[name])
	}
	if a != nil {
		c.asks.Queue.Add(owner)
	}
	c.mu.Unlock()
	for _, d := range again {
		c.locate(d)
	}
}

// bySliceOwner is the index of EndpointSlices by Service.
const bySliceOwner = "service"

// slicesOf returns the EndpointSlices of a Service.
func (c *programmed) slicesOf(name svc.Name) (out []*discoveryv1.EndpointSlice) {
	list, err := c.store.ByIndex(bySliceOwner, name.String())
	if err != nil {
		return nil // there is that index
	}
	for _, o := range list {
		out = append(out, o.(*discoveryv1.EndpointSlice))
	}
	return out
}

// present returns the versions that stand for the present slices of a Service.
func (c *programmed) present(service *corev1.Service) (need barrier.Versions) {
	kind := barrier.DNSSlices
	name := svc.NameOf(service)
	for _, s := range c.slicesOf(name) {
		if barrier.Proxied(s.Labels) {
			need.Add(barrier.ProxySlices, s)
		} else {
			need.Add(kind, s)
		}
	}
	if barrier.Proxied(service.Labels) && service.Spec.ClusterIP != corev1.ClusterIPNone {
		kind = barrier.ProxySlices
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	need[kind] = max(need[kind], c.deleted[name])
	return need
}
