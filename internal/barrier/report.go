package barrier

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Progress is how far one node is. It is safe for concurrent use; a nil one is for a node
// that does not report.
type Progress struct {
	mu       sync.Mutex
	versions Versions
	rejected string
	changed  chan struct{}
}

// NewProgress returns the Progress of a node that serves some kinds and has programmed
// nothing.
func NewProgress(served ...Kind) *Progress {
	return &Progress{versions: Serving(served...), changed: make(chan struct{}, 1)}
}

// Reached records that everything of a kind up to a version is programmed; 0 is not known.
func (p *Progress) Reached(k Kind, version uint64) {
	if p == nil || version == 0 {
		return
	}
	p.mu.Lock()
	moved := p.versions[k] != version && p.versions[k] != None
	if moved {
		p.versions[k] = version
	}
	p.mu.Unlock()
	if moved {
		p.wake()
	}
}

// Rejected records the Services of which a port cannot be programmed, as namespace/name.
func (p *Progress) Rejected(services []string) {
	if p == nil {
		return
	}
	slices.Sort(services)
	services = slices.Compact(services)
	if len(services) > MaxRejected {
		services = append(slices.Clone(services[:MaxRejected]), MoreRejected)
	}
	text := strings.Join(services, ",")
	p.mu.Lock()
	moved := p.rejected != text
	p.rejected = text
	p.mu.Unlock()
	if moved {
		p.wake()
	}
}

func (p *Progress) wake() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

func (p *Progress) get() (Versions, string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.versions, p.rejected
}

// Reporter writes the Progress of a node when it is awaited.
type Reporter struct {
	Client   kubernetes.Interface
	NodeName string
	Progress *Progress
	Log      *slog.Logger
	// Node returns the Node as a watch has seen it last, nil if there is none. It owns the
	// Lease that Own makes.
	Node func() *corev1.Node
	// Own reports in a Lease named OwnLease: that of the Node belongs to another program.
	Own bool
	// Drains reports beside it that Pods of this node wait for Drained.
	Drains bool

	controlled atomic.Bool
}

// Controlled reports whether there is a controller that waits for nodes, or has been one.
func (r *Reporter) Controlled() bool { return r.controlled.Load() }

const (
	reportTimeout = 10 * time.Second
	// A report that cannot be written is retried.
	reportRetry = time.Second
	// deniedRetry is how soon after the API server has forbidden it.
	deniedRetry = time.Minute
	// unreadable is how soon it is asked again whether this node may read the awaited versions.
	unreadable = 10 * time.Minute
	// checkPeriod is how often the Lease is read: one that was deleted and made again, with its
	// Node or by itself, has no report, of which no watch tells.
	checkPeriod = 30 * time.Second
	// reportInterval is the least time between two reports.
	reportInterval = 20 * time.Millisecond
)

// Run reports until ctx ends. It writes nothing where there is no Lease of the name Name:
// no controller waits there.
func (r *Reporter) Run(ctx context.Context) error {
	var mu sync.Mutex
	var wanted *Versions
	awaited := func(list ...*coordinationv1.Lease) {
		mu.Lock()
		defer mu.Unlock()
		wanted = nil
		for _, l := range list {
			v := ParseWanted(l.Annotations[WantedAnnotation])
			wanted = &v
		}
		r.controlled.Store(wanted != nil)
		r.Progress.wake()
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() {
		one := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, svc.ProgrammedLease).String()}
		from := reflector.From(r.Client.CoordinationV1().Leases(Namespace), one)
		if !r.mayRead(ctx, one) {
			return
		}
		reflector.Run(reflector.Quiet(ctx), "barrier", from, reflector.Sink[*coordinationv1.Lease]{
			Replace: func(list []*coordinationv1.Lease) { awaited(list...) },
			Set:     func(l *coordinationv1.Lease) { awaited(l) },
			Delete:  func(*coordinationv1.Lease) { awaited() },
		})
	})
	reported, text, begun, failing := Versions{}, "", false, false
	timer, check := time.NewTimer(0), time.NewTicker(checkPeriod)
	defer timer.Stop()
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.Progress.changed:
		case <-timer.C:
		case <-check.C:
			begun = begun && !r.missing(ctx, reported)
		}
		mu.Lock()
		want := wanted
		mu.Unlock()
		now, rejected := r.Progress.get()
		// Where nothing is awaited yet a node tells once that it has started: only then is it waited for.
		starts := now.Started() && !reported.Started()
		if want == nil || begun && rejected == text && !starts && (reported.Covers(*want) || !now.Covers(*want)) {
			continue
		}
		pause := reportInterval
		if err := r.write(ctx, now, rejected); err != nil {
			pause = reportRetry
			if apierrors.IsForbidden(err) {
				pause = deniedRetry
			}
			if !failing && ctx.Err() == nil && !apierrors.IsNotFound(err) {
				r.Log.Warn("cannot report what is programmed; retrying", "err", err, "period", pause)
			}
			failing = !apierrors.IsNotFound(err)
		} else {
			reported, text, begun, failing = now, rejected, true, false
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		timer.Reset(0)
	}
}

// mayRead returns when this node may read the awaited versions, false when ctx ends: without
// that right, as a proxy on another Kubernetes has it, no controller waits for the node.
func (r *Reporter) mayRead(ctx context.Context, one metav1.ListOptions) bool {
	period := unreadable
	if !r.Own {
		period = reportRetry // it may once the Node is registered
	}
	for {
		_, err := r.Client.CoordinationV1().Leases(Namespace).List(ctx, one)
		if !apierrors.IsForbidden(err) {
			return ctx.Err() == nil
		}
		r.Log.Debug("cannot read what is awaited; not reporting what is programmed", "err", err, "period", period)
		select {
		case <-ctx.Done():
			return false
		case <-time.After(period):
		}
	}
}

// lease returns the Lease that has the report.
func (r *Reporter) lease() (api coordinationclient.LeaseInterface, name string) {
	if r.Own {
		return r.Client.CoordinationV1().Leases(Namespace), OwnLease(r.NodeName)
	}
	return r.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease), r.NodeName
}

// missing reports whether the Lease is known not to have the report that was written last.
func (r *Reporter) missing(ctx context.Context, reported Versions) bool {
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	leases, name := r.lease()
	l, err := leases.Get(ctx, name, metav1.GetOptions{ResourceVersion: "0"})
	if err != nil {
		return apierrors.IsNotFound(err)
	}
	return l.Annotations[ProgrammedAnnotation] != reported.String()
}

// write writes a report. A Lease of the node's agent is not made here: it comes with the
// Node.
func (r *Reporter) write(ctx context.Context, now Versions, rejected string) error {
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	marks := map[string]any{ProgrammedAnnotation: now.String(), RejectedAnnotation: nil}
	if rejected != "" {
		marks[RejectedAnnotation] = rejected
	}
	if r.Own {
		marks[DrainsAnnotation] = nil
	}
	if r.Drains {
		marks[DrainsAnnotation] = "true"
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": marks}})
	if err != nil {
		return err
	}
	leases, name := r.lease()
	_, err = leases.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	if !r.Own || !apierrors.IsNotFound(err) {
		return err
	}
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{ReportLabel: "proxy"}, Annotations: map[string]string{},
	}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &r.NodeName}}
	for key, mark := range marks {
		if text, ok := mark.(string); ok {
			l.Annotations[key] = text
		}
	}
	if n := r.Node(); n != nil {
		l.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}}
	}
	_, err = leases.Create(ctx, l, metav1.CreateOptions{})
	return err
}
