package apiserver_test

import (
	"encoding/json"
	"strings"
	"testing"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/discovery"
)

// Aggregated discovery has what discovery of each group has, with the kinds of custom resources, as raw documents and
// through the client's interface (the tests "AggregatedDiscovery" of Kubernetes, for the kinds that are served).
func TestAggregatedDiscovery(t *testing.T) {
	t.Parallel()
	c := newCustom(t)
	c.install("testdata/backups.yaml")
	var raw sets.Set[string]
	eventually(t, "the custom resources in the documents", func() bool {
		raw = aggregatedResources(c)
		return raw.Has("example.com/v1 backups")
	})
	legacy := discovery.NewDiscoveryClient(c.kube.Discovery().RESTClient())
	legacy.UseLegacyDiscovery = true
	_, lists, err := legacy.ServerGroupsAndResources()
	if err != nil {
		t.Fatal(err)
	}
	want := sets.New[string]()
	for _, list := range lists {
		for i := range list.APIResources {
			if !strings.Contains(list.APIResources[i].Name, "/") {
				want.Insert(list.GroupVersion + " " + list.APIResources[i].Name)
			}
		}
	}
	if !want.HasAll("v1 namespaces", "apps/v1 deployments", "authentication.k8s.io/v1 tokenreviews", "example.com/v1 backups") {
		t.Errorf("discovery of each group: %v", sets.List(want))
	}
	if more, less := raw.Difference(want), want.Difference(raw); len(more)+len(less) > 0 {
		t.Errorf("the documents have in addition %v, and lack %v", sets.List(more), sets.List(less))
	}
	client, ok := c.kube.Discovery().(discovery.AggregatedDiscoveryInterface)
	if !ok {
		t.Fatal("the client knows no aggregated discovery")
	}
	_, resources, failed, err := client.GroupsAndMaybeResources()
	if err != nil || len(failed) > 0 || resources == nil {
		t.Fatalf("the interface: %v, %v", failed, err)
	}
	seen := sets.New[string]()
	for gv, list := range resources {
		for i := range list.APIResources {
			if !strings.Contains(list.APIResources[i].Name, "/") {
				seen.Insert(gv.String() + " " + list.APIResources[i].Name)
			}
		}
	}
	if !seen.Equal(want) {
		t.Errorf("the interface has in addition %v, and lacks %v", sets.List(seen.Difference(want)), sets.List(want.Difference(seen)))
	}
}

// aggregatedResources returns the resources of the aggregated documents.
func aggregatedResources(c custom) (out sets.Set[string]) {
	c.Helper()
	out = sets.New[string]()
	for _, path := range []string{"/api", "/apis"} {
		text, err := c.kube.Discovery().RESTClient().Get().AbsPath(path).
			SetHeader("Accept", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList").Do(c.ctx).Raw()
		var groups apidiscoveryv2.APIGroupDiscoveryList
		if err == nil {
			err = json.Unmarshal(text, &groups)
		}
		if err != nil || groups.Kind != "APIGroupDiscoveryList" {
			c.Fatalf("%s: %s, %v", path, groups.Kind, err)
		}
		for i := range groups.Items {
			for _, v := range groups.Items[i].Versions {
				for j := range v.Resources {
					out.Insert(strings.TrimPrefix(groups.Items[i].Name+"/"+v.Version, "/") + " " + v.Resources[j].Resource)
				}
			}
		}
	}
	return out
}
