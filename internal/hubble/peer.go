package hubble

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
)

// Peer is one end of flows. It does not change.
type Peer struct {
	Namespace, Pod string
	// Labels are "SOURCE:KEY=VALUE", sorted; SOURCE is k8s or reserved.
	Labels []string
	// Workload is what made the Pod, by its kind and name; empty for none.
	WorkloadKind, Workload string
	// Identity is one of Reserved..., 0 for a Pod.
	Identity uint32
	// Partial reports that a Pod's labels and workload are not known.
	Partial bool
}

// The identities of ends that are no Pods, with the numbers and names of Cilium
// (https://docs.cilium.io/en/stable/gettingstarted/terminology/#special-identities).
const (
	ReservedHost       = 1
	ReservedWorld      = 2
	ReservedRemoteNode = 6
)

// The ends that are no Pods.
//
//nolint:gochecknoglobals // constants
var (
	Host       = &Peer{Labels: []string{"reserved:host"}, Identity: ReservedHost}
	World      = &Peer{Labels: []string{"reserved:world"}, Identity: ReservedWorld}
	RemoteNode = &Peer{Labels: []string{"reserved:remote-node"}, Identity: ReservedRemoteNode}
)

// NamespaceLabels are the labels that a Pod has by its namespace.
func NamespaceLabels(namespace string) []string {
	return []string{"k8s:io.kubernetes.pod.namespace=" + namespace}
}

// maxLabels bounds the labels of a Pod in its flows, the first ones by name: a Pod may have a megabyte of them.
const maxLabels = 64

// PeerOf returns a Pod as an end of flows.
func PeerOf(pod *corev1.Pod) *Peer {
	out := &Peer{Namespace: pod.Namespace, Pod: pod.Name}
	for _, k := range slices.Sorted(maps.Keys(pod.Labels)) {
		if len(out.Labels) == maxLabels {
			break
		}
		out.Labels = append(out.Labels, "k8s:"+k+"="+pod.Labels[k])
	}
	out.Labels = append(out.Labels, NamespaceLabels(pod.Namespace)...)
	slices.Sort(out.Labels)
	out.WorkloadKind, out.Workload = workloadOf(pod)
	return out
}

// workloadOf returns the controller of a Pod, and the Pod itself if it has none. A ReplicaSet of a Deployment has its name and the
// hash of the template, which is a label of the Pods.
func workloadOf(pod *corev1.Pod) (kind, name string) {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return "Pod", pod.Name
	}
	if hash := pod.Labels["pod-template-hash"]; owner.Kind == "ReplicaSet" && hash != "" {
		if name, ok := strings.CutSuffix(owner.Name, "-"+hash); ok {
			return "Deployment", name
		}
	}
	return owner.Kind, owner.Name
}

func (p *Peer) message() *flow.Endpoint {
	out := &flow.Endpoint{Identity: p.Identity, Namespace: p.Namespace, PodName: p.Pod, Labels: p.Labels, ClusterName: Cluster}
	if p.Workload != "" {
		out.Workloads = []*flow.Workload{{Kind: p.WorkloadKind, Name: p.Workload}}
	}
	return out
}

// Complete sets the labels and the workload of an end of a flow.
func (p *Peer) Complete(e *flow.Endpoint) {
	full := p.message()
	e.Labels, e.Workloads = full.GetLabels(), full.GetWorkloads()
}
