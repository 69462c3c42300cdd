package explaincmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/jsonmergepatch"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// planned is an object of the file, and what becomes of it.
type planned struct {
	Kind   string `json:"kind"`
	Name   string `json:"name"`
	Result string `json:"result"`
}

// done is the outcome of a dry run: before is nil for an object that does not exist, after for one that is deleted, and both for a kind
// that is not looked at.
type done struct {
	planned
	before, after any
}

// kind is a kind that a plan looks at.
type kind struct {
	resource string
	empty    func() any
	// cluster is set for one without namespaces, custom for one that the API server knows by a definition: it takes no strategic patch.
	cluster, custom bool
}

// kinds are the kinds that a plan looks at, with an empty object of each.
var kinds = withGateways(map[schema.GroupVersionKind]kind{
	{Version: "v1", Kind: "Service"}: {resource: "services", empty: func() any { return &corev1.Service{} }},
	{Version: "v1", Kind: "Pod"}:     {resource: "pods", empty: func() any { return &corev1.Pod{} }},
	{Version: "v1", Kind: "Secret"}:  {resource: "secrets", empty: func() any { return &corev1.Secret{} }},
	{Version: "v1", Kind: "ConfigMap"}: {resource: "configmaps",
		empty: func() any { return &corev1.ConfigMap{} }},
	{Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"}: {resource: "endpointslices",
		empty: func() any { return &discoveryv1.EndpointSlice{} }},
	{Group: appsv1.GroupName, Version: "v1", Kind: "Deployment"}: {resource: "deployments",
		empty: func() any { return &appsv1.Deployment{} }},
	{Group: appsv1.GroupName, Version: "v1", Kind: "DaemonSet"}: {resource: "daemonsets", empty: func() any { return &appsv1.DaemonSet{} }},
	{Group: appsv1.GroupName, Version: "v1", Kind: "StatefulSet"}: {resource: "statefulsets",
		empty: func() any { return &appsv1.StatefulSet{} }},
	v1.GroupVersion.WithKind("IPAddressPool"): {resource: "ipaddresspools", empty: func() any { return &v1.IPAddressPool{} },
		cluster: true, custom: true},
	{Version: "v1", Kind: "Namespace"}: {resource: "namespaces", empty: func() any { return &corev1.Namespace{} }, cluster: true},
	{Group: networkingv1.GroupName, Version: "v1", Kind: "Ingress"}: {resource: "ingresses",
		empty: func() any { return &networkingv1.Ingress{} }},
	{Group: networkingv1.GroupName, Version: "v1", Kind: "IngressClass"}: {resource: "ingressclasses",
		empty: func() any { return &networkingv1.IngressClass{} }, cluster: true},
})

// gatewayVersions are the versions by which kinds of the Gateway API are or were served. What the plan looks at is alike in all of them.
var gatewayVersions = []string{"v1", "v1beta1", "v1alpha3", "v1alpha2"}

// withGateways adds the kinds of the Gateway API to kinds.
func withGateways(kinds map[schema.GroupVersionKind]kind) map[schema.GroupVersionKind]kind {
	for _, v := range gatewayVersions {
		add := func(name, resource string, cluster bool, empty func() any) {
			kinds[schema.GroupVersionKind{Group: gwv1.GroupName, Version: v, Kind: name}] = kind{resource, empty, cluster, true}
		}
		add("GatewayClass", "gatewayclasses", true, func() any { return &gwv1.GatewayClass{} })
		add("Gateway", "gateways", false, func() any { return &gwv1.Gateway{} })
		add("ListenerSet", "listenersets", false, func() any { return &gwv1.ListenerSet{} })
		add("HTTPRoute", "httproutes", false, func() any { return &gwv1.HTTPRoute{} })
		add("GRPCRoute", "grpcroutes", false, func() any { return &gwv1.GRPCRoute{} })
		add("TLSRoute", "tlsroutes", false, func() any { return &gwv1.TLSRoute{} })
		add("TCPRoute", "tcproutes", false, func() any { return &gwv1.TCPRoute{} })
		add("UDPRoute", "udproutes", false, func() any { return &gwv1.UDPRoute{} })
		add("ReferenceGrant", "referencegrants", false, func() any { return &gwv1.ReferenceGrant{} })
		add("BackendTLSPolicy", "backendtlspolicies", false, func() any { return &gwv1.BackendTLSPolicy{} })
	}
	return kinds
}

// maxManifest is the largest file that is read.
const maxManifest = 16 << 20

// wanted is an object of the file.
type wanted struct {
	unstructured.Unstructured
	// at is its place in the file, and again is set if the file has the same object, with the same fields, before.
	at    string
	again bool
}

// readObjects reads the objects of a file, and the items of Lists. Objects without a namespace get the one of the flag or the
// kubeconfig. An object that the file has twice is an error unless both are alike: kubectl would apply one after the other, and a dry run
// of the second does not see the first. With remove the file is for kubectl delete, for which only the names count.
func readObjects(in io.Reader, file, namespace string, remove bool) ([]wanted, error) {
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxManifest+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(text) > maxManifest {
		return nil, fmt.Errorf("%s: it has more than %d MiB", file, maxManifest>>20)
	}
	var out []wanted
	lines := documentLines(text)
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
	for n := 1; ; n++ {
		var o unstructured.Unstructured
		err := decoder.Decode(&o.Object)
		if errors.Is(err, io.EOF) {
			break
		}
		at := fmt.Sprintf("document %d", n)
		if n <= len(lines) {
			at += fmt.Sprintf(" (line %d)", lines[n-1])
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", file, at, err)
		}
		if len(o.Object) == 0 {
			continue
		}
		if !o.IsList() {
			out = append(out, wanted{Unstructured: o, at: at})
			continue
		}
		i := 0
		err = o.EachListItem(func(item runtime.Object) error {
			out = append(out, wanted{Unstructured: *item.(*unstructured.Unstructured), at: fmt.Sprintf("%s, items[%d]", at, i)})
			i++
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", file, at, err)
		}
	}
	for i := range out {
		if out[i].GetKind() == "" || out[i].GetName() == "" {
			return nil, fmt.Errorf("%s: %s has no kind or no metadata.name", file, out[i].at)
		}
		if out[i].GetNamespace() == "" {
			out[i].SetNamespace(namespace)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: there is no object in it", file)
	}
	return out, findTwins(file, out, remove)
}

// documentLines returns the lines at which the documents of a text in YAML begin, as the decoder divides it. Of several documents of JSON
// only the first has one.
func documentLines(text []byte) (out []int) {
	empty, n := true, 0
	for line := range bytes.Lines(text) {
		n++
		if bytes.HasPrefix(line, []byte("---")) && !empty {
			empty = true
			continue
		}
		if empty {
			out, empty = append(out, n), false
		}
	}
	return out
}

// findTwins marks the objects that the file has before, and refuses them if they differ, unless they are removed.
func findTwins(file string, all []wanted, remove bool) error {
	first := map[string]int{}
	for i := range all {
		o := &all[i]
		namespace := o.GetNamespace()
		if kinds[o.GroupVersionKind()].cluster {
			namespace = ""
		}
		id := o.GroupVersionKind().GroupKind().String() + " " + namespace + "/" + o.GetName()
		j, twin := first[id]
		switch {
		case !twin:
			first[id] = i
		case !remove && !equality.Semantic.DeepEqual(all[j].Object, o.Object):
			return fmt.Errorf("%s: %s %s is there twice and differs, at %s and at %s: kubectl applies both, one after the other, which a "+
				"plan cannot follow; keep one of them", file, o.GetKind(), base.PlainLine(namespace+"/"+o.GetName()), all[j].at, o.at)
		default:
			o.again = true
		}
	}
	return nil
}

// unchanged is the result for an object that stays as it is.
const unchanged = "unchanged"

// notFound is the result for an object that does not exist, or not any more, and would be deleted.
const notFound = "does not exist"

// notServed is the result for an object of a kind that the API server does not have.
const notServed = "not served"

// dryRunner asks the server what would become of objects.
type dryRunner struct {
	client    dynamic.Interface
	discovery discovery.ServerResourcesInterface
	// remove is set for a plan of 'kubectl delete'.
	remove bool
	served map[schema.GroupVersion]*metav1.APIResourceList
}

// serves reports whether the server has the kind of an object, also where it does not tell.
func (d *dryRunner) serves(o *unstructured.Unstructured) bool {
	gv := o.GroupVersionKind().GroupVersion()
	list, asked := d.served[gv]
	if !asked {
		var err error
		if list, err = d.discovery.ServerResourcesForGroupVersion(gv.String()); apierrors.IsNotFound(err) {
			list = &metav1.APIResourceList{}
		} else if err != nil {
			list = nil
		}
		d.served[gv] = list
	}
	return list == nil || slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Kind == o.GetKind() })
}

// run asks the server what 'kubectl apply' would make of an object: it creates it, or sends the patch of three ways. Of 'kubectl delete'
// only the object is read.
func (d *dryRunner) run(ctx context.Context, o *wanted) (*done, error) {
	kind, known := kinds[o.GroupVersionKind()]
	out := &done{planned: planned{Kind: o.GetKind(), Name: o.GetNamespace() + "/" + o.GetName()}}
	if kind.cluster {
		out.Name = o.GetName()
		o.SetNamespace("")
	}
	switch {
	case !d.serves(&o.Unstructured):
		out.Result = notServed
		return out, nil
	case o.again:
		out.Result = d.twin()
		return out, nil
	case !known:
		out.Result = "not looked at"
		return out, nil
	}
	all := d.client.Resource(o.GroupVersionKind().GroupVersion().WithResource(kind.resource))
	resource := dynamic.ResourceInterface(all)
	if !kind.cluster {
		resource = all.Namespace(o.GetNamespace())
	}
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	if err := d.ask(ctx, resource, &kind, &o.Unstructured, out); err != nil {
		return nil, fmt.Errorf("%s %s: %w", out.Kind, out.Name, err)
	}
	return out, nil
}

// twin is what becomes of an object that the file has again.
func (d *dryRunner) twin() string {
	if d.remove {
		return notFound
	}
	return unchanged
}

func (d *dryRunner) ask(
	ctx context.Context, resource dynamic.ResourceInterface, kind *kind, o *unstructured.Unstructured, out *done,
) error {
	read := func(from *unstructured.Unstructured, to *any) error {
		*to = kind.empty()
		return runtime.DefaultUnstructuredConverter.FromUnstructured(from.Object, *to)
	}
	dry := []string{metav1.DryRunAll}
	now, err := resource.Get(ctx, o.GetName(), metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) && d.remove:
		out.Result = notFound
		return nil
	case apierrors.IsNotFound(err):
		next, err := resource.Create(ctx, o, metav1.CreateOptions{DryRun: dry})
		if err != nil {
			return err
		}
		out.Result = "created"
		return read(next, &out.after)
	case err != nil:
		return err
	case d.remove:
		out.Result = "deleted"
		return read(now, &out.before)
	}
	patch, how, err := kind.patch(now, o)
	if err != nil {
		return err
	}
	next := now
	if string(patch) != "{}" { // otherwise kubectl sends nothing, for which no right is needed
		if next, err = resource.Patch(ctx, o.GetName(), how, patch, metav1.PatchOptions{DryRun: dry}); err != nil {
			return err
		}
	}
	out.Result = "changed"
	if same(now, next) {
		out.Result = unchanged
	}
	return errors.Join(read(now, &out.before), read(next, &out.after))
}

// patch is what kubectl sends: from what was applied last, what is applied now, and what the server has.
func (k *kind) patch(now, wanted *unstructured.Unstructured) ([]byte, types.PatchType, error) {
	current, err := json.Marshal(now.Object)
	if err != nil {
		return nil, "", err
	}
	modified, err := annotated(wanted)
	if err != nil {
		return nil, "", err
	}
	original := []byte(now.GetAnnotations()[corev1.LastAppliedConfigAnnotation])
	if k.custom {
		patch, err := jsonmergepatch.CreateThreeWayJSONMergePatch(original, modified, current)
		return patch, types.MergePatchType, err
	}
	meta, err := strategicpatch.NewPatchMetaFromStruct(k.empty())
	if err != nil {
		return nil, "", err
	}
	patch, err := strategicpatch.CreateThreeWayMergePatch(original, modified, current, meta, true)
	return patch, types.StrategicMergePatchType, err
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
