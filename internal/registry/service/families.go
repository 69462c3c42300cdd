package service

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/service/allocator"
	"github.com/fairlead/fairlead/internal/svc"
)

// families are the IP families of the cluster: one or both, the default first.
type families []corev1.IPFamily

func (f families) has(fam corev1.IPFamily) bool { return slices.Contains(f, fam) }

// familiesOf returns the families of the ranges, the default first.
func familiesOf(cidrs []netip.Prefix) (families, error) {
	var out families
	for _, p := range cidrs {
		fam := corev1.IPFamily(svc.FamilyOf(p.Addr()).String())
		if out.has(fam) {
			return nil, fmt.Errorf("service cluster IP ranges %v: want one range, or one of each IP family", cidrs)
		}
		out = append(out, fam)
	}
	if len(out) == 0 {
		return nil, errors.New("no service cluster IP range: want one range, or one of each IP family, for example 10.96.0.0/16")
	}
	return out, nil
}

// serviceKind names the kind in errors.
var serviceKind = schema.GroupKind{Kind: "Service"}

func invalidService(svc *corev1.Service, errs field.ErrorList) error {
	return apierrors.NewInvalid(serviceKind, svc.Name, errs)
}

// initFamilies sets ipFamilyPolicy and ipFamilies from what the writer set,
// the Service before (old, nil on create) and what the cluster has. After it
// ipFamilies has one entry for each cluster IP of the Service.
func (f families) initFamilies(svc, old *corev1.Service) error {
	if !allocator.NeedsClusterIP(svc) || unchangedPrefer(svc, old) {
		return nil
	}
	spec := &svc.Spec
	if spec.IPFamilyPolicy == nil {
		spec.IPFamilyPolicy = new(defaultPolicy(svc, old))
	}
	if errs := validateClusterIPs(svc, old); len(errs) > 0 {
		return invalidService(svc, errs)
	}
	errs := reduceFamilies(svc, old)
	errs = append(errs, checkPolicy(svc)...)
	errs = append(errs, f.inferFamilies(svc)...)
	if len(errs) > 0 {
		return invalidService(svc, errs)
	}
	if isSelectorlessHeadless(svc) {
		// It may have both families on any cluster: its endpoints are not ours.
		if len(spec.IPFamilies) == 0 {
			spec.IPFamilies = []corev1.IPFamily{f[0]}
		}
		if len(spec.IPFamilies) == 1 && familyPolicy(svc) != corev1.IPFamilyPolicySingleStack {
			spec.IPFamilies = append(spec.IPFamilies, otherFamily(spec.IPFamilies[0]))
		}
		return nil
	}
	if errs := f.checkConfigured(svc); len(errs) > 0 {
		return invalidService(svc, errs)
	}
	if len(spec.IPFamilies) == 0 {
		spec.IPFamilies = []corev1.IPFamily{f[0]}
	}
	if familyPolicy(svc) != corev1.IPFamilyPolicySingleStack && len(spec.IPFamilies) == 1 && len(f) == 2 {
		spec.IPFamilies = append(spec.IPFamilies, otherFamily(spec.IPFamilies[0]))
	}
	return nil
}

// defaultPolicy: an update without a policy keeps the one before, so that a
// Service never changes its stacks unasked.
func defaultPolicy(svc, old *corev1.Service) corev1.IPFamilyPolicy {
	switch {
	case old != nil && old.Spec.IPFamilyPolicy != nil:
		return *old.Spec.IPFamilyPolicy
	case isSelectorlessHeadless(svc):
		return corev1.IPFamilyPolicyRequireDualStack
	}
	return corev1.IPFamilyPolicySingleStack
}

// unchangedPrefer reports whether svc is a PreferDualStack Service whose addresses
// stay: such a one must not gain or lose a family because the cluster did.
func unchangedPrefer(svc, old *corev1.Service) bool {
	prefer := func(s *corev1.Service) bool {
		return s.Spec.IPFamilyPolicy == nil || *s.Spec.IPFamilyPolicy == corev1.IPFamilyPolicyPreferDualStack
	}
	return old != nil && svc.Spec.IPFamilyPolicy != nil && svc.Spec.Type == old.Spec.Type && allocator.NeedsClusterIP(svc) &&
		prefer(svc) && prefer(old) &&
		slices.Equal(svc.Spec.ClusterIPs, old.Spec.ClusterIPs) && slices.Equal(svc.Spec.IPFamilies, old.Spec.IPFamilies)
}

// reduceFamilies trims the second family when the policy asks for one stack and
// the writer left the lists as they were, and rejects a shorter list without
// that policy.
func reduceFamilies(svc, old *corev1.Service) field.ErrorList {
	if old == nil {
		return nil
	}
	spec, prev := &svc.Spec, &old.Spec
	if familyPolicy(svc) == corev1.IPFamilyPolicySingleStack {
		if len(spec.ClusterIPs) > 1 && slices.Equal(spec.ClusterIPs, prev.ClusterIPs) {
			spec.ClusterIPs = spec.ClusterIPs[:1]
		}
		if len(spec.IPFamilies) > 1 && slices.Equal(spec.IPFamilies, prev.IPFamilies) {
			spec.IPFamilies = spec.IPFamilies[:1]
		}
		return nil
	}
	var errs field.ErrorList
	path := field.NewPath("spec", "ipFamilyPolicy")
	if n := len(spec.ClusterIPs); n > 0 && n < len(prev.ClusterIPs) {
		errs = append(errs, field.Invalid(path, spec.IPFamilyPolicy, "must be 'SingleStack' to release the secondary cluster IP"))
	}
	if n := len(spec.IPFamilies); n > 0 && n < len(prev.IPFamilies) {
		errs = append(errs, field.Invalid(path, spec.IPFamilyPolicy, "must be 'SingleStack' to release the secondary IP family"))
	}
	return errs
}

func checkPolicy(svc *corev1.Service) field.ErrorList {
	if familyPolicy(svc) != corev1.IPFamilyPolicySingleStack {
		return nil
	}
	var errs field.ErrorList
	path := field.NewPath("spec", "ipFamilyPolicy")
	if len(svc.Spec.ClusterIPs) == 2 {
		errs = append(errs, field.Invalid(path, svc.Spec.IPFamilyPolicy,
			"must be 'RequireDualStack' or 'PreferDualStack' when multiple cluster IPs are specified"))
	}
	if len(svc.Spec.IPFamilies) == 2 {
		errs = append(errs, field.Invalid(path, svc.Spec.IPFamilyPolicy,
			"must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified"))
	}
	return errs
}

// inferFamilies takes the families of given cluster IPs that ipFamilies does
// not name.
func (f families) inferFamilies(svc *corev1.Service) field.ErrorList {
	var errs field.ErrorList
	for i, ip := range svc.Spec.ClusterIPs {
		if ip == corev1.ClusterIPNone {
			break
		}
		if i < len(svc.Spec.IPFamilies) {
			continue
		}
		fam := familyOf(ip)
		if !f.has(fam) {
			errs = append(errs, field.Invalid(field.NewPath("spec", "clusterIPs").Index(i), svc.Spec.ClusterIPs,
				fmt.Sprintf("%s is not configured on this cluster", fam)))
			continue
		}
		svc.Spec.IPFamilies = append(svc.Spec.IPFamilies, fam)
	}
	return errs
}

func (f families) checkConfigured(svc *corev1.Service) field.ErrorList {
	var errs field.ErrorList
	if familyPolicy(svc) == corev1.IPFamilyPolicyRequireDualStack && len(f) < 2 {
		errs = append(errs, field.Invalid(field.NewPath("spec", "ipFamilyPolicy"), svc.Spec.IPFamilyPolicy,
			"this cluster is not configured for dual-stack services"))
	}
	for i, fam := range svc.Spec.IPFamilies {
		if !f.has(fam) {
			errs = append(errs, field.Invalid(field.NewPath("spec", "ipFamilies").Index(i), fam, "not configured on this cluster"))
		}
	}
	return errs
}

// defaultOnRead completes a stored Service that was written without fields that
// exist now, so that every reader sees one shape.
func (f families) defaultOnRead(svc *corev1.Service) {
	spec := &svc.Spec
	linkClusterIPs(svc, nil)
	// Objects of the watch cache are shared: write only what changes.
	if !allocator.NeedsClusterIP(svc) {
		if spec.InternalTrafficPolicy != nil {
			spec.InternalTrafficPolicy = nil
		}
		return
	}
	if len(spec.IPFamilies) > 0 {
		return
	}
	switch {
	case isSelectorlessHeadless(svc):
		spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
		spec.IPFamilies = []corev1.IPFamily{f[0], otherFamily(f[0])}
	case spec.ClusterIP == corev1.ClusterIPNone:
		spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
		spec.IPFamilies = []corev1.IPFamily{f[0]}
	default:
		for _, ip := range spec.ClusterIPs {
			spec.IPFamilies = append(spec.IPFamilies, familyOf(ip))
		}
		switch len(spec.IPFamilies) {
		case 1:
			spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
		case 2:
			spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
		}
	}
}
