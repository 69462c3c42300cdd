package epslice

import (
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/svc"
)

// The values of the label endpointslice.kubernetes.io/managed-by on slices made
// from selectors and on slices mirrored from Endpoints.
const (
	ManagedBySelector  = svc.ManagedBySelector
	ManagedByMirroring = "endpointslicemirroring-controller.k8s.io"
)

// The label that marks Endpoints made from a selector, as Kubernetes sets it
// since v1.33.
const (
	LabelEndpointsManagedBy = "endpoints.kubernetes.io/managed-by"
	EndpointsManagedBy      = "endpoint-controller"
)

// owner describes whose the slices of a plan are.
type owner struct {
	namespace, name string
	uid             types.UID
	kind            string // Service or Endpoints, of version v1
}

func (o *owner) owns(slice *discoveryv1.EndpointSlice) bool {
	for i := range slice.OwnerReferences {
		r := &slice.OwnerReferences[i]
		if r.UID == o.uid && r.Kind == o.kind && r.APIVersion == "v1" {
			return true
		}
	}
	return false
}

func (o *owner) reference() []metav1.OwnerReference {
	yes := true
	return []metav1.OwnerReference{{
		APIVersion: "v1", Kind: o.kind, Name: o.name, UID: o.uid, Controller: &yes, BlockOwnerDeletion: &yes,
	}}
}

// namer names new slices: the name of the Service and five characters derived
// from the identity of the owner and a counter. A create that is repeated, by this
// process after a lost answer or by another one that runs at the same time, has
// the same name and can succeed only once.
type namer struct {
	owner owner
	taken map[string]bool
}

// letters are the letters of Kubernetes' generated names: no vowels and no look-alikes.
const letters = "bcdfghjklmnpqrstvwxz2456789"

func (n *namer) next(t discoveryv1.AddressType) (prefix, name string) {
	prefix = n.owner.name + "-"
	for i := uint32(0); ; i++ {
		sum := sha256.Sum256(binary.BigEndian.AppendUint32([]byte(string(n.owner.uid)+"/"+n.owner.kind+"/"+string(t)), i))
		bits := binary.BigEndian.Uint64(sum[:8])
		suffix := make([]byte, 5)
		for j := range suffix {
			suffix[j] = letters[bits%uint64(len(letters))]
			bits /= uint64(len(letters))
		}
		name = prefix + string(suffix)
		if !n.taken[name] {
			n.taken[name] = true
			return prefix, name
		}
	}
}

// wantedLabels returns the labels of every slice of the Service: the Service's
// own and the ones that bind the slice to it.
func wantedLabels(service *corev1.Service, managedBy string) map[string]string {
	labels := make(map[string]string, len(service.Labels)+3)
	maps.Copy(labels, service.Labels)
	delete(labels, corev1.IsHeadlessService)
	if headless(service) {
		labels[corev1.IsHeadlessService] = ""
	}
	labels[discoveryv1.LabelServiceName] = service.Name
	labels[discoveryv1.LabelManagedBy] = managedBy
	return labels
}

// setTrigger returns annotations with the time of the change that led to this
// write, or without that of an earlier one. The argument is not changed.
func setTrigger(annotations map[string]string, trigger time.Time) map[string]string {
	_, has := annotations[corev1.EndpointsLastChangeTriggerTime]
	if trigger.IsZero() && !has {
		return annotations
	}
	out := make(map[string]string, len(annotations)+1)
	maps.Copy(out, annotations)
	if trigger.IsZero() {
		delete(out, corev1.EndpointsLastChangeTriggerTime)
	} else {
		out[corev1.EndpointsLastChangeTriggerTime] = trigger.UTC().Format(time.RFC3339Nano)
	}
	return out
}

// setWeight returns annotations with the weight of a slice's endpoints, empty for none. The
// argument is not changed.
func setWeight(annotations map[string]string, weight string) map[string]string {
	if annotations[svc.WeightAnnotation] == weight {
		return annotations
	}
	out := make(map[string]string, len(annotations)+1)
	maps.Copy(out, annotations)
	delete(out, svc.WeightAnnotation)
	if weight != "" {
		out[svc.WeightAnnotation] = weight
	}
	return out
}
