package service

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/registry/service/allocator"
)

// validateClusterIPs checks clusterIP, clusterIPs, ipFamilies and
// ipFamilyPolicy on their own and against each other, without knowledge of what
// is configured. Nothing here applies to ExternalName.
func validateClusterIPs(svc, old *corev1.Service) field.ErrorList {
	spec := &svc.Spec
	if spec.Type == corev1.ServiceTypeExternalName {
		return nil
	}
	var errs field.ErrorList
	path := field.NewPath("spec")
	at := path.Child("clusterIPs")
	switch {
	case spec.ClusterIP == "" && len(spec.ClusterIPs) > 0:
		errs = append(errs, field.Invalid(at, spec.ClusterIPs, "must be empty when `clusterIP` is not specified"))
	case spec.ClusterIP != "" && len(spec.ClusterIPs) == 0:
		errs = append(errs, field.Required(at, ""))
	case spec.ClusterIP != "" && spec.ClusterIPs[0] != spec.ClusterIP:
		errs = append(errs, field.Invalid(at, spec.ClusterIPs, "first value must match `clusterIP`"))
	}
	seen := map[corev1.IPFamily]bool{}
	for i, f := range spec.IPFamilies {
		errs = append(errs, notIn(path.Child("ipFamilies").Index(i), f, corev1.IPv4Protocol, corev1.IPv6Protocol)...)
		if seen[f] {
			errs = append(errs, field.Duplicate(path.Child("ipFamilies").Index(i), f))
		}
		seen[f] = true
	}
	if p := spec.IPFamilyPolicy; p != nil {
		errs = append(errs, notIn(path.Child("ipFamilyPolicy"), *p, corev1.IPFamilyPolicySingleStack,
			corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack)...)
	}
	bad := validateClusterIPForms(svc, old, at)
	errs = append(errs, bad...)
	if len(spec.ClusterIPs) > 2 {
		errs = append(errs, field.Invalid(at, spec.ClusterIPs, "may only hold up to 2 values"))
	}
	if len(bad) > 0 {
		return errs // what follows would only repeat it in other words
	}
	return append(errs, validateClusterIPFamilies(svc, at)...)
}

// validateClusterIPForms: each is an IP address, or the only one is "None".
func validateClusterIPForms(svc, old *corev1.Service, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	var known []string
	if old != nil {
		known = old.Spec.ClusterIPs
	}
	for i, ip := range svc.Spec.ClusterIPs {
		if i == 0 && ip == corev1.ClusterIPNone {
			if len(svc.Spec.ClusterIPs) > 1 {
				errs = append(errs, field.Invalid(at, svc.Spec.ClusterIPs, "'None' must be the first and only value"))
			}
			continue
		}
		errs = append(errs, validation.IsValidIPForLegacyField(at.Index(i), ip, true, known)...)
	}
	return errs
}

// validateClusterIPFamilies: at most one address of each family, in the order
// of ipFamilies.
func validateClusterIPFamilies(svc *corev1.Service, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	spec := &svc.Spec
	if len(spec.ClusterIPs) > 1 {
		if dual, err := netutils.IsDualStackIPStrings(spec.ClusterIPs); err != nil || !dual {
			errs = append(errs, field.Invalid(at, spec.ClusterIPs, "may specify no more than one IP for each IP family"))
		}
	}
	if allocator.IsHeadless(svc) {
		return errs
	}
	for i, ip := range spec.ClusterIPs {
		if i < len(spec.IPFamilies) && seenFamily(spec.IPFamilies[i]) && spec.IPFamilies[i] != familyOf(ip) {
			errs = append(errs, field.Invalid(at.Index(i), ip,
				fmt.Sprintf("expected an %s value as indicated by `ipFamilies[%v]`", spec.IPFamilies[i], i)))
		}
	}
	return errs
}

func seenFamily(f corev1.IPFamily) bool { return f == corev1.IPv4Protocol || f == corev1.IPv6Protocol }

// validateClusterIPsUpdate: the first cluster IP never changes; a second one may
// be added, and be removed by asking for a single stack.
func validateClusterIPsUpdate(svc, old *corev1.Service) field.ErrorList {
	if !allocator.NeedsClusterIP(svc) || !allocator.NeedsClusterIP(old) || allocator.IsHeadless(svc) && allocator.IsHeadless(old) {
		return nil
	}
	var errs field.ErrorList
	path := field.NewPath("spec")
	at, ips, prev := path.Child("clusterIPs"), svc.Spec.ClusterIPs, old.Spec.ClusterIPs
	changed := func(i int) {
		errs = append(errs, field.Invalid(at.Index(i), ips, "may not change once set"))
	}
	if len(ips) == len(prev) {
		for i := range prev {
			if ips[i] != prev[i] {
				changed(i)
			}
		}
		return errs
	}
	if len(prev) > 0 && len(ips) > 0 && ips[0] != prev[0] {
		changed(0)
	}
	if len(ips) < len(prev) {
		if len(ips) == 0 {
			errs = append(errs, field.Invalid(at.Index(0), ips, "primary clusterIP can not be unset"))
		}
		if len(ips) == 1 && familyPolicy(svc) != corev1.IPFamilyPolicySingleStack {
			errs = append(errs, field.Invalid(path.Child("ipFamilyPolicy"), svc.Spec.IPFamilyPolicy,
				"must be set to 'SingleStack' when releasing the secondary clusterIP"))
		}
	}
	return errs
}

// validateFamiliesUpdate: as for the cluster IPs, but a headless Service may
// change its families at will.
func validateFamiliesUpdate(svc, old *corev1.Service) field.ErrorList {
	if !allocator.NeedsClusterIP(svc) || !allocator.NeedsClusterIP(old) || allocator.IsHeadless(svc) || allocator.IsHeadless(old) {
		return nil
	}
	var errs field.ErrorList
	path := field.NewPath("spec")
	at, fams, prev := path.Child("ipFamilies"), svc.Spec.IPFamilies, old.Spec.IPFamilies
	if len(fams) == len(prev) {
		for i := range prev {
			if fams[i] != prev[i] {
				errs = append(errs, field.Invalid(at.Index(0), fams, "may not change once set"))
			}
		}
		return errs
	}
	if len(prev) > 0 && len(fams) > 0 && fams[0] != prev[0] {
		errs = append(errs, field.Invalid(at.Index(0), svc.Spec.ClusterIPs, "may not change once set"))
	}
	if len(fams) < len(prev) {
		if len(svc.Spec.ClusterIPs) == 0 {
			errs = append(errs, field.Invalid(at.Index(0), fams, "primary ipFamily can not be unset"))
		}
		if len(fams) == 1 && familyPolicy(svc) != corev1.IPFamilyPolicySingleStack {
			errs = append(errs, field.Invalid(path.Child("ipFamilyPolicy"), svc.Spec.IPFamilyPolicy,
				"must be set to 'SingleStack' when releasing the secondary ipFamily"))
		}
	}
	return errs
}
