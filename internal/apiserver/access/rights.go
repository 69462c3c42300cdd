package access

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// VerbUse on one of the subresources below is a right: no request has such a path, a role names it.
const VerbUse = "use"

const (
	// ChecksResource of endpointslices lets a user have nodes check the endpoints of a slice.
	ChecksResource = "checks"
	// ExternalIPsResource of services lets a user add external IPs to Services.
	ExternalIPsResource = "externalips"
	// PrivilegedResource of pods frees a user of --pod-security-default. Labels of a
	// namespace hold for everybody.
	PrivilegedResource = "privileged"
)

// MayUse reports whether the user of a has the right to use a subresource of the object of a.
func MayUse(ctx context.Context, auth authorizer.UnconditionalAuthorizer, a admission.Attributes, subresource string) (bool, error) {
	r := a.GetResource()
	d, _, err := auth.Authorize(ctx, authorizer.AttributesRecord{
		User: a.GetUserInfo(), Verb: VerbUse, APIGroup: r.Group, APIVersion: r.Version, Resource: r.Resource, Subresource: subresource,
		Namespace: a.GetNamespace(), Name: a.GetName(), ResourceRequest: true,
	})
	if err != nil {
		return false, apierrors.NewInternalError(fmt.Errorf("cannot check the right to %q the resource %s/%s: %w",
			VerbUse, r.GroupResource(), subresource, err))
	}
	return d == authorizer.DecisionAllow, nil
}
