package apiserver_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/controller"
)

var (
	definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	backups     = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "backups"}
)

// custom is a server with clients that know no kind beforehand.
type custom struct {
	*testing.T
	ctx  context.Context
	cfg  *rest.Config
	objs dynamic.Interface
	kube *kubernetes.Clientset
}

func newCustom(t *testing.T) custom {
	cfg := apiservertest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*waitTimeout)
	t.Cleanup(cancel)
	return custom{t, ctx, cfg, dynamic.NewForConfigOrDie(cfg), kubernetes.NewForConfigOrDie(cfg)}
}

// install creates the definitions of a file and waits until they are
// established, and answered.
func (c custom) install(file string) {
	c.Helper()
	for _, o := range objectsOf(c.T, file) {
		if o.GetKind() != "CustomResourceDefinition" {
			continue
		}
		if _, err := c.objs.Resource(definitions).Create(c.ctx, o, metav1.CreateOptions{}); err != nil {
			c.Fatalf("%s: %v", file, err)
		}
		eventually(c, o.GetName()+" is established", func() bool {
			got, err := c.objs.Resource(definitions).Get(c.ctx, o.GetName(), metav1.GetOptions{})
			return err == nil && condition(got, "Established") && condition(got, "NamesAccepted") && !condition(got, "NonStructuralSchema")
		})
	}
}

func condition(o *unstructured.Unstructured, kind string) bool {
	list, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	return slices.ContainsFunc(list, func(k any) bool {
		m, _ := k.(map[string]any)
		return m["type"] == kind && m["status"] == "True"
	})
}

func objectsOf(t *testing.T, file string) (out []*unstructured.Unstructured) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range strings.Split(string(text), "\n---") {
		if o := object(t, doc); len(o.Object) > 0 {
			out = append(out, o)
		}
	}
	return out
}

func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatal(err)
	}
	return o
}

func backup(name, spec string) string {
	return "{apiVersion: example.com/v1, kind: Backup, metadata: {name: " + name + "}, spec: " + spec + "}"
}

func TestCustomResources(t *testing.T) {
	c := newCustom(t)
	c.install("testdata/backups.yaml")
	t.Run("documents", c.testDocuments)
	t.Run("objects", c.testObjects)
	t.Run("refusals", c.testRefusals)
	t.Run("subresources", c.testSubresources)
	t.Run("apply", c.testApply)
	t.Run("table", c.testTable)
	t.Run("namespace", c.testNamespace)
	t.Run("removal", c.testRemoval) // the last: it removes the definition
}

// The kinds are in discovery of both forms and in both OpenAPI documents.
func (c custom) testDocuments(t *testing.T) {
	aggregated := discovery.NewDiscoveryClientForConfigOrDie(c.cfg)
	legacy := discovery.NewDiscoveryClientForConfigOrDie(c.cfg).WithLegacy()
	for name, d := range map[string]discovery.DiscoveryInterface{"aggregated": aggregated, "legacy": legacy} {
		eventually(t, name+" discovery has the kinds", func() bool {
			groups, lists, err := d.ServerGroupsAndResources()
			if err != nil {
				return false
			}
			i := slices.IndexFunc(groups, func(g *metav1.APIGroup) bool { return g.Name == "example.com" })
			if i < 0 || !slices.ContainsFunc(groups, func(g *metav1.APIGroup) bool { return g.Name == "apiextensions.k8s.io" }) {
				return false
			}
			if groups[i].PreferredVersion.Version != "v1" || len(groups[i].Versions) != 2 {
				return false // not all versions are served yet
			}
			var found []string
			for _, l := range lists {
				for _, r := range l.APIResources {
					if l.GroupVersion == "example.com/v1" || r.Kind == "CustomResourceDefinition" {
						found = append(found, r.Name)
					}
				}
			}
			want := []string{"backups", "backups/status", "backups/scale", "customresourcedefinitions", "customresourcedefinitions/status"}
			slices.Sort(found)
			slices.Sort(want)
			return slices.Equal(found, want)
		})
	}
	eventually(t, "OpenAPI v2 has the kinds", func() bool {
		doc, err := aggregated.OpenAPISchema()
		if err != nil {
			return false
		}
		var names []string
		for _, d := range doc.GetDefinitions().GetAdditionalProperties() {
			names = append(names, d.GetName())
		}
		return slices.Contains(names, "com.example.v1.Backup") && slices.Contains(names, "io.k8s.api.core.v1.Service") &&
			slices.Contains(names, "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition")
	})
	for path, want := range map[string]string{"apis/example.com/v1": "What to copy, and when.",
		"apis/apiextensions.k8s.io/v1": "CustomResourceDefinitionSpec"} {
		eventually(t, "OpenAPI v3 has "+path, func() bool {
			paths, err := aggregated.OpenAPIV3().Paths()
			if err != nil || paths[path] == nil {
				return false
			}
			doc, err := paths[path].Schema("application/json")
			return err == nil && strings.Contains(string(doc), want)
		})
	}
}

// The list of groups names a version when that is served, not before: a client
// of unaggregated discovery asks for each at once.
func TestListedVersionsAreServed(t *testing.T) {
	t.Parallel()
	c := newCustom(t)
	const versions = 60
	crd := object(t, `{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: things.many.example.com},
		spec: {group: many.example.com, scope: Cluster, names: {plural: things, kind: Thing}}}`)
	var list []any
	for i := range versions {
		list = append(list, map[string]any{"name": fmt.Sprintf("v%d", i+1), "served": true, "storage": i == 0,
			"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}}})
	}
	if err := unstructured.SetNestedSlice(crd.Object, list, "spec", "versions"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.objs.Resource(definitions).Create(c.ctx, crd, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	get := func(path string) ([]byte, error) {
		return c.kube.CoreV1().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").DoRaw(c.ctx)
	}
	for seen := 0; seen < versions; {
		raw, err := get("/apis")
		var groups metav1.APIGroupList
		if err != nil || json.Unmarshal(raw, &groups) != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		i := slices.IndexFunc(groups.Groups, func(g metav1.APIGroup) bool { return g.Name == "many.example.com" })
		if i < 0 {
			continue
		}
		seen = len(groups.Groups[i].Versions)
		for _, v := range groups.Groups[i].Versions[max(0, seen-3):] {
			if _, err := get("/apis/" + v.GroupVersion); err != nil {
				t.Fatalf("%d versions are listed, and %s is not served: %v", seen, v.GroupVersion, err)
			}
		}
	}
}

// Defaults are set, unknown fields pruned, both versions show one object.
func (c custom) testObjects(t *testing.T) {
	in := c.objs.Resource(backups).Namespace("default")
	made, err := in.Create(c.ctx, object(t,
		backup("one", "{source: disk, other: 1, options: {free: {form: [1]}}, limits: {a: 1, b: 2Gi}}")), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := object(t, "{source: disk, schedule: daily, keep: 7, replicas: 1, options: {free: {form: [1]}}, limits: {a: 1, b: 2Gi}}").Object
	if got := made.Object["spec"]; !sameJSON(t, got, want) {
		t.Errorf("spec is %v, want %v", got, want)
	}
	old := backups
	old.Version = "v1beta1"
	other, err := c.objs.Resource(old).Namespace("default").Get(c.ctx, "one", metav1.GetOptions{})
	if err != nil || other.GetAPIVersion() != "example.com/v1beta1" || !sameJSON(t, other.Object["spec"], want) {
		t.Errorf("as v1beta1: %v, %v", other, err)
	}
	_, err = in.Patch(c.ctx, "one", types.MergePatchType, []byte(`{"spec":{"keep":9}}`), metav1.PatchOptions{})
	if err != nil {
		t.Error(err)
	}
	list, err := in.List(c.ctx, metav1.ListOptions{FieldSelector: "spec.schedule=weekly"})
	if err != nil || len(list.Items) != 0 {
		t.Errorf("by a selectable field: %v, %v", list, err)
	}
	w, err := in.Watch(c.ctx, metav1.ListOptions{ResourceVersion: made.GetResourceVersion()})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	select {
	case e := <-w.ResultChan():
		if o, ok := e.Object.(*unstructured.Unstructured); !ok || e.Type != "MODIFIED" || o.GetGeneration() != 2 {
			t.Errorf("watched %v", e)
		}
	case <-c.ctx.Done():
		t.Error("no event of the patch")
	}
	if err := in.Delete(c.ctx, "one", metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
}

func sameJSON(t *testing.T, a, b any) bool {
	t.Helper()
	x, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	y, err := json.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(x) == string(y)
}

func (c custom) testRefusals(t *testing.T) {
	in := c.objs.Resource(backups)
	for _, k := range []struct {
		object, want string
		fields       []string
	}{
		{backup("x", "{}"), "Required value", []string{"spec.source", "<nil>"}}, // and rules are left unchecked
		{backup("x", "{source: A_B}"), "should match", []string{"spec.source"}},
		{backup("x", "{source: a, schedule: never}"), "Unsupported value", []string{"spec.schedule", "<nil>"}},
		{backup("x", "{source: a, keep: 0, replicas: 0}"), "greater than or equal to 1", []string{"spec.keep"}},
		{backup("x", "{source: a, keep: 2, replicas: 3}"), "keep at least as many copies as replicas", []string{"spec"}},
		{backup("x", "{source: a, targets: [{name: a}, {name: a}]}"), "Duplicate value", []string{"spec.targets[1]"}},
		{backup("X", "{source: a}"), "RFC 1123", []string{"metadata.name"}},
	} {
		_, err := in.Namespace("default").Create(c.ctx, object(t, k.object), metav1.CreateOptions{})
		invalidAt(t, err, k.fields...)
		if err != nil && !strings.Contains(err.Error(), k.want) {
			t.Errorf("%s: %v, want %q", k.object, err, k.want)
		}
	}
	if _, err := in.Namespace("nowhere").Create(c.ctx, object(t, backup("x", "{source: a}")),
		metav1.CreateOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("in a missing namespace: %v", err)
	}
	_, err := in.Namespace("default").Create(c.ctx, object(t, backup("x", "{source: a, sauce: b}")),
		metav1.CreateOptions{FieldValidation: "Strict"})
	if !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), `unknown field "spec.sauce"`) {
		t.Errorf("strict: %v", err)
	}
	if _, err := in.Namespace("default").Create(c.ctx, object(t, backup("kept", "{source: a}")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err = in.Namespace("default").Patch(c.ctx, "kept", types.MergePatchType, []byte(`{"spec":{"source":"b"}}`), metav1.PatchOptions{})
	invalidAt(t, err, "spec.source")

	bad := objectsOf(t, "testdata/backups.yaml")[0]
	bad.SetName("wrong.example.com")
	_, err = c.objs.Resource(definitions).Create(c.ctx, bad, metav1.CreateOptions{})
	invalidAt(t, err, "metadata.name")
	protected := strings.NewReplacer("example.com", "net.k8s.io", "backups", "others").Replace(string(mustRead(t, "testdata/backups.yaml")))
	_, err = c.objs.Resource(definitions).Create(c.ctx, object(t, protected), metav1.CreateOptions{})
	invalidAt(t, err, "metadata.annotations[api-approved.kubernetes.io]")
}

func mustRead(t *testing.T, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func (c custom) testSubresources(t *testing.T) {
	in := c.objs.Resource(backups).Namespace("default")
	if _, err := in.Create(c.ctx, object(t, backup("sub", "{source: a}")+"\n"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err := in.Patch(c.ctx, "sub", types.MergePatchType,
		[]byte(`{"spec":{"keep":3},"status":{"phase":"Done","replicas":1,"selector":"app=x"}}`), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
	got, err := in.Get(c.ctx, "sub", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	keep, _, _ := unstructured.NestedInt64(got.Object, "spec", "keep")
	phase, _, _ := unstructured.NestedString(got.Object, "status", "phase")
	if keep != 7 || phase != "Done" {
		t.Errorf("a write of the status made keep %d, phase %q", keep, phase)
	}
	raw, err := in.Patch(c.ctx, "sub", types.MergePatchType, []byte(`{"spec":{"replicas":4}}`), metav1.PatchOptions{}, "scale")
	if err != nil {
		t.Fatal(err)
	}
	var scale autoscalingv1.Scale
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(raw.Object, &scale); err != nil {
		t.Fatal(err)
	}
	if scale.Spec.Replicas != 4 || scale.Status.Replicas != 1 || scale.Status.Selector != "app=x" {
		t.Errorf("scale is %+v", scale)
	}
}

func (c custom) testApply(t *testing.T) {
	in := c.objs.Resource(backups).Namespace("default")
	apply := func(manager, spec string, force bool) error {
		_, err := in.Apply(c.ctx, "applied", object(t, backup("applied", spec)), metav1.ApplyOptions{FieldManager: manager, Force: force})
		return err
	}
	if err := apply("a", "{source: x, keep: 5, targets: [{name: one, path: /}]}", false); err != nil {
		t.Fatal(err)
	}
	if err := apply("b", "{source: x, keep: 6}", false); !apierrors.IsConflict(err) || !strings.Contains(err.Error(), ".spec.keep") {
		t.Errorf("a second manager: %v", err)
	}
	if err := apply("b", "{source: x, targets: [{name: two, path: /b}]}", false); err != nil {
		t.Errorf("other elements of one list: %v", err)
	}
	got, err := in.Get(c.ctx, "applied", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if targets, _, _ := unstructured.NestedSlice(got.Object, "spec", "targets"); len(targets) != 2 {
		t.Errorf("targets are %v", targets)
	}
}

func (c custom) testTable(t *testing.T) {
	var table metav1.Table
	raw, err := c.kube.CoreV1().RESTClient().Get().AbsPath("/apis/example.com/v1/backups").
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").DoRaw(c.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &table); err != nil {
		t.Fatal(err)
	}
	var columns []string
	for _, k := range table.ColumnDefinitions {
		columns = append(columns, k.Name)
	}
	if !slices.Equal(columns, []string{"Name", "Source", "Keep"}) || len(table.Rows) == 0 {
		t.Errorf("columns %v, %d rows", columns, len(table.Rows))
	}
}

// A namespace that is deleted takes its custom resources along.
func (c custom) testNamespace(t *testing.T) {
	if _, err := c.kube.CoreV1().Namespaces().Create(c.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "going"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	in := c.objs.Resource(backups).Namespace("going")
	eventually(t, "the namespace is known", func() bool {
		_, err := in.Create(c.ctx, object(t, backup("one", "{source: a}")), metav1.CreateOptions{})
		return err == nil
	})
	ctx, cancel := context.WithCancel(c.ctx)
	done := make(chan error, 1)
	go func() {
		done <- controller.Run(ctx, controller.Options{Config: c.cfg, Controllers: []string{controller.NamespaceName}})
	}()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	if err := c.kube.CoreV1().Namespaces().Delete(c.ctx, "going", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the namespace is gone", func() bool {
		_, err := c.kube.CoreV1().Namespaces().Get(c.ctx, "going", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	if list, err := in.List(c.ctx, metav1.ListOptions{}); err != nil || len(list.Items) != 0 {
		t.Errorf("left behind: %v, %v", list, err)
	}
}

// A definition that is deleted takes its objects and its group along.
func (c custom) testRemoval(t *testing.T) {
	if err := c.objs.Resource(definitions).Delete(c.ctx, "backups.example.com", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the definition is gone", func() bool {
		_, err := c.objs.Resource(definitions).Get(c.ctx, "backups.example.com", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	eventually(t, "the group is gone", func() bool {
		_, err := c.objs.Resource(backups).Namespace("default").List(c.ctx, metav1.ListOptions{})
		var groups metav1.APIGroupList
		raw, all := c.kube.CoreV1().RESTClient().Get().AbsPath("/apis").SetHeader("Accept", "application/json").DoRaw(c.ctx)
		if all != nil || json.Unmarshal(raw, &groups) != nil {
			return false
		}
		return apierrors.IsNotFound(err) && !slices.ContainsFunc(groups.Groups, func(g metav1.APIGroup) bool { return g.Name == "example.com" })
	})
	c.install("testdata/backups.yaml")
	list, err := c.objs.Resource(backups).List(c.ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != 0 {
		t.Errorf("after it was made again it has %v, %v", list, err)
	}
}
