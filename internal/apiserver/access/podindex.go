package access

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/registration"
)

// podIndex indexes all Pods by node and by what they refer to: it answers what a
// node may read, and whether a token's Pod still exists.
type podIndex struct {
	informer cache.SharedIndexInformer
}

// podRefs is the part of a Pod that is kept.
type podRefs struct {
	metav1.ObjectMeta
	node    string
	account string
	refs    []objectRef
}

// objectRef is a Secret or a ConfigMap of the Pod's own namespace.
type objectRef struct{ resource, name string }

const byReference = "reference"

func newPodIndex(client kubernetes.Interface) (*podIndex, error) {
	informer := coreinformers.NewPodInformer(client, metav1.NamespaceAll, 0, cache.Indexers{byReference: referenceKeys})
	return &podIndex{informer}, informer.SetTransform(toPodRefs)
}

// run follows the Pods until ctx ends.
func (x *podIndex) run(ctx context.Context) { x.informer.RunWithContext(ctx) }

// get returns a Pod of the index, nil if there is none.
func (x *podIndex) get(namespace, name string) *podRefs {
	obj, _, err := x.informer.GetIndexer().GetByKey(namespace + "/" + name)
	p, ok := obj.(*podRefs)
	if err != nil || !ok {
		return nil
	}
	return p
}

// uid returns the UID of a Pod and its deletion timestamp, "" if the index lacks it.
func (x *podIndex) uid(namespace, name string) (string, *metav1.Time) {
	if p := x.get(namespace, name); p != nil {
		return string(p.UID), p.DeletionTimestamp
	}
	return "", nil
}

// referred reports whether a Pod on node refers to the object.
func (x *podIndex) referred(node, resource, namespace, name string) bool {
	keys, err := x.informer.GetIndexer().IndexKeys(byReference, referenceKey(node, resource, namespace, name))
	return err == nil && len(keys) > 0
}

// Times of awaitIndex.
const (
	indexTimeout = 500 * time.Millisecond
	indexPoll    = 5 * time.Millisecond
	// registrationTimeout is how long the requests of a machine that has just joined wait for its Node: its programs start
	// beside its registration.
	registrationTimeout = 3 * time.Second
)

// awaitIndex polls cond for as long as an index may lag behind the store: the
// requester may have seen an object that the index has not yet.
func awaitIndex(ctx context.Context, cond func() bool) bool { return await(ctx, indexTimeout, cond) }

// await polls cond until it is true, and reports whether it became so within timeout.
func await(ctx context.Context, timeout time.Duration, cond func() bool) bool {
	for end := time.Now().Add(timeout); !cond(); {
		if time.Now().After(end) {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(indexPoll):
		}
	}
	return true
}

func referenceKey(node, resource, namespace, name string) string {
	return node + "/" + resource + "/" + namespace + "/" + name
}

func referenceKeys(obj any) ([]string, error) {
	p, ok := obj.(*podRefs)
	if !ok {
		return nil, fmt.Errorf("the index of Pods holds a %T", obj)
	}
	if p.node == "" {
		return nil, nil
	}
	keys := make([]string, 0, len(p.refs)+1)
	for _, r := range p.refs {
		keys = append(keys, referenceKey(p.node, r.resource, p.Namespace, r.name))
	}
	return append(keys, referenceKey(p.node, "serviceaccounts", p.Namespace, p.account)), nil
}

// toPodRefs drops all but what podRefs has.
func toPodRefs(obj any) (any, error) {
	p, ok := obj.(*corev1.Pod)
	if !ok {
		return obj, nil // a tombstone
	}
	refs := &podRefs{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
			DeletionTimestamp: p.DeletionTimestamp,
		},
		node: p.Spec.NodeName,
	}
	// A node may make registrations itself: they must not lead it to a Secret or a token.
	if !registration.Is(p) {
		refs.account, refs.refs = p.Spec.ServiceAccountName, references(&p.Spec)
	}
	return refs, nil
}

// references lists the Secrets and ConfigMaps of a Pod, each once.
func references(s *corev1.PodSpec) (out []objectRef) {
	seen := map[objectRef]bool{}
	add := func(resource, name string) {
		if r := (objectRef{resource, name}); name != "" && !seen[r] {
			seen[r] = true
			out = append(out, r)
		}
	}
	secret := func(name string) { add("secrets", name) }
	config := func(name string) { add("configmaps", name) }
	for _, p := range s.ImagePullSecrets {
		secret(p.Name)
	}
	for i := range s.Volumes {
		v := &s.Volumes[i]
		switch {
		case v.Secret != nil:
			secret(v.Secret.SecretName)
		case v.ConfigMap != nil:
			config(v.ConfigMap.Name)
		case v.Projected != nil:
			for _, p := range v.Projected.Sources {
				if p.Secret != nil {
					secret(p.Secret.Name)
				}
				if p.ConfigMap != nil {
					config(p.ConfigMap.Name)
				}
			}
		}
	}
	for _, list := range [][]corev1.Container{s.InitContainers, s.Containers} {
		for i := range list {
			for _, e := range list[i].Env {
				if e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil {
					secret(e.ValueFrom.SecretKeyRef.Name)
				}
				if e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil {
					config(e.ValueFrom.ConfigMapKeyRef.Name)
				}
			}
			for _, e := range list[i].EnvFrom {
				if e.SecretRef != nil {
					secret(e.SecretRef.Name)
				}
				if e.ConfigMapRef != nil {
					config(e.ConfigMapRef.Name)
				}
			}
		}
	}
	return out
}
