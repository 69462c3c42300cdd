package apps

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/pod"
	"github.com/fairlead/fairlead/internal/registry/store"
)

func deployments() store.Kind {
	spec, status := appsv1.DeploymentSpec{}.SwaggerDoc(), appsv1.DeploymentStatus{}.SwaggerDoc()
	return store.Kind{
		Resource: resource("deployments"), Singular: "deployment", ShortNames: []string{"deploy"}, Categories: []string{"all"},
		New:      func() runtime.Object { return &appsv1.Deployment{} },
		NewList:  func() runtime.Object { return &appsv1.DeploymentList{} },
		Strategy: deploymentStrategy{store.Namespaced()},
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

type deploymentStrategy struct{ store.Base }

func (deploymentStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"status"})
}

func (deploymentStrategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	d := obj.(*appsv1.Deployment)
	d.Generation, d.Status = 1, appsv1.DeploymentStatus{}
}

// PrepareForUpdate counts changes of annotations too: they are copied to ReplicaSets.
func (deploymentStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	d, before := obj.(*appsv1.Deployment), old.(*appsv1.Deployment)
	d.Status = before.Status
	if !equality.Semantic.DeepEqual(d.Spec, before.Spec) || !equality.Semantic.DeepEqual(d.Annotations, before.Annotations) {
		d.Generation = before.Generation + 1
	}
}

func (deploymentStrategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	d := obj.(*appsv1.Deployment)
	return append(validateMeta(&d.ObjectMeta), validateDeployment(&d.Spec, field.NewPath("spec"))...)
}

func (deploymentStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	d, before := obj.(*appsv1.Deployment), old.(*appsv1.Deployment)
	errs := store.ValidateMetaUpdate(&d.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, validateDeployment(&d.Spec, field.NewPath("spec"))...)
	return append(errs, immutableSelector(d.Spec.Selector, before.Spec.Selector)...)
}

func (deploymentStrategy) WarningsOnCreate(_ context.Context, obj runtime.Object) []string {
	d := obj.(*appsv1.Deployment)
	return append(nameWarnings(d.Name), pod.SpecWarnings(&d.Spec.Template.Spec, templatePath)...)
}

func (deploymentStrategy) WarningsOnUpdate(_ context.Context, obj, old runtime.Object) []string {
	d := obj.(*appsv1.Deployment)
	if d.Generation == old.(*appsv1.Deployment).Generation {
		return nil
	}
	return pod.SpecWarnings(&d.Spec.Template.Spec, templatePath)
}

type deploymentStatus struct{ deploymentStrategy }

func (deploymentStatus) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"spec"}, []string{"metadata", "labels"})
}

func (deploymentStatus) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	d, before := obj.(*appsv1.Deployment), old.(*appsv1.Deployment)
	d.Spec, d.Labels = before.Spec, before.Labels
}

func (deploymentStatus) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	d, before := obj.(*appsv1.Deployment), old.(*appsv1.Deployment)
	s, at := &d.Status, field.NewPath("status")
	errs := store.ValidateMetaUpdate(&d.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, nonnegatives(at, []counter{
		{"observedGeneration", s.ObservedGeneration},
		{"replicas", int64(s.Replicas)},
		{"updatedReplicas", int64(s.UpdatedReplicas)},
		{"readyReplicas", int64(s.ReadyReplicas)},
		{"availableReplicas", int64(s.AvailableReplicas)},
		{"unavailableReplicas", int64(s.UnavailableReplicas)},
		{"terminatingReplicas", replicas(s.TerminatingReplicas)},
		{"collisionCount", replicas(s.CollisionCount)},
	})...)
	errs = append(errs, atMost(at, s.Replicas, []counter{
		{"updatedReplicas", int64(s.UpdatedReplicas)},
		{"readyReplicas", int64(s.ReadyReplicas)},
		{"availableReplicas", int64(s.AvailableReplicas)},
	})...)
	errs = append(errs, availableReady(at, s.AvailableReplicas, s.ReadyReplicas)...)
	return append(errs, notDecremented(at, s.CollisionCount, before.Status.CollisionCount)...)
}

func (deploymentStatus) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}
