package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
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
)

// Registration is what the Node object says of this machine.
type Registration struct {
	// Addresses become the Node's InternalIPs; Hostname its Hostname, where
	// empty means the Node's name.
	Addresses []netip.Addr
	Hostname  string
	// Labels and Annotations are added to the Node's own; kubernetes.io/hostname,
	// /os and /arch come by themselves.
	Labels, Annotations map[string]string
	// Port is where this agent answers for logs and exec.
	Port int32
	// Info is shown as the Node's nodeInfo; see MachineInfo.
	Info corev1.NodeSystemInfo
	// Capacity is shown as the Node's capacity beside the number of pods; see
	// MachineCapacity.
	Capacity corev1.ResourceList
	// Pods is how many pods may run here (default 110).
	Pods int64
	// Ready says why this machine cannot run pods; nil, or a nil error, that it
	// can. It is asked at every heartbeat and must not block.
	Ready func() error
}

const (
	// ServicesProgrammed is the Node condition that says whether this node's
	// kernel answers for Services as the API says.
	ServicesProgrammed corev1.NodeConditionType = "fairlead.dev/ServicesProgrammed"

	leaseNamespace = "kube-node-lease"
	leaseSeconds   = 40
	// renewPeriod is how often the Lease is renewed and the Node compared with
	// what it should say; retryPeriod how soon after a failure.
	renewPeriod = 10 * time.Second
	retryPeriod = time.Second
	// reportPeriod is how often the Node's status is written though nothing
	// changed.
	reportPeriod = 5 * time.Minute
	callTimeout  = 10 * time.Second
)

// registrar makes this machine's Node object, keeps its Lease alive and its
// conditions true.
type registrar struct {
	client kubernetes.Interface
	name   string
	log    *slog.Logger
	reg    Registration
	status *status
	kicked chan struct{} // holds a token while the Node should be looked at

	// Used by run alone.
	reported time.Time // the last time the status was written
	lease    *coordinationv1.Lease
	complain bool // the last attempt went well, so that a failure is news
}

func newRegistrar(o Options, st *status) *registrar {
	reg := *o.Register
	if reg.Hostname == "" {
		reg.Hostname = o.NodeName
	}
	if reg.Pods == 0 {
		reg.Pods = 110
	}
	return &registrar{client: o.Client, name: o.NodeName, log: o.Log, reg: reg, status: st, kicked: make(chan struct{}, 1), complain: true}
}

// kick makes run look at the Node soon. It does not wait.
func (r *registrar) kick() {
	select {
	case r.kicked <- struct{}{}:
	default:
	}
}

// run keeps the registration until ctx ends. The Node object stays; its Lease
// runs out.
func (r *registrar) run(ctx context.Context) {
	var renewed time.Time
	for {
		wait := renewPeriod
		err := r.keepNode(ctx)
		// A status that is refused does not make the machine dead.
		there := err == nil || r.status.ownNode() != nil
		if now := time.Now(); there && now.Sub(renewed) >= renewPeriod-time.Second {
			failed := r.renew(ctx)
			if failed == nil {
				renewed = now
			}
			err = errors.Join(err, failed)
		}
		if err != nil {
			wait = retryPeriod
			if r.complain && ctx.Err() == nil {
				r.log.Warn("keeping the Node object failed; trying again every second", "node", r.name, "err", err)
			}
		}
		r.complain = err == nil
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-r.kicked:
			timer.Stop()
			if !pause(ctx, 100*time.Millisecond) { // a storm of kicks is ten looks a second
				return
			}
		}
	}
}

// pause waits for d and says whether ctx goes on.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// keepNode makes the Node say what it should, at the cost of no request at all
// where the watch has shown that it does.
func (r *registrar) keepNode(ctx context.Context) error {
	seen := r.status.ownNode()
	if seen != nil && r.metadataPatch(seen) == nil && !r.statusDiffers(seen, time.Now()) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	node, err := r.ensure(ctx)
	if err != nil {
		return err
	}
	if patch := r.metadataPatch(node); patch != nil {
		if node, err = r.client.CoreV1().Nodes().Patch(ctx, r.name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			return err
		}
	}
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		now := time.Now()
		if !r.statusDiffers(node, now) {
			return nil
		}
		next := node.DeepCopy()
		r.fillStatus(next, now)
		_, err := r.client.CoreV1().Nodes().UpdateStatus(ctx, next, metav1.UpdateOptions{})
		if apierrors.IsConflict(err) {
			fresh, getErr := r.client.CoreV1().Nodes().Get(ctx, r.name, metav1.GetOptions{})
			if getErr != nil {
				return getErr
			}
			node = fresh
		} else if err == nil {
			r.reported = now
		}
		return err
	})
}

// ensure returns the Node, made if it is not there.
func (r *registrar) ensure(ctx context.Context) (*corev1.Node, error) {
	nodes := r.client.CoreV1().Nodes()
	node, err := nodes.Get(ctx, r.name, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return node, err
	}
	r.lease, r.reported = nil, time.Time{}
	fresh := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.name, Labels: r.labels(), Annotations: r.reg.Annotations}}
	r.fillStatus(fresh, time.Now())
	node, err = nodes.Create(ctx, fresh, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nodes.Get(ctx, r.name, metav1.GetOptions{})
	}
	if err == nil {
		r.log.Info("registered this machine", "node", r.name)
	}
	return node, err
}

func (r *registrar) labels() map[string]string {
	labels := map[string]string{
		corev1.LabelHostname:   r.reg.Hostname,
		corev1.LabelOSStable:   r.reg.Info.OperatingSystem,
		corev1.LabelArchStable: r.reg.Info.Architecture,
	}
	for k, v := range r.reg.Labels {
		labels[k] = v
	}
	for k, v := range labels {
		if v == "" {
			delete(labels, k)
		}
	}
	return labels
}

// metadataPatch returns what n lacks of our labels and annotations, nil if
// nothing.
func (r *registrar) metadataPatch(n *corev1.Node) []byte {
	type metadata struct {
		Labels      map[string]string `json:"labels,omitempty"`
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	m := metadata{missing(r.labels(), n.Labels), missing(r.reg.Annotations, n.Annotations)}
	if m.Labels == nil && m.Annotations == nil {
		return nil
	}
	patch, err := json.Marshal(struct {
		Metadata metadata `json:"metadata"`
	}{m})
	if err != nil {
		return nil // strings do not fail to marshal
	}
	return patch
}

func missing(want, have map[string]string) map[string]string {
	var out map[string]string
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			if out == nil {
				out = map[string]string{}
			}
			out[k] = v
		}
	}
	return out
}

// statusDiffers says whether n's status must be written.
func (r *registrar) statusDiffers(n *corev1.Node, now time.Time) bool {
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

func (r *registrar) fillStatus(n *corev1.Node, now time.Time) {
	s := &n.Status
	s.Addresses = nil
	for _, a := range r.reg.Addresses {
		s.Addresses = append(s.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	s.Addresses = append(s.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: r.reg.Hostname})
	s.NodeInfo = r.reg.Info
	s.DaemonEndpoints.KubeletEndpoint.Port = r.reg.Port
	if s.Capacity == nil {
		s.Capacity = corev1.ResourceList{}
	}
	if s.Allocatable == nil {
		s.Allocatable = corev1.ResourceList{}
	}
	capacity := corev1.ResourceList{corev1.ResourcePods: *resource.NewQuantity(r.reg.Pods, resource.DecimalSI)}
	maps.Copy(capacity, r.reg.Capacity)
	maps.Copy(s.Capacity, capacity)
	maps.Copy(s.Allocatable, capacity)

	ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "AgentReady", Message: "the agent runs"}
	if r.reg.Ready != nil {
		if err := r.reg.Ready(); err != nil {
			ready.Status, ready.Reason, ready.Message = corev1.ConditionFalse, "AgentNotReady", firstLine(err)
		}
	}
	setCondition(s, ready, now)
	st := r.status.get()
	programmed := corev1.NodeCondition{Type: ServicesProgrammed, Status: corev1.ConditionFalse, Reason: st.Reason, Message: st.Message}
	if st.Programmed {
		programmed.Status = corev1.ConditionTrue
	}
	setCondition(s, programmed, now)
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

// renew makes or renews the Lease, by which the control plane knows that this
// machine lives.
func (r *registrar) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	leases := r.client.CoordinationV1().Leases(leaseNamespace)
	now := metav1.NewMicroTime(time.Now())
	if r.lease == nil {
		got, err := leases.Get(ctx, r.name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			r.lease, err = leases.Create(ctx, r.newLease(now), metav1.CreateOptions{})
			return err
		}
		if err != nil {
			return err
		}
		r.lease = got
	}
	next := r.lease.DeepCopy()
	fresh := r.newLease(now)
	next.Spec.HolderIdentity, next.Spec.LeaseDurationSeconds, next.Spec.RenewTime = fresh.Spec.HolderIdentity, fresh.Spec.LeaseDurationSeconds, fresh.Spec.RenewTime
	if fresh.OwnerReferences != nil {
		next.OwnerReferences = fresh.OwnerReferences
	}
	done, err := leases.Update(ctx, next, metav1.UpdateOptions{})
	if err != nil {
		r.lease = nil // look again
		return err
	}
	r.lease = done
	return nil
}

func (r *registrar) newLease(now metav1.MicroTime) *coordinationv1.Lease {
	holder, seconds := r.name, int32(leaseSeconds)
	l := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: leaseNamespace, Name: r.name},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &now},
	}
	if n := r.status.ownNode(); n != nil {
		l.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}}
	}
	return l
}
