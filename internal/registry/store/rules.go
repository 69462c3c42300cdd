package store

import (
	"context"
	"reflect"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/operation"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/annotation"
	"github.com/fairlead/fairlead/internal/registry/scheme"
)

// Strategy is what a kind, or one of its subresources, decides about its
// objects. It may also implement rest.RESTGracefulDeleteStrategy and
// rest.GarbageCollectionDeleteStrategy.
type Strategy interface {
	rest.RESTCreateStrategy
	rest.RESTUpdateStrategy
	rest.ResetFieldsStrategy
	rest.DeclarativeValidationStrategy
}

// Object is a pointer to an object of a kind.
type Object interface {
	comparable
	runtime.Object
	metav1.Object
	metav1.ObjectMetaAccessor
}

// Rules are the decisions of a kind about its objects, which have the type T.
// The zero value is a namespaced kind that accepts everything. The rules of a
// subresource are a copy of its kind's in which some fields differ. Functions
// with a parameter old get the zero T for a new object.
type Rules[T Object] struct {
	// APIVersion is the one of T, for example "apps/v1"; required with Kept.
	APIVersion string
	// ClusterScoped objects live outside namespaces.
	ClusterScoped bool
	// CreateOnUpdate lets a PUT create an object; otherwise the answer is 404.
	CreateOnUpdate bool
	// VersionRequired rejects updates without a resource version.
	VersionRequired bool

	// Name checks metadata.name of a new object. If Name is set, the metadata is
	// checked before Validate; otherwise Validate checks it.
	Name validation.ValidateNameFunc
	// Kept are the parts that a write cannot change: cleared in new objects,
	// restored in updates.
	Kept []Part[T]
	// KeptOnUpdateOnly lets a new object bring what Kept names.
	KeptOnUpdateOnly bool
	// Generation returns the parts of an object whose changes count as a new
	// generation; nil if the kind counts none.
	Generation func(T) any
	// Create and Update prepare an object after Kept, and before Generation.
	Create func(ctx context.Context, obj T)
	Update func(obj, old T)
	// Validate returns what is wrong with an object.
	Validate func(ctx context.Context, obj, old T) field.ErrorList
	// Warn returns the warnings that the client gets.
	Warn func(obj, old T) []string
	// Canonicalize gives a valid object its stored form.
	Canonicalize func(T)

	// isSub is set for a subresource, whose writer has not written the annotations.
	isSub bool
}

// Part is a part of objects of type T.
type Part[T any] struct {
	// Path names the part, for example "metadata.labels". Server-side apply does
	// not record the writer as its owner.
	Path string
	// Clear empties the part. Restore copies it from old. Both may be nil.
	Clear   func(obj T)
	Restore func(obj, old T)
}

// Field is the part at path, to which at returns a pointer.
func Field[T, F any](path string, at func(T) *F) Part[T] {
	return Part[T]{
		Path: path,
		Clear: func(obj T) {
			var zero F
			*at(obj) = zero
		},
		Restore: func(obj, old T) { *at(obj) = *at(old) },
	}
}

// Sub returns the rules of a subresource of the kind: writes cannot change kept,
// and validate checks them. Hooks, generations and warnings are the kind's only.
func (r Rules[T]) Sub(validate func(ctx context.Context, obj, old T) field.ErrorList, kept ...Part[T]) Rules[T] {
	r.Kept, r.Validate, r.isSub = kept, validate, true
	r.Generation, r.Create, r.Update, r.Warn = nil, nil, nil, nil
	return r
}

// Strategy returns the rules as the API machinery asks for them.
func (r Rules[T]) Strategy() Strategy {
	return &strategy[T]{ObjectTyper: scheme.Scheme, NameGenerator: names.SimpleNameGenerator, rules: r}
}

var metadataPath = field.NewPath("metadata") //nolint:gochecknoglobals // constant in all but name

type strategy[T Object] struct {
	runtime.ObjectTyper
	names.NameGenerator
	rules Rules[T]
}

func (s *strategy[T]) NamespaceScoped() bool { return !s.rules.ClusterScoped }

func (s *strategy[T]) AllowCreateOnUpdate(context.Context) bool { return s.rules.CreateOnUpdate }

func (s *strategy[T]) AllowUnconditionalUpdate(context.Context) bool { return !s.rules.VersionRequired }

func (s *strategy[T]) PrepareForCreate(ctx context.Context, object runtime.Object) {
	obj := object.(T)
	for _, p := range s.rules.Kept {
		if p.Clear != nil && !s.rules.KeptOnUpdateOnly {
			p.Clear(obj)
		}
	}
	if s.rules.Generation != nil {
		obj.SetGeneration(1)
	}
	if s.rules.Create != nil {
		s.rules.Create(ctx, obj)
	}
}

func (s *strategy[T]) PrepareForUpdate(_ context.Context, object, previous runtime.Object) {
	obj, old := object.(T), previous.(T)
	for _, p := range s.rules.Kept {
		if p.Restore != nil {
			p.Restore(obj, old)
		}
	}
	if s.rules.Update != nil {
		s.rules.Update(obj, old)
	}
	if s.rules.Generation == nil {
		return
	}
	obj.SetGeneration(old.GetGeneration())
	if !equality.Semantic.DeepEqual(s.rules.Generation(obj), s.rules.Generation(old)) {
		obj.SetGeneration(old.GetGeneration() + 1)
	}
}

func (s *strategy[T]) Validate(ctx context.Context, obj runtime.Object) field.ErrorList {
	var none T
	var errs field.ErrorList
	if s.rules.Name != nil {
		errs = ValidateMeta(MetaOf(obj.(T)), s.NamespaceScoped(), s.rules.Name)
	}
	if s.rules.Validate != nil {
		errs = append(errs, s.rules.Validate(ctx, obj.(T), none)...)
	}
	return errs
}

func (s *strategy[T]) ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	var errs field.ErrorList
	if s.rules.Name != nil {
		errs = ValidateMetaUpdate(MetaOf(obj.(T)), MetaOf(old.(T)))
	}
	if s.rules.Validate != nil {
		errs = append(errs, s.rules.Validate(ctx, obj.(T), old.(T))...)
	}
	return errs
}

// ValidateDeclaratively returns the errors that Validate or ValidateUpdate and the generic store have found,
// each once: both check the metadata of an update. No kind declares rules beside those of its Rules.
func (s *strategy[T]) ValidateDeclaratively(_ context.Context, _, _ runtime.Object, found field.ErrorList, _ operation.Type,
	_ rest.DeclarativeValidationConfig,
) field.ErrorList {
	return found.Filter()
}

// DeclarativeValidationConfig returns no options.
func (s *strategy[T]) DeclarativeValidationConfig(context.Context, runtime.Object, runtime.Object) rest.DeclarativeValidationConfig {
	return rest.DeclarativeValidationConfig{}
}

// MetaOf returns the metadata of obj, which has one of the types of k8s.io/api.
func MetaOf(obj metav1.ObjectMetaAccessor) *metav1.ObjectMeta {
	return obj.GetObjectMeta().(*metav1.ObjectMeta)
}

func (s *strategy[T]) WarningsOnCreate(_ context.Context, obj runtime.Object) []string {
	var none T
	return s.warnings(obj.(T), none, &metav1.ObjectMeta{})
}

func (s *strategy[T]) WarningsOnUpdate(_ context.Context, obj, old runtime.Object) []string {
	return s.warnings(obj.(T), old.(T), MetaOf(old.(T)))
}

func (s *strategy[T]) warnings(obj, old T, before *metav1.ObjectMeta) (out []string) {
	if s.rules.Warn != nil {
		out = s.rules.Warn(obj, old)
	}
	if s.rules.isSub {
		return out
	}
	kind := reflect.TypeFor[T]().Elem().Name()
	out = append(out, annotation.LabelWarnings(metadataPath.Child("labels"), obj.GetLabels(), before.Labels)...)
	return append(out, annotation.Warnings(kind, metadataPath.Child("annotations"), obj.GetAnnotations(), before.Annotations)...)
}

func (s *strategy[T]) Canonicalize(obj runtime.Object) {
	if s.rules.Canonicalize != nil {
		s.rules.Canonicalize(obj.(T))
	}
}

// GetResetFields returns the paths of the kept parts.
func (s *strategy[T]) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	if len(s.rules.Kept) == 0 {
		return nil
	}
	set := fieldpath.NewSet()
	for _, p := range s.rules.Kept {
		var path []any
		for name := range strings.SplitSeq(p.Path, ".") {
			path = append(path, name)
		}
		set.Insert(fieldpath.MakePathOrDie(path...))
	}
	return map[fieldpath.APIVersion]*fieldpath.Set{fieldpath.APIVersion(s.rules.APIVersion): set}
}
