package store

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Invalids makes one error about value of each message.
func Invalids(path *field.Path, value any, messages []string) field.ErrorList {
	var errs field.ErrorList
	for _, m := range messages {
		errs = append(errs, field.Invalid(path, value, m))
	}
	return errs
}

// ValidateDataKeys checks the keys of the data of a ConfigMap or Secret, and
// returns the size of its values in bytes.
func ValidateDataKeys[V ~string | ~[]byte](data map[string]V, path *field.Path) (errs field.ErrorList, size int) {
	for _, k := range slices.Sorted(maps.Keys(data)) {
		errs = append(errs, Invalids(path.Key(k), k, validation.IsConfigMapKey(k))...)
		size += len(data[k])
	}
	return errs, size
}

// ValidateDataSize rejects data of more than limit bytes.
func ValidateDataSize(size, limit int, path *field.Path) field.ErrorList {
	if size <= limit {
		return nil
	}
	return field.ErrorList{field.TooLong(path, fmt.Sprintf("%d bytes", size), limit)}
}

// DataField is a field of a ConfigMap or Secret that its field immutable locks.
type DataField struct {
	Name    string
	Changed bool
}

// ValidateImmutable checks an update of a ConfigMap or Secret whose field
// immutable was old and is now cur.
func ValidateImmutable(cur, old *bool, data ...DataField) field.ErrorList {
	if old == nil || !*old {
		return nil
	}
	var errs field.ErrorList
	for _, f := range append([]DataField{{"immutable", cur == nil || !*cur}}, data...) {
		if f.Changed {
			errs = append(errs, field.Forbidden(field.NewPath(f.Name), "field is immutable when `immutable` is set"))
		}
	}
	return errs
}
