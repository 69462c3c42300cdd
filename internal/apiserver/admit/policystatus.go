package admit

import (
	"context"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	validatingpolicy "k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/cel/openapi/resolver"
	applyv1 "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/loop"
)

const (
	// policyManager owns the status of policies, as in Kubernetes.
	policyManager = "validatingadmissionpolicy-status"
	// policyRetry is the pause after the status of a policy could not be written.
	policyRetry = 5 * time.Second
)

// Run checks the types in the expressions of ValidatingAdmissionPolicies and writes
// what is wrong into their status, until ctx ends.
func (h *Hooks) Run(ctx context.Context) {
	policies := h.shared.Admissionregistration().V1().ValidatingAdmissionPolicies()
	wake := loop.NewSignal()
	changed := func(any) { wake.Set() }
	_, err := policies.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: changed, UpdateFunc: func(_, obj any) { changed(obj) },
	})
	if err != nil {
		h.log.Error("cannot follow the admission policies; their status will not be written", "err", err)
		return
	}
	checker := &validatingpolicy.TypeChecker{
		SchemaResolver: &resolver.ClientDiscoveryResolver{Discovery: h.client.Discovery()}, RestMapper: h.kinds,
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
		}
		list, err := policies.Lister().List(labels.Everything())
		if err != nil {
			continue // cannot happen: the lister reads from memory
		}
		failed := false
		for _, p := range list {
			if p.Generation <= p.Status.ObservedGeneration {
				continue
			}
			if err := h.writeStatus(ctx, p, checker.Check(p)); err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) {
				h.log.Warn("cannot write the status of an admission policy; retrying", "policy", p.Name, "err", err, "after", policyRetry)
				failed = true
			}
		}
		if failed {
			time.AfterFunc(policyRetry, wake.Set)
		}
	}
}

func (h *Hooks) writeStatus(ctx context.Context, p *admissionv1.ValidatingAdmissionPolicy, warnings []admissionv1.ExpressionWarning) error {
	checked := applyv1.TypeChecking()
	for _, w := range warnings {
		checked.WithExpressionWarnings(applyv1.ExpressionWarning().WithFieldRef(w.FieldRef).WithWarning(w.Warning))
	}
	status := applyv1.ValidatingAdmissionPolicyStatus().WithObservedGeneration(p.Generation).WithTypeChecking(checked)
	_, err := h.client.AdmissionregistrationV1().ValidatingAdmissionPolicies().ApplyStatus(ctx,
		applyv1.ValidatingAdmissionPolicy(p.Name).WithStatus(status), metav1.ApplyOptions{FieldManager: policyManager, Force: true})
	return err
}
