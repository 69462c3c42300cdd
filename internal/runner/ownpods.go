package runner

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// OwnPods returns what this node has found out of its Pods, by the UIDs that the API has for
// them, also while no server can be told. It is safe for concurrent use.
func (r *Runner) OwnPods() map[string]svc.OwnPod {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[string]svc.OwnPod, len(r.workers)+len(r.registered))
	for _, w := range r.workers {
		w.pub.own(out)
	}
	for _, g := range r.registered {
		g.pub.own(out)
	}
	return out
}

// own adds what is known of the pod.
func (p *publisher) own(to map[string]svc.OwnPod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.base == nil || p.want == nil {
		return // a static pod without a mirror is no endpoint
	}
	o := svc.OwnPod{Ready: statusReady(p.want)}
	for _, ip := range p.want.PodIPs {
		o.IPs = append(o.IPs, parseAddrs(ip.IP)...)
	}
	to[string(p.base.UID)] = o
}

// sameFindings reports whether two statuses are the same to publisher.own.
func sameFindings(a, b *corev1.PodStatus) bool {
	return statusReady(a) == statusReady(b) && slices.Equal(a.PodIPs, b.PodIPs)
}

func statusReady(st *corev1.PodStatus) bool {
	i := conditionIndex(st.Conditions, corev1.PodReady)
	return i >= 0 && st.Conditions[i].Status == corev1.ConditionTrue
}
