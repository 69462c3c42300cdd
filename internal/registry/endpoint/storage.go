package endpoint

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// Storage serves this package's kinds.
type Storage struct {
	Endpoints     *store.REST
	EndpointSlice *store.REST
}

// AddToScheme adds the defaults of the kinds to a scheme that knows their
// types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddTypeDefaultingFunc(&corev1.Endpoints{}, func(obj any) { setEndpointsDefaults(obj.(*corev1.Endpoints)) })
	s.AddTypeDefaultingFunc(&corev1.EndpointsList{}, func(obj any) {
		list := obj.(*corev1.EndpointsList)
		for i := range list.Items {
			setEndpointsDefaults(&list.Items[i])
		}
	})
	s.AddTypeDefaultingFunc(&discoveryv1.EndpointSlice{}, func(obj any) { setSliceDefaults(obj.(*discoveryv1.EndpointSlice)) })
	s.AddTypeDefaultingFunc(&discoveryv1.EndpointSliceList{}, func(obj any) {
		list := obj.(*discoveryv1.EndpointSliceList)
		for i := range list.Items {
			setSliceDefaults(&list.Items[i])
		}
	})
	return nil
}

// NewStorage builds the storages on the back end that opts gives.
func NewStorage(opts generic.RESTOptionsGetter) (Storage, error) {
	eps, err := store.New(store.Kind{
		Resource: schema.GroupResource{Resource: "endpoints"}, Singular: "endpoints", ShortNames: []string{"ep"},
		New:      store.Empty[corev1.Endpoints],
		NewList:  store.Empty[corev1.EndpointsList],
		Strategy: endpointsRules().Strategy(),
		Table: store.NewTable([]store.Column{
			{Name: "Endpoints", Description: corev1.Endpoints{}.SwaggerDoc()["subsets"]},
			store.AgeColumn(),
		}, func(e *corev1.Endpoints) []any { return []any{endpointsText(e), store.Age(e.CreationTimestamp)} }),
	}, opts)
	if err != nil {
		return Storage{}, err
	}
	doc := discoveryv1.EndpointSlice{}.SwaggerDoc()
	slices, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: discoveryv1.GroupName, Resource: "endpointslices"}, Singular: "endpointslice",
		New:      store.Empty[discoveryv1.EndpointSlice],
		NewList:  store.Empty[discoveryv1.EndpointSliceList],
		Strategy: sliceRules().Strategy(),
		Table: store.NewTable([]store.Column{
			{Name: "AddressType", Description: doc["addressType"]},
			{Name: "Ports", Description: doc["ports"]},
			{Name: "Endpoints", Description: doc["endpoints"]},
			store.AgeColumn(),
		}, func(s *discoveryv1.EndpointSlice) []any {
			return []any{string(s.AddressType), slicePortsText(s.Ports), sliceEndpointsText(s.Endpoints), store.Age(s.CreationTimestamp)}
		}),
	}, opts)
	if err != nil {
		return Storage{}, err
	}
	return Storage{Endpoints: eps, EndpointSlice: slices}, nil
}
