package status

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Own adds the findings about the Pod, by the UID that the API has for it.
func (p *Publisher) Own(to map[string]svc.OwnPod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.base == nil || p.want == nil {
		return // a static Pod without a mirror is not an endpoint
	}
	to[string(p.base.UID)] = svc.OwnPod{Ready: statusReady(p.want), IPs: ParseIPs(p.want.PodIPs)}
}

// ParseIPs returns the addresses of a Pod's status; it leaves out invalid ones.
func ParseIPs(ips []corev1.PodIP) (out []netip.Addr) {
	for _, ip := range ips {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// sameFindings reports whether two statuses are the same to Publisher.Own.
func sameFindings(a, b *corev1.PodStatus) bool {
	return statusReady(a) == statusReady(b) && slices.Equal(a.PodIPs, b.PodIPs)
}

func statusReady(st *corev1.PodStatus) bool {
	i := conditionIndex(st.Conditions, corev1.PodReady)
	return i >= 0 && st.Conditions[i].Status == corev1.ConditionTrue
}

// ReasonRegistered is the reason in the status of a registered Pod; tables show it.
const ReasonRegistered = "Registered"

// ofRegistered reports whether the node writes all of a status: its reason is the node's.
func ofRegistered(st *corev1.PodStatus) bool { return st.Reason == ReasonRegistered }
