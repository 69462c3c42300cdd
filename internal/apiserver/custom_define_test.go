package apiserver_test

import (
	"context"
	"encoding/json"
	"maps"
	"reflect"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	gatewayapi "github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/testbed/etcd"
)

// A definition that the server stores at its start is as one that a client posts becomes, and the library's controllers find
// nothing to write. One that is there already stays.
func TestDefinitionsOfTheProgram(t *testing.T) {
	t.Parallel()
	list, err := gatewayapi.Definitions(gatewayapi.Experimental)
	if err != nil {
		t.Fatal(err)
	}
	posted := newCustom(t)
	for _, d := range list {
		o := &unstructured.Unstructured{}
		if err := json.Unmarshal(d.Object, o); err != nil {
			t.Fatal(err)
		}
		if _, err := posted.objs.Resource(definitions).Create(posted.ctx, o, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	with := func(o *apiserver.Options) {
		o.DataDir = dir
		o.Definitions = func() (map[string]json.RawMessage, error) {
			out := map[string]json.RawMessage{}
			for _, d := range list {
				out[d.Name] = d.Object
			}
			return out, nil
		}
	}
	server, stop := apiservertest.StartStoppable(t, with)
	defer stop()
	own := dynamic.NewForConfigOrDie(server.LoopbackConfig()).Resource(definitions)
	stored := map[string]string{} // resource versions
	for _, d := range list {
		var got, want *unstructured.Unstructured
		eventually(t, d.Name+" is as it becomes when it is posted", func() bool {
			var err, err2 error
			got, err = own.Get(posted.ctx, d.Name, metav1.GetOptions{})
			want, err2 = posted.objs.Resource(definitions).Get(posted.ctx, d.Name, metav1.GetOptions{})
			return err == nil && err2 == nil && reflect.DeepEqual(contentOf(got), contentOf(want))
		})
		if got.GetUID() == "" || got.GetCreationTimestamp() == (metav1.Time{}) {
			t.Errorf("%s has no UID or no time of its creation", d.Name)
		}
		stored[d.Name] = got.GetResourceVersion()
	}
	routes := schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "httproutes"}
	eventually(t, "HTTPRoutes are served", func() bool {
		_, err := dynamic.NewForConfigOrDie(server.LoopbackConfig()).Resource(routes).List(posted.ctx, metav1.ListOptions{})
		return err == nil
	})
	check := func(ctx context.Context, own dynamic.NamespaceableResourceInterface) {
		t.Helper()
		now, err := own.List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		have := map[string]string{}
		for _, o := range now.Items {
			have[o.GetName()] = o.GetResourceVersion()
		}
		if !maps.Equal(have, stored) {
			t.Errorf("the versions of the definitions are %v, want %v: nothing has changed", have, stored)
		}
	}
	check(posted.ctx, own)
	stop()
	check(posted.ctx, dynamic.NewForConfigOrDie(apiservertest.Start(t, with)).Resource(definitions))
}

// With several servers the library establishes what is stored, after the time in which all of them learn of it.
func TestDefinitionsOfSeveralServers(t *testing.T) {
	t.Parallel()
	list, err := gatewayapi.Definitions(gatewayapi.Standard)
	if err != nil {
		t.Fatal(err)
	}
	store := etcd.URL(etcd.Start(t))
	cfg := apiservertest.Start(t, func(o *apiserver.Options) {
		o.Etcd.Servers = []string{store}
		o.Definitions = func() (map[string]json.RawMessage, error) {
			return map[string]json.RawMessage{list[0].Name: list[0].Object}, nil
		}
	})
	own := dynamic.NewForConfigOrDie(cfg).Resource(definitions)
	var first *unstructured.Unstructured
	eventually(t, "the definition is stored", func() bool {
		first, err = own.Get(t.Context(), list[0].Name, metav1.GetOptions{})
		return err == nil
	})
	if condition(first, "Established") {
		t.Error("it is established when it is stored")
	}
	eventually(t, "it is established", func() bool {
		now, err := own.Get(t.Context(), list[0].Name, metav1.GetOptions{})
		return err == nil && condition(now, "Established")
	})
}

// contentOf returns a definition without what differs between two of the same content.
func contentOf(o *unstructured.Unstructured) map[string]any {
	out := o.DeepCopy()
	for _, field := range []string{"uid", "resourceVersion", "creationTimestamp", "managedFields"} {
		unstructured.RemoveNestedField(out.Object, "metadata", field)
	}
	list, _, _ := unstructured.NestedSlice(out.Object, "status", "conditions")
	conditions := map[string]any{}
	for _, c := range list {
		c := c.(map[string]any)
		delete(c, "lastTransitionTime")
		conditions[c["type"].(string)] = c
	}
	status := out.Object["status"].(map[string]any)
	status["conditions"] = conditions
	return out.Object
}
