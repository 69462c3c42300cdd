package admit

import (
	"context"
	"fmt"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/fairlead/fairlead/internal/apiserver/access"
	"github.com/fairlead/fairlead/internal/checks"
	"github.com/fairlead/fairlead/internal/svc"
)

// checkAdmission rejects checks of endpoints that a user without the right asks for: nodes send
// them from the administrator's network to any address and port, and the conditions of the slice show what
// answers. It counts again when addresses or the check change.
type checkAdmission struct {
	*admission.Handler
	authorizer authorizer.UnconditionalAuthorizer
}

var _ admission.ValidationInterface = checkAdmission{}

// NewCheckAdmission returns the plugin that rejects annotations of checks from users without the right to them.
func NewCheckAdmission(a authorizer.UnconditionalAuthorizer) checkAdmission {
	return checkAdmission{admission.NewHandler(admission.Create, admission.Update), a}
}

// Validate rejects an EndpointSlice with a target that is new.
func (c checkAdmission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if r := a.GetResource(); r.Group != discoveryv1.GroupName || r.Resource != "endpointslices" || a.GetSubresource() != "" {
		return nil
	}
	s, ok := a.GetObject().(*discoveryv1.EndpointSlice)
	if !ok {
		return apierrors.NewBadRequest(fmt.Sprintf("unexpected %T", a.GetObject()))
	}
	had := map[checks.Key]bool{}
	if old, ok := a.GetOldObject().(*discoveryv1.EndpointSlice); ok && old != nil {
		for _, t := range checks.Of(old) {
			had[t.Key] = true
		}
	}
	added := 0
	for _, t := range checks.Of(s) {
		if !had[t.Key] {
			added++
		}
	}
	if added == 0 {
		return nil
	}
	if may, err := access.MayUse(ctx, c.authorizer, a, access.ChecksResource); may || err != nil {
		return err
	}
	return admission.NewForbidden(a, fmt.Errorf("annotation %s: checks of %d endpoints by nodes need the right to %q the resource "+
		"endpointslices.%s/%s in namespace %q, which an administrator gives by a role",
		svc.CheckAnnotation, added, access.VerbUse, discoveryv1.GroupName, access.ChecksResource, a.GetNamespace()))
}
