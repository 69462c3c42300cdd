// Package pod stores Pods and connects clients to their processes.
package pod

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/registry/node"
	"github.com/fairlead/fairlead/internal/registry/proxy"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages of Pods by resource path; agents reaches the
// nodes on which they run.
func NewStorage(opts generic.RESTOptionsGetter, agents *node.Agents) (map[string]rest.Storage, error) {
	pods := rules()
	r, err := store.New(store.Kind{
		Resource:   corev1.Resource("pods"),
		Singular:   "pod",
		ShortNames: []string{"po"},
		Categories: []string{"all"},
		New:        store.Empty[corev1.Pod],
		NewList:    store.Empty[corev1.PodList],
		Strategy:   graceful{pods.Strategy()},
		Attrs:      attrs,
		// Every node watches its own pods: the watch cache finds them at once.
		Triggers: storage.IndexerFuncs{"spec.nodeName": nodeName},
		Indexers: &cache.Indexers{storage.FieldIndex("spec.nodeName"): nodeNameIndex},
		Table:    table(),
	}, opts)
	if err != nil {
		return nil, err
	}
	r.Store.ReturnDeletedObject = true
	bind := &bindingREST{pods: r.Store}
	stream := &streams{pods: r.Store, agents: agents}
	return map[string]rest.Storage{
		"pods":         &podREST{r},
		"pods/status":  store.NewSub(r, statusRules(pods).Strategy()),
		"pods/binding": bind,
		// kubectl debug. Without it the answer would be that this cluster has them disabled.
		"pods/ephemeralcontainers": store.NewSub(r, pods.Sub(rejectEphemeral, pods.Kept...).Strategy()),
		"bindings":                 &legacyBindingREST{bind},
		"pods/log":                 &logREST{stream},
		"pods/exec":                &execREST{stream},
		"pods/attach":              &attachREST{stream},
		"pods/portforward":         &portForwardREST{stream},
		"pods/trace":               &traceREST{stream},
		"pods/proxy":               proxy.New("pod", &corev1.PodProxyOptions{}, stream.locateProcess),
	}, nil
}

// Complete sets the defaults of a Pod that is in no store, one of a file, and returns
// what is wrong with it.
func Complete(p *corev1.Pod) field.ErrorList {
	setDefaults(p)
	return validate(p)
}

// AddToScheme adds what the kind needs beyond its types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddTypeDefaultingFunc(&corev1.Pod{}, func(obj any) { setDefaults(obj.(*corev1.Pod)) })
	if err := addOptions(s); err != nil {
		return err
	}
	return store.AddFieldLabels(s, corev1.SchemeGroupVersion.WithKind("Pod"),
		"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.hostNetwork",
		"status.phase", "status.podIP", "status.podIPs", "status.nominatedNodeName")
}

func attrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	p := obj.(*corev1.Pod)
	host := "false"
	if p.Spec.HostNetwork {
		host = "true"
	}
	return p.Labels, fields.Set{
		"metadata.name": p.Name, "metadata.namespace": p.Namespace,
		"spec.nodeName": p.Spec.NodeName, "spec.restartPolicy": string(p.Spec.RestartPolicy),
		"spec.schedulerName": p.Spec.SchedulerName, "spec.serviceAccountName": p.Spec.ServiceAccountName,
		"spec.hostNetwork": host,
		"status.phase":     string(p.Status.Phase), "status.podIP": p.Status.PodIP, "status.podIPs": p.Status.PodIP,
		"status.nominatedNodeName": p.Status.NominatedNodeName,
	}, nil
}

func nodeName(obj runtime.Object) string { return obj.(*corev1.Pod).Spec.NodeName }

func nodeNameIndex(obj any) ([]string, error) { return []string{obj.(*corev1.Pod).Spec.NodeName}, nil }
