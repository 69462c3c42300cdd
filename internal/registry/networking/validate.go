package networking

import (
	"fmt"
	"net/netip"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// validateIPAddressName: an address in its canonical form.
func validateIPAddressName(name string, _ bool) (messages []string) {
	for _, e := range validation.IsValidIP(nil, name) {
		messages = append(messages, e.Detail)
	}
	return messages
}

func validateIPAddress(a *networkingv1.IPAddress) field.ErrorList {
	errs := store.ValidateMeta(&a.ObjectMeta, false, validateIPAddressName)
	at := field.NewPath("spec", "parentRef")
	ref := a.Spec.ParentRef
	if ref == nil {
		return append(errs, field.Required(at, ""))
	}
	invalid := func(name, value string, messages []string) {
		errs = append(errs, store.Invalids(at.Child(name), value, messages)...)
	}
	if ref.Group != "" { // the core group is the empty name
		invalid("group", ref.Group, validation.IsDNS1123Subdomain(ref.Group))
	}
	for _, f := range []struct {
		name, value string
		required    bool
	}{{"resource", ref.Resource, true}, {"name", ref.Name, true}, {"namespace", ref.Namespace, false}} {
		switch {
		case f.value != "":
			invalid(f.name, f.value, content.IsPathSegmentName(f.value))
		case f.required:
			errs = append(errs, field.Required(at.Child(f.name), ""))
		}
	}
	return errs
}

func validateIPAddressUpdate(a, old *networkingv1.IPAddress) field.ErrorList {
	errs := store.ValidateMetaUpdate(&a.ObjectMeta, &old.ObjectMeta)
	return append(errs, apivalidation.ValidateImmutableField(a.Spec.ParentRef, old.Spec.ParentRef, field.NewPath("spec", "parentRef"))...)
}

func validateServiceCIDR(c *networkingv1.ServiceCIDR) field.ErrorList {
	errs := store.ValidateMeta(&c.ObjectMeta, false, apivalidation.NameIsDNSSubdomain)
	return append(errs, validateCIDRs(c.Spec.CIDRs, field.NewPath("spec", "cidrs"))...)
}

// validateCIDRs: one network, or one of each family, in canonical form.
func validateCIDRs(cidrs []string, at *field.Path) field.ErrorList {
	switch {
	case len(cidrs) == 0:
		return field.ErrorList{field.Required(at, "at least one CIDR required")}
	case len(cidrs) > 2:
		return field.ErrorList{field.Invalid(at, cidrs, "may only hold up to 2 values")}
	}
	var errs field.ErrorList
	for i, s := range cidrs {
		errs = append(errs, validation.IsValidCIDR(at.Index(i), s)...)
	}
	if len(cidrs) == 2 {
		f := netutils.IPFamilyOfCIDRString(cidrs[0])
		if f != netutils.IPFamilyUnknown && f == netutils.IPFamilyOfCIDRString(cidrs[1]) {
			errs = append(errs, field.Invalid(at, cidrs,
				"may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64"))
		}
	}
	return errs
}

// validateServiceCIDRUpdate: a range of the second family may be added, and
// nothing else be changed.
func validateServiceCIDRUpdate(c, old *networkingv1.ServiceCIDR) field.ErrorList {
	errs := store.ValidateMetaUpdate(&c.ObjectMeta, &old.ObjectMeta)
	at, cidrs, prev := field.NewPath("spec", "cidrs"), c.Spec.CIDRs, old.Spec.CIDRs
	added := len(prev) == 1 && len(cidrs) == 2
	if len(prev) != len(cidrs) && !added {
		return append(errs, field.Invalid(at, cidrs, apivalidation.FieldImmutableErrorMsg))
	}
	for i := range prev {
		if cidrs[i] != prev[i] {
			errs = append(errs, field.Invalid(at.Index(i), cidrs[i], apivalidation.FieldImmutableErrorMsg))
		}
	}
	if added {
		errs = append(errs, validateCIDRs(cidrs, at)...)
	}
	return errs
}

// validateOverlap rejects ranges from the first on that have addresses of others: nodes
// drop what goes to an address of a ServiceCIDR that no Service has. The default is what
// the servers' flags say.
func validateOverlap(c *networkingv1.ServiceCIDR, first int, taken []Taken) (errs field.ErrorList) {
	for i := first; i < len(c.Spec.CIDRs) && c.Name != DefaultName; i++ {
		p, err := netip.ParsePrefix(c.Spec.CIDRs[i])
		if err != nil {
			continue // rejected already
		}
		for _, t := range taken {
			if p.Overlaps(t.Prefix) {
				errs = append(errs, field.Invalid(field.NewPath("spec", "cidrs").Index(i), c.Spec.CIDRs[i],
					fmt.Sprintf("overlaps %s, %s", t.Prefix, t.By)))
			}
		}
	}
	return errs
}
