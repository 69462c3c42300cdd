package networking

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"

	"github.com/fairlead/fairlead/internal/registry/store"
)

var apiVersion = networkingv1.SchemeGroupVersion.String() //nolint:gochecknoglobals // constant in all but name

// Storage serves this package's kinds.
type Storage struct {
	IPAddress         *store.REST
	ServiceCIDR       *store.REST
	ServiceCIDRStatus *store.SubREST
}

// AddToScheme adds the defaults and the selectable fields of the kinds to a scheme that knows
// their types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddTypeDefaultingFunc(&networkingv1.IngressClass{}, func(obj any) { setClassDefaults(obj.(*networkingv1.IngressClass)) })
	s.AddTypeDefaultingFunc(&networkingv1.IngressClassList{}, func(obj any) {
		list := obj.(*networkingv1.IngressClassList)
		for i := range list.Items {
			setClassDefaults(&list.Items[i])
		}
	})
	return s.AddFieldLabelConversionFunc(networkingv1.SchemeGroupVersion.WithKind("IPAddress"),
		func(label, value string) (string, string, error) {
			switch label {
			case "metadata.name", "spec.parentRef.group", "spec.parentRef.resource", "spec.parentRef.namespace", "spec.parentRef.name":
				return label, value, nil
			}
			return "", "", fmt.Errorf("field label not supported: %s", label)
		})
}

// Taken is a range whose addresses no ServiceCIDR may have, and who has them.
type Taken struct {
	netip.Prefix
	By string
}

// NewStorage builds the storages on the back end that opts gives.
func NewStorage(opts generic.RESTOptionsGetter, taken ...Taken) (Storage, error) {
	ip, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: networkingv1.GroupName, Resource: "ipaddresses"},
		Singular: "ipaddress", ShortNames: []string{"ip"},
		New:      store.Empty[networkingv1.IPAddress],
		NewList:  store.Empty[networkingv1.IPAddressList],
		Strategy: ipRules().Strategy(),
		Attrs:    ipAttrs,
		Table: store.NewTable([]store.Column{
			{Name: "ParentRef", Description: networkingv1.IPAddressSpec{}.SwaggerDoc()["parentRef"]},
		}, func(a *networkingv1.IPAddress) []any {
			return []any{parentText(a.Spec.ParentRef)}
		}),
	}, opts)
	if err != nil {
		return Storage{}, err
	}
	cidrs := cidrRules(taken)
	cidr, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: networkingv1.GroupName, Resource: "servicecidrs"},
		Singular: "servicecidr",
		New:      store.Empty[networkingv1.ServiceCIDR],
		NewList:  store.Empty[networkingv1.ServiceCIDRList],
		Strategy: cidrs.Strategy(),
		Table: store.NewTable([]store.Column{
			{Name: "CIDRs", Description: networkingv1.ServiceCIDRSpec{}.SwaggerDoc()["cidrs"]},
			store.AgeColumn(),
		}, func(c *networkingv1.ServiceCIDR) []any {
			return []any{strings.Join(c.Spec.CIDRs, ","), store.Age(c.CreationTimestamp)}
		}),
	}, opts)
	if err != nil {
		return Storage{}, err
	}
	status := cidrs.Sub(validateCIDRStatus, store.Part[*networkingv1.ServiceCIDR]{Path: "metadata"},
		store.Field("spec", func(c *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDRSpec { return &c.Spec }))
	return Storage{ip, cidr, store.NewSub(cidr, status.Strategy())}, nil
}

// parentText is "services/default/web", with the group behind the resource
// where it has one.
func parentText(ref *networkingv1.ParentReference) string {
	if ref == nil {
		return "<none>"
	}
	text := strings.ToLower(schema.GroupResource{Group: ref.Group, Resource: ref.Resource}.String())
	if ref.Namespace != "" {
		text += "/" + ref.Namespace
	}
	return text + "/" + ref.Name
}

func ipAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	a, ok := obj.(*networkingv1.IPAddress)
	if !ok {
		return nil, nil, fmt.Errorf("not an IPAddress: %T", obj)
	}
	set := generic.ObjectMetaFieldsSet(&a.ObjectMeta, false)
	if ref := a.Spec.ParentRef; ref != nil {
		set["spec.parentRef.group"], set["spec.parentRef.resource"] = ref.Group, ref.Resource
		set["spec.parentRef.namespace"], set["spec.parentRef.name"] = ref.Namespace, ref.Name
	}
	return a.Labels, set, nil
}

func ipRules() store.Rules[*networkingv1.IPAddress] {
	return store.Rules[*networkingv1.IPAddress]{
		ClusterScoped: true,
		Validate: func(_ context.Context, a, prev *networkingv1.IPAddress) field.ErrorList {
			errs := validateIPAddress(a)
			if prev == nil {
				return errs
			}
			return append(errs, validateIPAddressUpdate(a, prev)...)
		},
	}
}

// cidrRules reject ranges that overlap a taken range.
func cidrRules(taken []Taken) store.Rules[*networkingv1.ServiceCIDR] {
	return store.Rules[*networkingv1.ServiceCIDR]{
		APIVersion: apiVersion, ClusterScoped: true,
		Kept: []store.Part[*networkingv1.ServiceCIDR]{
			store.Field("status", func(c *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDRStatus { return &c.Status }),
		},
		Validate: func(_ context.Context, c, prev *networkingv1.ServiceCIDR) field.ErrorList {
			if prev == nil {
				return append(validateServiceCIDR(c), validateOverlap(c, 0, taken)...)
			}
			return append(validateServiceCIDRUpdate(c, prev), validateOverlap(c, len(prev.Spec.CIDRs), taken)...)
		},
	}
}

// validateCIDRStatus does not check the conditions, as Kubernetes: the condition
// of the default ServiceCIDR has no reason.
func validateCIDRStatus(_ context.Context, c, prev *networkingv1.ServiceCIDR) field.ErrorList {
	return store.ValidateMetaUpdate(&c.ObjectMeta, &prev.ObjectMeta)
}
