// Package apps stores Deployments, ReplicaSets, DaemonSets and ControllerRevisions.
package apps

import (
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/pod"
	"github.com/fairlead/fairlead/internal/registry/store"
)

var apiVersion = appsv1.SchemeGroupVersion.String() //nolint:gochecknoglobals // constant in all but name

// NewStorage returns the storages of the kinds of apps/v1 by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	out := map[string]rest.Storage{}
	for _, k := range []struct {
		kind   store.Kind
		status store.Strategy // nil without the subresource status
		scaled scaled         // nil without the subresource scale
	}{
		{deployments(), deploymentStatusRules().Strategy(), scaledDeployment},
		{replicaSets(), replicaSetStatusRules().Strategy(), scaledReplicaSet},
		{daemonSets(), daemonSetStatusRules().Strategy(), nil},
		{controllerRevisions(), nil, nil},
	} {
		r, err := store.New(k.kind, opts)
		if err != nil {
			return nil, err
		}
		name := k.kind.Resource.Resource
		out[name] = r
		if k.status != nil {
			out[name+"/status"] = store.NewSub(r, k.status)
		}
		if k.scaled != nil {
			out[name+"/scale"] = &scaleREST{r.Store, k.scaled}
		}
	}
	return out, nil
}

// AddToScheme adds what the kinds need beyond their types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddTypeDefaultingFunc(&appsv1.Deployment{}, func(obj any) { setDeploymentDefaults(obj.(*appsv1.Deployment)) })
	s.AddTypeDefaultingFunc(&appsv1.ReplicaSet{}, func(obj any) {
		r := obj.(*appsv1.ReplicaSet)
		setDefault(&r.Spec.Replicas, 1)
		pod.SetTemplateDefaults(&r.Spec.Template.Spec)
	})
	s.AddTypeDefaultingFunc(&appsv1.DaemonSet{}, func(obj any) { setDaemonSetDefaults(obj.(*appsv1.DaemonSet)) })
	return store.AddFieldLabels(s, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"), "status.replicas")
}

// Defaults of Kubernetes.
const (
	historyLimit     = 10
	progressDeadline = 600 // seconds
	quarter          = "25%"
)

func setDefault[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}

func setDeploymentDefaults(d *appsv1.Deployment) {
	setDefault(&d.Spec.Replicas, 1)
	strategy := &d.Spec.Strategy
	if strategy.Type == "" {
		strategy.Type = appsv1.RollingUpdateDeploymentStrategyType
	}
	if strategy.Type == appsv1.RollingUpdateDeploymentStrategyType {
		setDefault(&strategy.RollingUpdate, appsv1.RollingUpdateDeployment{})
		setDefault(&strategy.RollingUpdate.MaxUnavailable, intstr.FromString(quarter))
		setDefault(&strategy.RollingUpdate.MaxSurge, intstr.FromString(quarter))
	}
	setDefault(&d.Spec.RevisionHistoryLimit, historyLimit)
	setDefault(&d.Spec.ProgressDeadlineSeconds, progressDeadline)
	pod.SetTemplateDefaults(&d.Spec.Template.Spec)
}

func setDaemonSetDefaults(d *appsv1.DaemonSet) {
	strategy := &d.Spec.UpdateStrategy
	if strategy.Type == "" {
		strategy.Type = appsv1.RollingUpdateDaemonSetStrategyType
	}
	if strategy.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		setDefault(&strategy.RollingUpdate, appsv1.RollingUpdateDaemonSet{})
		setDefault(&strategy.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
		setDefault(&strategy.RollingUpdate.MaxSurge, intstr.FromInt32(0))
	}
	setDefault(&d.Spec.RevisionHistoryLimit, historyLimit)
	pod.SetTemplateDefaults(&d.Spec.Template.Spec)
	// Who writes the whole object owns the annotation, as in kube-apiserver; the server counts it.
	if _, ok := d.Annotations[appsv1.DeprecatedTemplateGeneration]; !ok {
		setTemplateGeneration(d, 0)
	}
}

func resource(name string) schema.GroupResource {
	return schema.GroupResource{Group: appsv1.GroupName, Resource: name}
}

// templateColumns are the columns of kubectl get -o wide about a template.
func templateColumns(selector string) []store.Column {
	return []store.Column{
		{Name: "Containers", Wide: true, Description: "Names of each container in the template."},
		{Name: "Images", Wide: true, Description: "Images referenced by each container in the template."},
		{Name: "Selector", Wide: true, Description: selector},
	}
}

func templateCells(list []corev1.Container, selector *metav1.LabelSelector) []any {
	var names, images []string
	for i := range list {
		names, images = append(names, list[i].Name), append(images, list[i].Image)
	}
	return []any{strings.Join(names, ","), strings.Join(images, ","), metav1.FormatLabelSelector(selector)}
}

func replicas(n *int32) int64 {
	if n == nil {
		return 0
	}
	return int64(*n)
}

func deployments() store.Kind {
	spec, status := appsv1.DeploymentSpec{}.SwaggerDoc(), appsv1.DeploymentStatus{}.SwaggerDoc()
	return store.Kind{
		Resource: resource("deployments"), Singular: "deployment", ShortNames: []string{"deploy"}, Categories: []string{"all"},
		New:      store.Empty[appsv1.Deployment],
		NewList:  store.Empty[appsv1.DeploymentList],
		Strategy: deploymentRules().Strategy(),
		Table: store.NewTable(slices.Concat([]store.Column{
			{Name: "Ready", Description: "Number of the pod with ready state"},
			{Name: "Up-to-date", Description: status["updatedReplicas"]},
			{Name: "Available", Description: status["availableReplicas"]},
			store.AgeColumn(),
		}, templateColumns(spec["selector"])), func(d *appsv1.Deployment) []any {
			return append([]any{
				fmt.Sprintf("%d/%d", d.Status.ReadyReplicas, replicas(d.Spec.Replicas)), int64(d.Status.UpdatedReplicas),
				int64(d.Status.AvailableReplicas), store.Age(d.CreationTimestamp),
			}, templateCells(d.Spec.Template.Spec.Containers, d.Spec.Selector)...)
		}),
	}
}

func replicaSets() store.Kind {
	spec, status := appsv1.ReplicaSetSpec{}.SwaggerDoc(), appsv1.ReplicaSetStatus{}.SwaggerDoc()
	return store.Kind{
		Resource: resource("replicasets"), Singular: "replicaset", ShortNames: []string{"rs"}, Categories: []string{"all"},
		New:      store.Empty[appsv1.ReplicaSet],
		NewList:  store.Empty[appsv1.ReplicaSetList],
		Strategy: replicaSetRules().Strategy(), Attrs: replicaSetAttrs,
		Table: store.NewTable(slices.Concat([]store.Column{
			{Name: "Desired", Type: "integer", Description: spec["replicas"]},
			{Name: "Current", Type: "integer", Description: status["replicas"]},
			{Name: "Ready", Type: "integer", Description: status["readyReplicas"]},
			store.AgeColumn(),
		}, templateColumns(spec["selector"])), func(r *appsv1.ReplicaSet) []any {
			return append([]any{
				replicas(r.Spec.Replicas), int64(r.Status.Replicas), int64(r.Status.ReadyReplicas), store.Age(r.CreationTimestamp),
			}, templateCells(r.Spec.Template.Spec.Containers, r.Spec.Selector)...)
		}),
	}
}

func daemonSets() store.Kind {
	spec, status := appsv1.DaemonSetSpec{}.SwaggerDoc(), appsv1.DaemonSetStatus{}.SwaggerDoc()
	return store.Kind{
		Resource: resource("daemonsets"), Singular: "daemonset", ShortNames: []string{"ds"}, Categories: []string{"all"},
		New:      store.Empty[appsv1.DaemonSet],
		NewList:  store.Empty[appsv1.DaemonSetList],
		Strategy: daemonSetRules().Strategy(),
		Table: store.NewTable(slices.Concat([]store.Column{
			{Name: "Desired", Type: "integer", Description: status["desiredNumberScheduled"]},
			{Name: "Current", Type: "integer", Description: status["currentNumberScheduled"]},
			{Name: "Ready", Type: "integer", Description: status["numberReady"]},
			{Name: "Up-to-date", Type: "integer", Description: status["updatedNumberScheduled"]},
			{Name: "Available", Type: "integer", Description: status["numberAvailable"]},
			{Name: "Node Selector", Description: corev1.PodSpec{}.SwaggerDoc()["nodeSelector"]},
			store.AgeColumn(),
		}, templateColumns(spec["selector"])), func(d *appsv1.DaemonSet) []any {
			s := &d.Status
			return append([]any{
				int64(s.DesiredNumberScheduled), int64(s.CurrentNumberScheduled), int64(s.NumberReady), int64(s.UpdatedNumberScheduled),
				int64(s.NumberAvailable), labels.FormatLabels(d.Spec.Template.Spec.NodeSelector), store.Age(d.CreationTimestamp),
			}, templateCells(d.Spec.Template.Spec.Containers, d.Spec.Selector)...)
		}),
	}
}

func controllerRevisions() store.Kind {
	return store.Kind{
		Resource: resource("controllerrevisions"), Singular: "controllerrevision",
		New:      store.Empty[appsv1.ControllerRevision],
		NewList:  store.Empty[appsv1.ControllerRevisionList],
		Strategy: revisionRules().Strategy(),
		Table: store.NewTable([]store.Column{
			{Name: "Controller", Description: "Controller of the object"},
			{Name: "Revision", Description: appsv1.ControllerRevision{}.SwaggerDoc()["revision"]},
			store.AgeColumn(),
		}, func(r *appsv1.ControllerRevision) []any {
			owner := ""
			if ref := metav1.GetControllerOf(r); ref != nil {
				gv, _ := schema.ParseGroupVersion(ref.APIVersion)
				owner = strings.ToLower(gv.WithKind(ref.Kind).GroupKind().String()) + "/" + ref.Name
			}
			return []any{store.OrNone(owner), r.Revision, store.Age(r.CreationTimestamp)}
		}),
	}
}
