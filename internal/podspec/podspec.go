// Package podspec knows which fields of a Pod's spec have an effect on fairlead's nodes.
// The API server warns of the others when a Pod is created, and nodes do not start a
// Pod with a field without which it would be another one than was asked for.
package podspec

import (
	"fmt"
	"reflect"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// State is what becomes of a field that is set.
type State string

const (
	// Done means that the field has the effect it has in Kubernetes.
	Done State = "done"
	// Moot means that there is nothing on which the field could have an effect.
	Moot State = "moot"
	// Warned means that the Pod runs as if the field were not set; whoever sets it is
	// warned.
	Warned State = "warned"
	// Refused means that a Pod with this field is stored and not started; whoever sets
	// it is warned.
	Refused State = "refused"
)

// Finding is a field of a Pod that does not have its effect.
type Finding struct {
	Field *field.Path
	State State // Warned or Refused
	Why   string
	// Container is the name of the container it belongs to, "" for the Pod.
	Container string
}

// String returns the finding as a warning.
func (f Finding) String() string {
	if f.State == Refused {
		return fmt.Sprintf("%s: a Pod with this field is not started: %s", f.Field, f.Why)
	}
	return fmt.Sprintf("%s: this field has no effect: %s", f.Field, f.Why)
}

// Findings returns the fields of s that are set and Warned or Refused, in the order of
// the type.
func Findings(s *corev1.PodSpec) []Finding { return FindingsAt(s, field.NewPath("spec")) }

// FindingsAt is Findings of a spec that stands at another place, that of a template.
func FindingsAt(s *corev1.PodSpec, at *field.Path) []Finding {
	w := walk{spec: s}
	w.value(reflect.ValueOf(s).Elem(), tree(), at)
	return w.found
}

// FirstRefused returns the first finding because of which a container must not be
// started: one of the Pod or of this container. Nil means none.
func FirstRefused(s *corev1.PodSpec, container string) *Finding {
	for _, f := range Findings(s) {
		if f.State == Refused && (f.Container == "" || f.Container == container) {
			return &f
		}
	}
	return nil
}

// node is a field of the table with the fields below it.
type node struct {
	state State // "" where the fields below decide
	why   string
	fits  fits // nil for every value
	below map[string]*node
}

// fits reports whether a value of a Pod is one for which a row of the table holds.
type fits func(reflect.Value, *corev1.PodSpec) bool

// tree is the table by the names of fields.
var tree = sync.OnceValue(func() *node {
	root := &node{below: map[string]*node{}}
	for _, r := range table {
		for path := range strings.FieldsSeq(r.fields) {
			n := root
			for name := range strings.SplitSeq(path, ".") {
				if n.below == nil {
					n.below = map[string]*node{}
				}
				if n.below[name] == nil {
					n.below[name] = &node{}
				}
				n = n.below[name]
			}
			n.state, n.why, n.fits = r.state, r.why, r.fits
		}
	}
	root.below["initContainers"] = root.below["containers"]
	return root
})

// walk collects the findings of a value.
type walk struct {
	spec      *corev1.PodSpec
	found     []Finding
	container string
}

func (w *walk) value(v reflect.Value, n *node, at *field.Path) {
	switch {
	case n == nil || !isSet(v):
	case n.state == Warned || n.state == Refused:
		if n.fits == nil || n.fits(v, w.spec) {
			w.found = append(w.found, Finding{Field: at, State: n.state, Why: n.why, Container: w.container})
		}
	case n.below != nil:
		w.inside(v, n, at)
	}
}

// inside looks at the fields of a structure, or of each in a list.
func (w *walk) inside(v reflect.Value, n *node, at *field.Path) {
	switch v.Kind() {
	case reflect.Pointer:
		w.inside(v.Elem(), n, at)
	case reflect.Slice:
		for i := range v.Len() {
			w.inside(v.Index(i), n, at.Index(i))
		}
	case reflect.Struct:
		if c, ok := v.Interface().(corev1.Container); ok {
			w.container = c.Name
			defer func() { w.container = "" }()
		}
		for i := range v.NumField() {
			if name := jsonName(v.Type().Field(i)); name == "" {
				w.inside(v.Field(i), n, at)
			} else {
				w.value(v.Field(i), n.below[name], at.Child(name))
			}
		}
	}
}

// jsonName is the name of a field, "" for a structure whose fields stand in its place.
func jsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

// isSet reports whether v asks for something: false and empty lists do not, a pointer
// to 0 does.
func isSet(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Pointer:
		return !v.IsNil()
	case reflect.Slice, reflect.Map:
		return v.Len() > 0
	}
	return !v.IsZero()
}

// isTrue holds for a pointer to true: the field asks for nothing otherwise.
func isTrue(v reflect.Value, _ *corev1.PodSpec) bool { return v.Elem().Bool() }

// isFalse holds for a pointer to false.
func isFalse(v reflect.Value, _ *corev1.PodSpec) bool { return !v.Elem().Bool() }
