package claim

import (
	"net/netip"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Claim is who has an address, as an IPAddress object of svc.AddressManager records it.
type Claim struct {
	Addr netip.Addr
	// Pool names the IPAddressPool of the address.
	Pool string
	// Services have the address, several if they share it. Each is listed once.
	Services []svc.Name
}

// Selector selects the IPAddress objects that are claims.
const Selector = networkingv1.LabelManagedBy + "=" + svc.AddressManager

// Parse reads a claim. ok is false if the object's name is not an address. Blanks around the names of Services do not
// count; without a valid name in the annotation the claim is for its parentRef.
func Parse(o *networkingv1.IPAddress) (c Claim, ok bool) {
	c.Addr, ok = Addr(o)
	c.Pool = o.Annotations[svc.ClaimPoolAnnotation]
	for text := range strings.SplitSeq(o.Annotations[svc.ClaimServicesAnnotation], ",") {
		name, err := svc.ParseName(strings.TrimSpace(text))
		if err == nil && !slices.Contains(c.Services, name) {
			c.Services = append(c.Services, name)
		}
	}
	if ref := o.Spec.ParentRef; len(c.Services) == 0 && ref != nil {
		c.Services = []svc.Name{{Namespace: ref.Namespace, Name: ref.Name}}
	}
	return c, ok
}

// Addr returns the address that an IPAddress object is named after.
func Addr(o metav1.Object) (addr netip.Addr, ok bool) {
	addr, err := netip.ParseAddr(o.GetName())
	return addr, err == nil
}

// Object returns the IPAddress object that records c, which has at least one Service.
func (c Claim) Object() *networkingv1.IPAddress {
	return &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{
			Name: c.Addr.String(),
			Labels: map[string]string{
				networkingv1.LabelManagedBy:       svc.AddressManager,
				networkingv1.LabelIPAddressFamily: svc.FamilyOf(c.Addr).String(),
			},
			Annotations: map[string]string{svc.ClaimServicesAnnotation: Join(c.Services), svc.ClaimPoolAnnotation: c.Pool},
		},
		Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{
			Resource: "services", Namespace: c.Services[0].Namespace, Name: c.Services[0].Name,
		}},
	}
}

// Join returns names as the value of svc.ClaimServicesAnnotation.
func Join(names []svc.Name) string {
	out := make([]string, 0, len(names))
	for _, n := range names {
		out = append(out, n.String())
	}
	return strings.Join(out, ",")
}
