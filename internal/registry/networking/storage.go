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
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/store"
)

const apiVersion = "networking.k8s.io/v1"

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
		New:      func() runtime.Object { return &networkingv1.IPAddress{} },
		NewList:  func() runtime.Object { return &networkingv1.IPAddressList{} },
		Strategy: ipStrategy{store.ClusterScoped()},
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
	cidr, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: networkingv1.GroupName, Resource: "servicecidrs"},
		Singular: "servicecidr",
		New:      func() runtime.Object { return &networkingv1.ServiceCIDR{} },
		NewList:  func() runtime.Object { return &networkingv1.ServiceCIDRList{} },
		Strategy: cidrStrategy{store.ClusterScoped(), taken},
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
	return Storage{ip, cidr, store.NewSub(cidr, cidrStatusStrategy{store.ClusterScoped()})}, nil
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

type ipStrategy struct{ store.Base }

func (ipStrategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	return validateIPAddress(obj.(*networkingv1.IPAddress))
}

func (ipStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	errs := validateIPAddress(obj.(*networkingv1.IPAddress))
	return append(errs, validateIPAddressUpdate(obj.(*networkingv1.IPAddress), old.(*networkingv1.IPAddress))...)
}

type cidrStrategy struct {
	store.Base
	taken []Taken
}

func (cidrStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"status"})
}

func (cidrStrategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	c := obj.(*networkingv1.ServiceCIDR)
	c.Status = networkingv1.ServiceCIDRStatus{}
}

func (cidrStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	c, prev := obj.(*networkingv1.ServiceCIDR), old.(*networkingv1.ServiceCIDR)
	c.Status = prev.Status
}

func (s cidrStrategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	c := obj.(*networkingv1.ServiceCIDR)
	return append(validateServiceCIDR(c), validateOverlap(c, 0, s.taken)...)
}

func (s cidrStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	c, prev := obj.(*networkingv1.ServiceCIDR), old.(*networkingv1.ServiceCIDR)
	return append(validateServiceCIDRUpdate(c, prev), validateOverlap(c, len(prev.Spec.CIDRs), s.taken)...)
}

type cidrStatusStrategy struct{ store.Base }

func (cidrStatusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"metadata"}, []string{"spec"})
}

func (cidrStatusStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	c, prev := obj.(*networkingv1.ServiceCIDR), old.(*networkingv1.ServiceCIDR)
	c.Spec = prev.Spec
}

// ValidateUpdate does not look at the conditions, as Kubernetes: that of the
// default ServiceCIDR has no reason.
func (cidrStatusStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	c, prev := obj.(*networkingv1.ServiceCIDR), old.(*networkingv1.ServiceCIDR)
	return store.ValidateMetaUpdate(&c.ObjectMeta, &prev.ObjectMeta)
}
