package store

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ValidateMeta checks the metadata of a new object whose name must pass name.
func ValidateMeta(m *metav1.ObjectMeta, namespaced bool, name validation.ValidateNameFunc) field.ErrorList {
	path := field.NewPath("metadata")
	return append(validation.ValidateObjectMeta(m, namespaced, name, path), validateFinalizers(m, path)...)
}

// ValidateMetaUpdate checks the metadata m as a replacement of old.
func ValidateMetaUpdate(m, old *metav1.ObjectMeta) field.ErrorList {
	path := field.NewPath("metadata")
	return append(validation.ValidateObjectMetaUpdate(m, old, path), validateFinalizers(m, path)...)
}

// validateFinalizers asks for the domain of whoever removes a finalizer: one
// without could be taken for Kubernetes' own.
func validateFinalizers(m *metav1.ObjectMeta, path *field.Path) (errs field.ErrorList) {
	for i, f := range m.Finalizers {
		if e := ValidateFinalizer(f, path.Child("finalizers").Index(i)); e != nil {
			errs = append(errs, e)
		}
	}
	return errs
}

// ValidateFinalizer returns an error unless f has a domain or is a name of
// Kubernetes' own.
func ValidateFinalizer(f string, path *field.Path) *field.Error {
	if strings.Contains(f, "/") {
		return nil
	}
	switch f {
	case string(corev1.FinalizerKubernetes), metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents:
		return nil
	}
	return field.Invalid(path, f, "name is neither a standard finalizer name nor is it fully qualified")
}

// maxErrors is how many errors an answer names. apimachinery takes a time
// square in their number to write them down: half a minute for 20,000.
const maxErrors = 200

// Limit is the beginning of errs where a list of the object, however long, may
// be wrong in every item.
func Limit(errs field.ErrorList) field.ErrorList {
	return errs[:min(len(errs), maxErrors):min(len(errs), maxErrors)]
}
