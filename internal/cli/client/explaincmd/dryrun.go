package explaincmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
)

// planned is an object of the file, and what becomes of it.
type planned struct {
	Kind   string `json:"kind"`
	Name   string `json:"name"`
	Result string `json:"result"`
}

// done is the outcome of a dry run: before is nil for an object that does not exist, after for a kind that is not looked at.
type done struct {
	planned
	before, after any
}

// kinds are the kinds that a plan looks at, with an empty object of each.
var kinds = map[schema.GroupVersionKind]struct {
	resource string
	empty    func() any
}{
	{Version: "v1", Kind: "Service"}:                                  {"services", func() any { return &corev1.Service{} }},
	{Version: "v1", Kind: "Pod"}:                                      {"pods", func() any { return &corev1.Pod{} }},
	{Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"}: {"endpointslices", func() any { return &discoveryv1.EndpointSlice{} }},
	{Group: appsv1.GroupName, Version: "v1", Kind: "Deployment"}:      {"deployments", func() any { return &appsv1.Deployment{} }},
	{Group: appsv1.GroupName, Version: "v1", Kind: "DaemonSet"}:       {"daemonsets", func() any { return &appsv1.DaemonSet{} }},
}

// maxManifest is the largest file that is read.
const maxManifest = 16 << 20

// readObjects reads the objects of a file, and the items of Lists. Objects without a namespace get the one of the flag or the
// kubeconfig.
func readObjects(in io.Reader, file, namespace string) ([]unstructured.Unstructured, error) {
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	var out []unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(io.LimitReader(in, maxManifest), 4096)
	for {
		var o unstructured.Unstructured
		err := decoder.Decode(&o.Object)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if len(o.Object) == 0 {
			continue
		}
		if o.IsList() {
			err = o.EachListItem(func(item runtime.Object) error {
				out = append(out, *item.(*unstructured.Unstructured))
				return nil
			})
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			continue
		}
		out = append(out, o)
	}
	for i := range out {
		if out[i].GetKind() == "" || out[i].GetName() == "" {
			return nil, fmt.Errorf("%s: object %d has no kind or no metadata.name", file, i+1)
		}
		if out[i].GetNamespace() == "" {
			out[i].SetNamespace(namespace)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: there is no object in it", file)
	}
	return out, nil
}

// dryRun asks the server what 'kubectl apply' would make of an object: it creates it, or sends the patch of three ways.
func dryRun(ctx context.Context, client dynamic.Interface, o *unstructured.Unstructured) (*done, error) {
	out := &done{planned: planned{Kind: o.GetKind(), Name: o.GetNamespace() + "/" + o.GetName()}}
	kind, known := kinds[o.GroupVersionKind()]
	if !known {
		out.Result = "not looked at"
		return out, nil
	}
	resource := client.Resource(o.GroupVersionKind().GroupVersion().WithResource(kind.resource)).Namespace(o.GetNamespace())
	fail := func(err error) (*done, error) { return nil, fmt.Errorf("%s %s: %w", out.Kind, out.Name, err) }
	all := []string{metav1.DryRunAll}
	now, err := resource.Get(ctx, o.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		next, err := resource.Create(ctx, o, metav1.CreateOptions{DryRun: all})
		if err != nil {
			return fail(err)
		}
		out.Result, out.after = "created", kind.empty()
		return out, runtime.DefaultUnstructuredConverter.FromUnstructured(next.Object, out.after)
	}
	if err != nil {
		return fail(err)
	}
	patch, err := applyPatch(now, o, kind.empty())
	if err != nil {
		return fail(err)
	}
	next, err := resource.Patch(ctx, o.GetName(), types.StrategicMergePatchType, patch, metav1.PatchOptions{DryRun: all})
	if err != nil {
		return fail(err)
	}
	out.before, out.after = kind.empty(), kind.empty()
	if err := errors.Join(runtime.DefaultUnstructuredConverter.FromUnstructured(now.Object, out.before),
		runtime.DefaultUnstructuredConverter.FromUnstructured(next.Object, out.after)); err != nil {
		return fail(err)
	}
	out.Result = "changed"
	if same(now, next) {
		out.Result = "unchanged"
	}
	return out, nil
}

// applyPatch is the patch that kubectl sends: from what was applied last, what is applied now, and what the server has.
func applyPatch(now, wanted *unstructured.Unstructured, like any) ([]byte, error) {
	current, err := json.Marshal(now.Object)
	if err != nil {
		return nil, err
	}
	modified, err := annotated(wanted)
	if err != nil {
		return nil, err
	}
	original := []byte(now.GetAnnotations()[corev1.LastAppliedConfigAnnotation])
	meta, err := strategicpatch.NewPatchMetaFromStruct(like)
	if err != nil {
		return nil, err
	}
	return strategicpatch.CreateThreeWayMergePatch(original, modified, current, meta, true)
}

// annotated is an object as kubectl sends it: with what it applies in an annotation.
func annotated(o *unstructured.Unstructured) ([]byte, error) {
	c := o.DeepCopy()
	annotations := c.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	delete(annotations, corev1.LastAppliedConfigAnnotation)
	c.SetAnnotations(annotations)
	applied, err := json.Marshal(c.Object)
	if err != nil {
		return nil, err
	}
	annotations[corev1.LastAppliedConfigAnnotation] = string(applied) + "\n"
	c.SetAnnotations(annotations)
	return json.Marshal(c.Object)
}

// same reports whether two states of an object differ in nothing but what every write changes.
func same(a, b *unstructured.Unstructured) bool {
	plain := func(o *unstructured.Unstructured) map[string]any {
		c := o.DeepCopy()
		c.SetManagedFields(nil)
		c.SetResourceVersion("")
		c.SetGeneration(0)
		annotations := c.GetAnnotations()
		delete(annotations, corev1.LastAppliedConfigAnnotation)
		if len(annotations) == 0 {
			annotations = nil
		}
		c.SetAnnotations(annotations)
		return c.Object
	}
	return equality.Semantic.DeepEqual(plain(a), plain(b))
}
