package podspec

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// Each field of a PodSpec stands in the table, and the table names no other: a new
// version of the API needs a decision for each new field.
func TestEveryFieldIsDecided(t *testing.T) {
	check(t, reflect.TypeFor[corev1.PodSpec](), tree(), "spec")
}

func check(t *testing.T, typ reflect.Type, n *node, path string) {
	for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice {
		typ = typ.Elem()
	}
	names := map[string]bool{}
	for f := range fieldsOf(typ) {
		name := jsonName(f)
		names[name] = true
		switch below := n.below[name]; {
		case below == nil:
			t.Errorf("%s.%s is not decided", path, name)
		case below.state == "":
			check(t, f.Type, below, path+"."+name)
		case below.below != nil:
			t.Errorf("%s.%s is decided, and fields below it", path, name)
		}
	}
	for name := range n.below {
		if !names[name] {
			t.Errorf("%s.%s does not exist", path, name)
		}
	}
}

// fieldsOf yields the fields of a structure, with those of structures in their place.
func fieldsOf(typ reflect.Type) func(func(reflect.StructField) bool) {
	return func(yield func(reflect.StructField) bool) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			if jsonName(f) != "" {
				if !yield(f) {
					return
				}
				continue
			}
			for inner := range fieldsOf(f.Type) {
				if !yield(inner) {
					return
				}
			}
		}
	}
}

// A Pod with one field set, for every field: those that have no effect are named with
// their whole path, the others are not.
func TestFindings(t *testing.T) {
	seen := map[State]int{}
	var try func(n *node, names []string)
	try = func(n *node, names []string) {
		for name, below := range n.below {
			path := append(names[:len(names):len(names)], name)
			if below.state == "" {
				try(below, path)
				continue
			}
			seen[below.state]++
			s := &corev1.PodSpec{}
			at := set(reflect.ValueOf(s).Elem(), path, below)
			found := Findings(s)
			wrong := below.state == Warned || below.state == Refused
			if wrong != (len(found) == 1) || wrong && (found[0].Field.String() != at || found[0].State != below.state || found[0].Why == "") {
				t.Errorf("%s (%s): %v, want %v", at, below.state, found, wrong)
			}
			if refused := FirstRefused(s, "c"); (refused != nil) != (below.state == Refused) {
				t.Errorf("%s (%s): refused %v", at, below.state, refused)
			}
		}
	}
	try(tree(), nil)
	if len(seen) != 4 {
		t.Errorf("states %v, want all four", seen)
	}
}

// set sets the field of v at names and returns its path as it is shown.
func set(v reflect.Value, names []string, n *node) string {
	path := "spec"
	for _, name := range names {
		for {
			switch v.Kind() {
			case reflect.Pointer:
				if v.IsNil() {
					v.Set(reflect.New(v.Type().Elem()))
				}
				v = v.Elem()
				continue
			case reflect.Slice:
				if v.Len() == 0 {
					v.Set(reflect.MakeSlice(v.Type(), 1, 1))
				}
				v = v.Index(0)
				path += "[0]"
				continue
			}
			break
		}
		v = v.FieldByIndex(index(v.Type(), name))
		path += "." + name
	}
	fill(v, n)
	return path
}

func index(typ reflect.Type, name string) []int {
	for i := range typ.NumField() {
		f := typ.Field(i)
		if jsonName(f) == name {
			return []int{i}
		}
		if jsonName(f) == "" {
			if in := index(f.Type, name); in != nil {
				return append([]int{i}, in...)
			}
		}
	}
	return nil
}

// fill gives v a value that asks for something.
func fill(v reflect.Value, n *node) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		if v.Elem().Kind() != reflect.Struct {
			fill(v.Elem(), nil)
		}
		if n != nil && n.fits != nil && !n.fits(v, &corev1.PodSpec{}) {
			v.Elem().SetZero()
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("x").Convert(v.Type().Key()), reflect.Zero(v.Type().Elem()))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("x")
	case reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Struct:
		fill(v.Field(0), nil)
	}
}

// What asks for nothing is no finding: false, the defaults, and nothing at all.
func TestNothingAsked(t *testing.T) {
	no, zero, proc, none := false, int32(0), corev1.DefaultProcMount, corev1.MountPropagationNone
	s := &corev1.PodSpec{Priority: &zero, ShareProcessNamespace: &no, OS: &corev1.PodOS{Name: corev1.Linux},
		Containers: []corev1.Container{{SecurityContext: &corev1.SecurityContext{Privileged: &no, RunAsNonRoot: &no, ProcMount: &proc},
			VolumeMounts: []corev1.VolumeMount{{MountPropagation: &none}}}}}
	if found := Findings(s); len(found) > 0 {
		t.Errorf("%v, want none", found)
	}
}

// A refusal belongs to its container or to the whole Pod.
func TestRefusalsBelong(t *testing.T) {
	s := &corev1.PodSpec{InitContainers: []corev1.Container{{Name: "a", VolumeDevices: make([]corev1.VolumeDevice, 1)}},
		Containers: []corev1.Container{{Name: "b"}}}
	a, b := FirstRefused(s, "a"), FirstRefused(s, "b")
	if a == nil || a.Field.String() != "spec.initContainers[0].volumeDevices" || b != nil {
		t.Errorf("%v and %v, want one of the first container alone", a, b)
	}
	s.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{}}}}
	if b = FirstRefused(s, "b"); b == nil || b.Field.String() != "spec.volumes[0].image" {
		t.Errorf("%v, want spec.volumes[0].image", b)
	}
}

var update = flag.Bool("update", false, "write the table into docs/compatibility.md")

// The page has the table as it is; go test ./internal/podspec -update writes it.
func TestPage(t *testing.T) {
	const file, begin, end = "../../docs/compatibility.md", "<!-- fields of Pods -->\n", "<!-- end -->"
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := strings.Cut(string(b), begin)
	have, after, ok2 := strings.Cut(rest, end)
	want := "\n" + markdown() + "\n"
	switch {
	case !ok1 || !ok2:
		t.Fatalf("%s has no place for the table", file)
	case have == want:
	case *update:
		if err := os.WriteFile(file, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("%s has another table than internal/podspec; run go test ./internal/podspec -update", file)
	}
}

// markdown is the table for docs/compatibility.md.
func markdown() string {
	var b strings.Builder
	b.WriteString("| Fields of `spec` | | |\n|---|---|---|\n")
	for _, r := range table {
		fields := strings.Join(strings.Fields(r.fields), "`, `")
		if strings.Contains(fields, "livenessProbe") { // each stands there three times
			fields, _, _ = strings.Cut(fields, "`, `containers.readinessProbe")
			fields = strings.ReplaceAll(fields, "livenessProbe", "*Probe")
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", fields, r.state, r.why)
	}
	return b.String()
}
