// Package agent makes a machine a node of the API where no kubelet does: it keeps
// the Node object, its conditions and its Lease.
package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options configure a Registrar. Client, NodeName, Log, Node, Changed and
// Conditions are required.
type Options struct {
	Client   kubernetes.Interface
	NodeName string
	Log      *slog.Logger

	// Node returns the Node as a watch has seen it last, nil if there is none.
	Node func() *corev1.Node
	// Changed and ReadyChanged, which may be nil, hold a token when what Node,
	// Conditions or Ready return may have changed.
	Changed, ReadyChanged <-chan struct{}
	// Unreachable, which may be nil, returns the names of the nodes that the Lease is to report;
	// UnreachableChanged holds a token when it may have changed.
	Unreachable        func() []string
	UnreachableChanged <-chan struct{}
	// Checks, which may be nil, returns what the Lease is to report of endpoints (Checks.Report);
	// ChecksChanged holds a token when it may have changed.
	Checks        func() string
	ChecksChanged <-chan struct{}
	// ForwardedChanged holds a token when one of Conditions may have changed.
	ForwardedChanged <-chan struct{}
	// Conditions return one condition each that the Node has besides Ready.
	Conditions []func() corev1.NodeCondition
	// Ready returns why this machine cannot run pods, nil if it can. It is called
	// at every heartbeat and must not block. Nil means always ready.
	Ready func() error

	// Addresses become the Node's InternalIPs.
	Addresses []netip.Addr
	// Annotations are added to the Node's own. An empty value removes an annotation.
	Annotations map[string]string
	// Certificates, which may be nil, returns the annotations about this machine's certificates;
	// CertificatesChanged holds a token when they may have changed.
	Certificates        func() map[string]string
	CertificatesChanged <-chan struct{}
	// Port is where this machine answers for logs and exec.
	Port int32
	// Info becomes the Node's nodeInfo; see MachineInfo.
	Info corev1.NodeSystemInfo
	// MaxPods is the number of Pods in the Node's capacity, DefaultMaxPods for 0.
	MaxPods int64
	// Capacity is the Node's capacity beside the number of pods; see
	// MachineCapacity.
	Capacity corev1.ResourceList
}

const (
	leaseNamespace = "kube-node-lease"
	leaseSeconds   = 40
	// renewPeriod is how often the Lease is renewed and the Node compared with
	// what it should be; retryPeriod how soon after a failure.
	renewPeriod = 10 * time.Second
	retryPeriod = time.Second
	// minInterval is the least time between two comparisons.
	minInterval = 100 * time.Millisecond
	// reportPeriod is how often the Node's status is written though nothing
	// changed.
	reportPeriod   = 5 * time.Minute
	requestTimeout = 10 * time.Second
	// startHold is how long an agent that has just begun does not report that its machine is not ready if that was Ready
	// before: an agent that only restarts takes some time to find its Pods, which run.
	startHold = 30 * time.Second
)

// DefaultMaxPods is the default of Options.MaxPods, a kubelet's.
const DefaultMaxPods = 110

// Registrar creates this machine's Node and keeps it up to date.
type Registrar struct {
	opts   Options
	log    *slog.Logger
	events *events.Recorder

	// Only Run uses it.
	reported time.Time // the last time the status was written
	written  report    // what the Lease reports
	answered string    // the last suspicion that was answered by a renewal
	began    time.Time // when Run did
	short    bool      // the Node's ranges have fewer addresses than MaxPods
	known    bool      // this machine has been ready since then
	keyErr   error     // why the API server rejects this machine's public key
}

// New returns a Registrar for Run. It has no effect yet.
func New(opts Options) *Registrar {
	source := corev1.EventSource{Component: "fairlead-agent", Host: opts.NodeName}
	return &Registrar{opts: opts, log: opts.Log.With("node", opts.NodeName), events: events.NewRecorder(opts.Client, source, opts.Log)}
}

// Run keeps the registration until ctx ends, and always returns nil. The Node
// stays; its Lease expires.
func (r *Registrar) Run(ctx context.Context) error {
	var renewed time.Time
	var failing bool
	r.began = time.Now()
	defer r.events.Start()()
	for ctx.Err() == nil {
		err := r.keepNode(ctx)
		// The Lease does not depend on the status: a status that the API server
		// rejects does not make the machine dead.
		registered := err == nil || r.opts.Node() != nil
		suspicion := r.suspicion()
		urgent := suspicion != r.answered || r.report() != r.written
		if now := time.Now(); registered && (urgent || now.Sub(renewed) >= renewPeriod-retryPeriod) {
			leaseErr := r.renew(ctx)
			if leaseErr == nil {
				renewed, r.answered = now, suspicion
			} else if apierrors.IsForbidden(leaseErr) {
				// The Node is gone, which the watch may not have shown: look.
				r.reported = time.Time{}
			}
			err = errors.Join(err, leaseErr)
		}
		period := renewPeriod
		if err != nil {
			period = retryPeriod
			if !failing && ctx.Err() == nil {
				r.log.Warn("cannot update the Node or its Lease; retrying every second", "err", err)
			}
		}
		failing = err != nil
		r.wait(ctx, period)
	}
	return nil
}

// wait returns after period, and sooner if something changed.
func (r *Registrar) wait(ctx context.Context, period time.Duration) {
	timer := time.NewTimer(period)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return
	case <-timer.C:
		return
	case <-r.opts.Changed:
	case <-r.opts.ReadyChanged:
	case <-r.opts.UnreachableChanged:
	case <-r.opts.ChecksChanged:
	case <-r.opts.ForwardedChanged:
	case <-r.opts.CertificatesChanged:
	}
	timer.Reset(minInterval)
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// keepNode brings the Node up to date. It sends no request where the watch has
// shown that the Node is.
func (r *Registrar) keepNode(ctx context.Context) error {
	seen := r.opts.Node()
	if seen != nil && r.metadataPatch(seen, r.annotations()) == nil && r.keyErr == nil && !r.statusDiffers(seen, time.Now()) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	node, err := r.ensure(ctx)
	if err != nil {
		return err
	}
	if node, err = r.keepMetadata(ctx, node); err != nil {
		return err
	}
	return errors.Join(r.keepStatus(ctx, node), r.keyErr)
}

// keepMetadata writes the labels and annotations that n lacks, and returns the Node. A public key that the API server rejects,
// such as one that another node has, becomes keyErr: nothing else waits for it.
func (r *Registrar) keepMetadata(ctx context.Context, n *corev1.Node) (*corev1.Node, error) {
	patch := r.metadataPatch(n, r.annotations())
	if patch == nil {
		r.keyErr = nil
		return n, nil
	}
	write := func(patch []byte) (*corev1.Node, error) {
		return r.opts.Client.CoreV1().Nodes().Patch(ctx, r.opts.NodeName, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	next, err := write(patch)
	if r.keyErr = r.rejected(err); r.keyErr == nil {
		return next, err
	}
	if patch = r.metadataPatch(n, r.annotationsWithoutKey()); patch == nil {
		return n, nil
	}
	return write(patch)
}

// rejected returns err if it may be a rejection of this machine's public key.
func (r *Registrar) rejected(err error) error {
	if apierrors.IsInvalid(err) && r.opts.Annotations[svc.PublicKeyAnnotation] != "" {
		return err
	}
	return nil
}

// keepStatus writes the status of a Node if it is out of date.
func (r *Registrar) keepStatus(ctx context.Context, node *corev1.Node) error {
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		now := time.Now()
		if !r.statusDiffers(node, now) {
			return nil
		}
		next := node.DeepCopy()
		r.fillStatus(next, now)
		_, err := r.opts.Client.CoreV1().Nodes().UpdateStatus(ctx, next, metav1.UpdateOptions{})
		if apierrors.IsConflict(err) {
			fresh, getErr := r.opts.Client.CoreV1().Nodes().Get(ctx, r.opts.NodeName, metav1.GetOptions{})
			if getErr != nil {
				return getErr
			}
			node = fresh
		} else if err == nil {
			r.reported = now
			tell(r.events, r.opts.NodeName, node.Status.Conditions, next.Status.Conditions)
		}
		return err
	})
}

// ensure returns the Node, which it creates if there is none.
func (r *Registrar) ensure(ctx context.Context) (*corev1.Node, error) {
	nodes := r.opts.Client.CoreV1().Nodes()
	node, err := nodes.Get(ctx, r.opts.NodeName, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return node, err
	}
	r.reported = time.Time{}
	fresh := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.opts.NodeName, Labels: r.labels(), Annotations: maps.Clone(r.annotations())}}
	maps.DeleteFunc(fresh.Annotations, func(_, v string) bool { return v == "" })
	r.fillStatus(fresh, time.Now())
	node, err = nodes.Create(ctx, fresh, metav1.CreateOptions{})
	if r.rejected(err) != nil {
		delete(fresh.Annotations, svc.PublicKeyAnnotation) // keepMetadata tries it again, and reports it
		node, err = nodes.Create(ctx, fresh, metav1.CreateOptions{})
	}
	if apierrors.IsAlreadyExists(err) {
		return nodes.Get(ctx, r.opts.NodeName, metav1.GetOptions{})
	}
	if err == nil {
		r.log.Info("registered this machine")
	}
	return node, err
}

func (r *Registrar) labels() map[string]string {
	return map[string]string{
		corev1.LabelHostname:   r.opts.NodeName,
		corev1.LabelOSStable:   r.opts.Info.OperatingSystem,
		corev1.LabelArchStable: r.opts.Info.Architecture,
	}
}

func (r *Registrar) annotations() map[string]string {
	if r.opts.Certificates == nil {
		return r.opts.Annotations
	}
	out := r.opts.Certificates()
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, r.opts.Annotations)
	return out
}

// annotationsWithoutKey is annotations without the public key.
func (r *Registrar) annotationsWithoutKey() map[string]string {
	out := maps.Clone(r.annotations())
	delete(out, svc.PublicKeyAnnotation)
	return out
}

// keyCondition returns the condition svc.KeyAccepted.
func (r *Registrar) keyCondition() corev1.NodeCondition {
	c := corev1.NodeCondition{Type: svc.KeyAccepted, Status: corev1.ConditionTrue, Reason: "KeyAccepted",
		Message: "the API server has this machine's public key"}
	if r.keyErr != nil {
		c.Status, c.Reason = corev1.ConditionFalse, "KeyRejected"
		c.Message = "other nodes send nothing to this one's Pods: the API server rejects its public key of WireGuard: " + r.keyErr.Error()
	}
	return c
}

// metadataPatch returns a merge patch with the labels and those annotations that n
// lacks, nil if none.
func (r *Registrar) metadataPatch(n *corev1.Node, want map[string]string) []byte {
	labels, annotations := missing(r.labels(), n.Labels), missing(want, n.Annotations)
	if len(labels)+len(annotations) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels, "annotations": annotations}})
	if err != nil {
		return nil // strings do not fail to marshal
	}
	return patch
}

// missing returns the entries of want that have lacks, and nil for entries that are empty in
// want, which removes them in a merge patch. It is never nil itself, which would remove all
// entries (RFC 7396).
func missing(want, have map[string]string) map[string]any {
	out := map[string]any{}
	for k, v := range want {
		switch got, ok := have[k]; {
		case v == "" && ok:
			out[k] = nil
		case v != "" && got != v:
			out[k] = v
		}
	}
	return out
}

// statusDiffers reports whether n's status must be written.
func (r *Registrar) statusDiffers(n *corev1.Node, now time.Time) bool {
	if now.Sub(r.reported) >= reportPeriod {
		return true
	}
	next := n.DeepCopy()
	r.fillStatus(next, now)
	for i := range next.Status.Conditions {
		for j := range n.Status.Conditions {
			if a, b := &next.Status.Conditions[i], &n.Status.Conditions[j]; a.Type == b.Type {
				a.LastHeartbeatTime = b.LastHeartbeatTime
			}
		}
	}
	return !equality.Semantic.DeepEqual(n.Status, next.Status)
}

func (r *Registrar) fillStatus(n *corev1.Node, now time.Time) {
	s := &n.Status
	was := s.DeepCopy()
	s.Addresses = nil
	for _, a := range r.opts.Addresses {
		s.Addresses = append(s.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	s.Addresses = append(s.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: r.opts.NodeName})
	s.NodeInfo = r.opts.Info
	s.DaemonEndpoints.KubeletEndpoint.Port = r.opts.Port
	if s.Capacity == nil {
		s.Capacity = corev1.ResourceList{}
	}
	if s.Allocatable == nil {
		s.Allocatable = corev1.ResourceList{}
	}
	capacity := corev1.ResourceList{
		corev1.ResourcePods: *resource.NewQuantity(cmp.Or(r.opts.MaxPods, DefaultMaxPods), resource.DecimalSI),
	}
	maps.Copy(capacity, r.opts.Capacity)
	maps.Copy(s.Capacity, capacity)
	maps.Copy(s.Allocatable, capacity)
	s.Allocatable[corev1.ResourcePods] = r.allocatablePods(n)

	setCondition(s, r.ready(was, now), now)
	for _, condition := range r.opts.Conditions {
		setCondition(s, condition(), now)
	}
	if r.opts.Annotations[svc.PublicKeyAnnotation] != "" {
		setCondition(s, r.keyCondition(), now)
	}
}

// allocatablePods returns how many Pods the scheduler may put on the Node: MaxPods, but no more than its ranges have
// addresses for, so that others wait as Pending rather than fail to start.
func (r *Registrar) allocatablePods(n *corev1.Node) resource.Quantity {
	pods, most := cmp.Or(r.opts.MaxPods, DefaultMaxPods), podAddresses(n.Spec.PodCIDRs)
	if short := most < pods; short != r.short {
		r.short = short
		if short {
			r.log.Warn("the node's range has fewer addresses than --max-pods; give new nodes larger ranges with "+
				"--node-cidr-mask-size-ipv4 or -ipv6 of the server", "ranges", n.Spec.PodCIDRs, "addresses", most, "max-pods", pods)
		}
	}
	return *resource.NewQuantity(min(pods, most), resource.DecimalSI)
}

// podAddresses returns how many Pods get an address of each of a Node's ranges: all but the network's, the node's own
// (the first), and IPv4's broadcast address. Without ranges there is no bound.
func podAddresses(ranges []string) int64 {
	most := int64(math.MaxInt64)
	for _, text := range ranges {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			continue
		}
		reserved := int64(2)
		if p.Addr().Is4() {
			reserved = 3
		}
		most = min(most, max(0, 1<<min(p.Addr().BitLen()-p.Bits(), 62)-reserved))
	}
	return most
}

// ready returns the condition Ready. was is the status of the Node before.
func (r *Registrar) ready(was *corev1.NodeStatus, now time.Time) corev1.NodeCondition {
	ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "AgentReady", Message: "the agent runs"}
	if r.opts.Ready == nil {
		return ready
	}
	err := r.opts.Ready()
	r.known = r.known || err == nil
	starting := !r.known && now.Sub(r.began) < startHold
	if err != nil && !(starting && wasReady(was, r.opts.Info.BootID)) {
		ready.Status, ready.Reason, ready.Message = corev1.ConditionFalse, "AgentNotReady", strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return ready
}

// wasReady reports whether a status has the condition Ready of the same boot of the machine: no Pod outlives that.
func wasReady(s *corev1.NodeStatus, boot string) bool {
	return s.NodeInfo.BootID == boot && slices.ContainsFunc(s.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func setCondition(s *corev1.NodeStatus, c corev1.NodeCondition, now time.Time) {
	c.LastHeartbeatTime, c.LastTransitionTime = metav1.NewTime(now), metav1.NewTime(now)
	for i := range s.Conditions {
		if old := &s.Conditions[i]; old.Type == c.Type {
			if old.Status == c.Status {
				c.LastTransitionTime = old.LastTransitionTime
			}
			*old = c
			return
		}
	}
	s.Conditions = append(s.Conditions, c)
}

// renew creates or renews the Lease, by which the control plane knows that this
// machine is alive. A patch does not change what package barrier writes into it: what this
// node has programmed.
func (r *Registrar) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	leases := r.opts.Client.CoordinationV1().Leases(leaseNamespace)
	now, seconds := metav1.NowMicro(), int32(leaseSeconds)
	spec := coordinationv1.LeaseSpec{HolderIdentity: &r.opts.NodeName, LeaseDurationSeconds: &seconds, RenewTime: &now}
	report := r.report()
	annotations := map[string]any{}
	for key, text := range report.annotations() {
		if annotations[key] = text; text == "" {
			annotations[key] = nil // as a merge patch removes it (RFC 7396)
		}
	}
	metadata := map[string]any{"annotations": annotations}
	var owners []metav1.OwnerReference
	if n := r.opts.Node(); n != nil {
		owners = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}}
		metadata["ownerReferences"] = owners
	}
	patch, err := json.Marshal(map[string]any{"metadata": metadata, "spec": &spec})
	if err != nil {
		return err
	}
	_, err = leases.Patch(ctx, r.opts.NodeName, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: r.opts.NodeName, OwnerReferences: owners}, Spec: spec}
		for key, text := range report.annotations() {
			if text != "" {
				metav1.SetMetaDataAnnotation(&l.ObjectMeta, key, text)
			}
		}
		_, err = leases.Create(ctx, l, metav1.CreateOptions{})
	}
	if err == nil {
		r.written = report
	}
	return err
}

// suspicion is the one that the Node has, "" if none.
func (r *Registrar) suspicion() string {
	if n := r.opts.Node(); n != nil {
		return n.Annotations[svc.SuspectedAnnotation]
	}
	return r.answered
}

// report is what a Lease reports of others, as its annotations have it.
type report struct{ unreachable, checks string }

func (r report) annotations() map[string]string {
	return map[string]string{svc.UnreachableAnnotation: r.unreachable, svc.ChecksAnnotation: r.checks}
}

// report is what the Lease is to report.
func (r *Registrar) report() (out report) {
	if r.opts.Unreachable != nil {
		out.unreachable = strings.Join(r.opts.Unreachable(), ",")
	}
	if r.opts.Checks != nil {
		out.checks = r.opts.Checks()
	}
	return out
}
