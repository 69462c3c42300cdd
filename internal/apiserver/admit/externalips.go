package admit

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/fairlead/fairlead/internal/apiserver/access"
)

// externalIPAdmission rejects external IPs that a user without the right adds to a
// Service: every node sends its own and its Pods' packets for such an address to the
// Service, so whoever may set one can capture the traffic to any address
// (CVE-2020-8554). What a Service has may stay. It is upstream's
// DenyServiceExternalIPs, with a right.
type externalIPAdmission struct {
	*admission.Handler
	authorizer authorizer.UnconditionalAuthorizer
}

var _ admission.ValidationInterface = externalIPAdmission{}

// NewExternalIPAdmission returns the plugin that rejects new externalIPs from users without the right to them.
func NewExternalIPAdmission(a authorizer.UnconditionalAuthorizer) externalIPAdmission {
	return externalIPAdmission{admission.NewHandler(admission.Create, admission.Update), a}
}

// Validate rejects a Service with an external IP that is new.
func (e externalIPAdmission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if r := a.GetResource(); r.Group != "" || r.Resource != "services" || a.GetSubresource() != "" {
		return nil
	}
	s, ok := a.GetObject().(*corev1.Service)
	if !ok {
		return apierrors.NewBadRequest(fmt.Sprintf("unexpected %T", a.GetObject()))
	}
	var had []string
	if old, ok := a.GetOldObject().(*corev1.Service); ok && old != nil {
		had = old.Spec.ExternalIPs
	}
	added := slices.DeleteFunc(slices.Clone(s.Spec.ExternalIPs), func(ip string) bool { return slices.Contains(had, ip) })
	if len(added) == 0 {
		return nil
	}
	if may, err := access.MayUse(ctx, e.authorizer, a, access.ExternalIPsResource); may || err != nil {
		return err
	}
	return admission.NewForbidden(a, fmt.Errorf("spec.externalIPs: adding %s needs the right to %q the resource services/%s "+
		"in namespace %q, which an administrator gives by a role; or the server runs with --allow-service-external-ips",
		strings.Join(added, ", "), access.VerbUse, access.ExternalIPsResource, a.GetNamespace()))
}
