package apiserver

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// verbUse on one of the subresources below is a right: no request has such a path, a role names it.
const verbUse = "use"

const (
	// checksResource of endpointslices lets a user have nodes check the endpoints of a slice.
	checksResource = "checks"
	// externalIPsResource of services lets a user add external IPs to Services.
	externalIPsResource = "externalips"
	// privilegedResource of pods frees a user of --pod-security-default. Labels of a
	// namespace hold for everybody.
	privilegedResource = "privileged"
)

// mayUse reports whether the user of a has the right to use a subresource of the object of a.
func mayUse(ctx context.Context, auth authorizer.UnconditionalAuthorizer, a admission.Attributes, subresource string) (bool, error) {
	r := a.GetResource()
	d, _, err := auth.Authorize(ctx, authorizer.AttributesRecord{
		User: a.GetUserInfo(), Verb: verbUse, APIGroup: r.Group, APIVersion: r.Version, Resource: r.Resource, Subresource: subresource,
		Namespace: a.GetNamespace(), Name: a.GetName(), ResourceRequest: true,
	})
	if err != nil {
		return false, apierrors.NewInternalError(fmt.Errorf("cannot check the right to %q the resource %s/%s: %w",
			verbUse, r.GroupResource(), subresource, err))
	}
	return d == authorizer.DecisionAllow, nil
}
