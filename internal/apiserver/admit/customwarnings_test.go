package admit

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/warning"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"
)

// recorder keeps warnings.
type recorder []string

// AddWarning implements warning.Recorder.
func (r *recorder) AddWarning(_, text string) { *r = append(*r, text) }

func parsed(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatal(err)
	}
	return o
}

// classes are a served one, one that no controller has accepted, one that is new, and one that cannot be read.
func classes(_ context.Context, name string) (*gwv1.GatewayClass, error) {
	c := &gwv1.GatewayClass{Spec: gwv1.GatewayClassSpec{ControllerName: "example.com/c"}}
	switch name {
	case "served":
		c.Status.Conditions = []metav1.Condition{{Type: "Accepted", Status: metav1.ConditionTrue}}
	case "idle":
		c.Status.Conditions = []metav1.Condition{{Type: "Accepted", Status: metav1.ConditionUnknown}}
	case "new":
		c.CreationTimestamp = metav1.NewTime(time.Now().Add(time.Hour)) // however long the test takes
	case "unread":
		return nil, errors.New("etcd is slow")
	default:
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "gatewayclasses"}, name)
	}
	return c, nil
}

// Custom resources that fairlead reads have warnings about what has no effect, once, with the place; others and statuses have none.
func TestCustomWarnings(t *testing.T) {
	t.Parallel()
	const gateway = "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: a}\n"
	annotated := func(head, key string) string {
		return strings.Replace(head, "{name: a}", "{name: a, annotations: {"+key+`: "true"}}`, 1)
	}
	const pool = "apiVersion: fairlead.dev/v1\nkind: IPAddressPool\nmetadata: {name: a}\n"
	const foreign = "apiVersion: example.com/v1\nkind: Gateway\nmetadata: {name: a}\nspec: {gatewayClassName: none}\n"
	within := func(annotations string) string {
		return gateway + "spec: {infrastructure: {annotations: {" + annotations + "}}}"
	}
	for _, c := range []struct{ name, now, before, want string }{
		{"a pool", pool, "", ""},
		{"an annotation", annotated(pool, "fairlead.dev/colour"), "", "metadata.annotations[fairlead.dev/colour]: unknown annotation"},
		{"of another kind", annotated(pool, "fairlead.dev/weight"), "", "it has no effect on kind IPAddressPool; it is for kind Pod"},
		{"as before", annotated(pool, "fairlead.dev/colour"), annotated(pool, "fairlead.dev/colour"), ""},
		{"of others", annotated(pool, "example.com/colour"), "", ""},
		{"a label", strings.Replace(annotated(pool, "fairlead.dev/weight"), "annotations", "labels", 1), "",
			"metadata.labels[fairlead.dev/weight]: it is an annotation, and has no effect as a label"},
		{"of a Service", annotated(gateway, "fairlead.dev/lb-internal"), "", "write it to spec.infrastructure.annotations"},
		{"of its pool", annotated(gateway, "fairlead.dev/lb-pool"), "", "write it to spec.infrastructure.annotations"},
		{"for the Service", within(`fairlead.dev/lb-internal: "true"`), "", ""},
		{"a typo", within(`fairlead.dev/lb-intenral: "true"`), "", "spec.infrastructure.annotations: "},
		{"a typo as before", within(`fairlead.dev/lb-intenral: "true"`), within(`fairlead.dev/lb-intenral: "true"`), ""},
		{"no annotation of a Service", within(`fairlead.dev/weight: "2"`), "",
			"spec.infrastructure.annotations[fairlead.dev/weight]: it has no effect"},
		{"no strings", within("a: 5"), "", ""},
		{"a class", gateway + "spec: {gatewayClassName: served}", "", ""},
		{"no class", gateway + "spec: {gatewayClassName: none}", "", `there is no GatewayClass "none"`},
		{"another class", gateway + "spec: {gatewayClassName: none}", gateway + "spec: {gatewayClassName: served}",
			`there is no GatewayClass "none"`},
		{"the class as before", gateway + "spec: {gatewayClassName: none}", gateway + "spec: {gatewayClassName: none}", ""},
		{"nobody's class", gateway + "spec: {gatewayClassName: idle}", "",
			`no controller has accepted the GatewayClass "idle" of controller "example.com/c"`},
		{"a new class", gateway + "spec: {gatewayClassName: new}", "", ""},
		{"a class that cannot be read", gateway + "spec: {gatewayClassName: unread}", "", ""},
		{"a class without a form", gateway + "spec: {gatewayClassName: {a: b}}", "", ""},
		{"another group", annotated(foreign, "fairlead.dev/colour"), "", ""},
	} {
		now := parsed(t, c.now)
		var before runtime.Object
		if c.before != "" {
			before = parsed(t, c.before)
		}
		ask := func(subresource string) recorder {
			var got recorder
			a := admission.NewAttributesRecord(now, before, now.GroupVersionKind(), "", "a", schema.GroupVersionResource{}, subresource,
				admission.Update, nil, false, nil)
			w := customWarnings{admission.NewHandler(admission.Update), classes}
			if err := w.Validate(warning.WithWarningRecorder(t.Context(), &got), a, nil); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			return got
		}
		got := ask("")
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		if got := ask("status"); len(got) > 0 {
			t.Errorf("%s: %q of a status", c.name, got)
		}
	}
}

// However many annotations without effect an infrastructure has, the warnings are few.
func TestCustomWarningsAreBounded(t *testing.T) {
	t.Parallel()
	many := map[string]any{}
	for i := range 2000 {
		many["fairlead.dev/lb-"+strings.Repeat("x", 1+i%50)+strings.Repeat("y", 1+i/50)] = "1"
	}
	now := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"infrastructure": map[string]any{"annotations": many}}}}
	if got := infrastructureWarnings(now, &unstructured.Unstructured{}); len(got) == 0 || len(got) > maxInfrastructure {
		t.Errorf("%d warnings: %q", len(got), got)
	}
}
