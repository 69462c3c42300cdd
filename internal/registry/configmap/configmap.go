// Package configmap stores ConfigMaps.
package configmap

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// maxSize is the largest sum of all values, in bytes.
const maxSize = 1 << 20

// NewStorage returns the storages of ConfigMaps by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	r, err := store.New(store.Kind{
		Resource:   corev1.Resource("configmaps"),
		Singular:   "configmap",
		ShortNames: []string{"cm"},
		New:        store.Empty[corev1.ConfigMap],
		NewList:    store.Empty[corev1.ConfigMapList],
		Strategy:   store.Rules[*corev1.ConfigMap]{Validate: validateWrite}.Strategy(),
		Table: store.NewTable([]store.Column{
			{Name: "Data", Description: corev1.ConfigMap{}.SwaggerDoc()["data"]},
			store.AgeColumn(),
		}, func(cm *corev1.ConfigMap) []any {
			return []any{int64(len(cm.Data) + len(cm.BinaryData)), store.Age(cm.CreationTimestamp)}
		}),
	}, opts)
	if err != nil {
		return nil, err
	}
	return map[string]rest.Storage{"configmaps": r}, nil
}

// validateWrite checks cm as a replacement of before, nil on create.
func validateWrite(_ context.Context, cm, before *corev1.ConfigMap) field.ErrorList {
	if before == nil {
		return validate(cm)
	}
	errs := store.ValidateMetaUpdate(&cm.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, store.ValidateImmutable(cm.Immutable, before.Immutable,
		store.DataField{Name: "data", Changed: !equality.Semantic.DeepEqual(cm.Data, before.Data)},
		store.DataField{Name: "binaryData", Changed: !equality.Semantic.DeepEqual(cm.BinaryData, before.BinaryData)})...)
	return append(errs, validate(cm)...)
}

func validate(cm *corev1.ConfigMap) field.ErrorList {
	errs := store.ValidateMeta(&cm.ObjectMeta, true, validation.NameIsDNSSubdomain)
	data, binary := field.NewPath("data"), field.NewPath("binaryData")
	bad, size := store.ValidateDataKeys(cm.Data, data)
	badBinary, binarySize := store.ValidateDataKeys(cm.BinaryData, binary)
	errs = append(append(errs, bad...), badBinary...)
	for _, k := range slices.Sorted(maps.Keys(cm.Data)) {
		if _, both := cm.BinaryData[k]; both {
			errs = append(errs, field.Invalid(data.Key(k), k, "duplicate of key present in binaryData"))
		}
	}
	return append(errs, store.ValidateDataSize(size+binarySize, maxSize, field.NewPath(""))...)
}
