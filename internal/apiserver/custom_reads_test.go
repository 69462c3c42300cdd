package apiserver_test

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/metrics/legacyregistry"
)

// twin is a definition of the kind Door in a group, with rules or without. Nothing else differs.
func twin(group string, rules bool) string {
	text := `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: doors.GROUP}
spec:
  group: GROUP
  scope: Namespaced
  names: {plural: doors, singular: door, kind: Door, listKind: DoorList, shortNames: [dr]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}, scale: {specReplicasPath: .spec.width, statusReplicasPath: .status.width}}
    selectableFields: [{jsonPath: .spec.color}]
    additionalPrinterColumns: [{name: Width, type: integer, jsonPath: .spec.width}]
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            RULES
            properties:
              color: {type: string, default: red}
              width: {type: integer, default: 7}
              parts:
                type: array
                maxItems: 9
                items: {type: object, properties: {size: {type: integer, maximum: 9 PART}}}
              labels: {type: object, maxProperties: 9, additionalProperties: {type: string PART2}}
          status: {type: object, properties: {width: {type: integer PART}}}
  - name: v1old
    served: true
    storage: false
    deprecated: true
    schema:
      openAPIV3Schema: {type: object, properties: {spec: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`
	rule := func(text string) string {
		if !rules {
			return ""
		}
		return text
	}
	return strings.NewReplacer("GROUP", group,
		"RULES", rule(`x-kubernetes-validations: [{rule: "self.width < 100", message: "too wide"}]`),
		"PART2", rule(`, maxLength: 9, x-kubernetes-validations: [{rule: "self != 'bad'"}]`),
		"PART", rule(`, x-kubernetes-validations: [{rule: "self != 5"}]`)).Replace(text)
}

// establish creates a definition and waits until its kind is served.
func (c custom) establish(text string) {
	c.Helper()
	o := object(c.T, text)
	if _, err := c.objs.Resource(definitions).Create(c.ctx, o, metav1.CreateOptions{}); err != nil {
		c.Fatal(err)
	}
	eventually(c, o.GetName()+" is established", func() bool {
		got, err := c.objs.Resource(definitions).Get(c.ctx, o.GetName(), metav1.GetOptions{})
		return err == nil && condition(got, "Established")
	})
}

func doors(group string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: group, Version: "v1", Resource: "doors"}
}

func door(t *testing.T, group, name, spec string) *unstructured.Unstructured {
	return object(t, fmt.Sprintf("{apiVersion: %s/v1, kind: Door, metadata: {name: %s, labels: {part: %s}}, spec: %s}",
		group, name, name, spec))
}

// varying is what differs between two objects that were made in the same way.
var varying = regexp.MustCompile(`"(uid|resourceVersion|creationTimestamp|time|continue)":\s?"[^"]*"|resourceVersion: "\d+"|\d+ms|\d+s\b` +
	`|uid: \S+|creationTimestamp: \S+|\btime: "\S+"|(Too large|too old) resource version: .*|"generateName".*`)

// answer is the whole answer to a GET below the group. The names of the twins are as long as each other.
func (c custom) answer(t *testing.T, group, path, accept string) string {
	t.Helper()
	client, err := rest.HTTPClientFor(c.cfg)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(c.ctx, http.MethodGet, c.cfg.Host+"/apis/"+group+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Accept", accept)
	resp, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprint(resp.StatusCode, resp.Header["Content-Type"], resp.Header["Warning"], string(body))
	return varying.ReplaceAllString(strings.ReplaceAll(text, group, "GROUP"), "*")
}

// Kinds with rules are read through another handler than kinds without: every answer is the same.
func TestReadsOfKindsWithRules(t *testing.T) {
	t.Parallel()
	c := newCustom(t)
	groups := []string{"ruled.example.com", "plain.example.com"}
	c.establish(twin(groups[0], true))
	c.establish(twin(groups[1], false))
	for _, g := range groups { // a new watch cache answers 429 for a moment
		for _, version := range []string{"v1", "v1old"} {
			eventually(c, g+" is read", func() bool {
				return strings.HasPrefix(c.answer(t, g, "/"+version+"/doors", "application/json"), "200")
			})
		}
	}
	compare := func(when string) {
		for _, accept := range []string{
			"application/json", "application/yaml", "application/vnd.kubernetes.protobuf", "text/none",
			"application/json;as=Table;v=v1;g=meta.k8s.io", "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
		} {
			for _, path := range []string{
				"/v1/doors", "/v1old/doors", "/v1/namespaces/default/doors", "/v1/namespaces/default/doors/a", "/v1/namespaces/default/doors/z",
				"/v1/namespaces/default/doors/a/status", "/v1/namespaces/default/doors/a/scale", "/v1/namespaces/default/doors/a/none", "/v1/doors/a",
				"/v2/doors", "/v1/doors?limit=1", "/v1/doors?limit=x", "/v1/doors?continue=bad", "/v1/doors?labelSelector=part%3Da",
				"/v1/doors?labelSelector=%3D%3D", "/v1/doors?fieldSelector=spec.color%3Dred", "/v1/doors?fieldSelector=spec.none%3Dred",
				"/v1/doors?fieldSelector=metadata.name%3Da", "/v1/doors?resourceVersion=0", "/v1/doors?resourceVersion=x",
				"/v1/doors?resourceVersion=1&resourceVersionMatch=NotOlderThan", "/v1/doors?resourceVersionMatch=Exact", "/v1/doors?pretty=1",
				"/v1/doors?sendInitialEvents=true", "/v1/doors?watch=1&resourceVersion=x",
				"/v1/doors?watch=1&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true",
				"/v1/doors?watch=1&timeoutSeconds=1&resourceVersion=0", "/v1/doors?watch=1&timeoutSeconds=1&fieldSelector=spec.color%3Dblue",
			} {
				if strings.Contains(path, "timeoutSeconds") && accept != "application/json" {
					continue
				}
				ruled, plain := c.answer(t, groups[0], path, accept), c.answer(t, groups[1], path, accept)
				if ruled != plain {
					t.Errorf("%s, %s of %s:\n%s\nwithout rules\n%s", when, path, accept, ruled, plain)
				}
			}
		}
	}
	compare("without objects")
	for _, g := range groups {
		for name, spec := range map[string]string{"a": "{parts: [{size: 1}]}", "b": "{color: blue, labels: {x: ok}}"} {
			if _, err := c.objs.Resource(doors(g)).Namespace("default").Create(c.ctx, door(t, g, name, spec), metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	compare("with objects")
	c.testWritesOfRuled(t, groups[0])
}

// testWritesOfRuled looks at the rules, and at a watch that lasts over writes and ends with the rules.
func (c custom) testWritesOfRuled(t *testing.T, group string) {
	objs := c.objs.Resource(doors(group)).Namespace("default")
	w, err := objs.Watch(c.ctx, metav1.ListOptions{FieldSelector: "metadata.name=c"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	if _, err := objs.Create(c.ctx, door(t, group, "c", "{width: 100}"), metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("an object against the rules: %v", err)
	}
	if _, err := objs.Create(c.ctx, door(t, group, "c", "{width: 99}"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	change := func(patch string, more ...string) error {
		_, err := objs.Patch(c.ctx, "c", types.MergePatchType, []byte(patch), metav1.PatchOptions{}, more...)
		return err
	}
	for _, err := range []error{
		change(`{"spec":{"width":100}}`), change(`{"status":{"width":5}}`, "status"), change(`{"spec":{"parts":[{"size":5}]}}`),
		change(`{"spec":{"labels":{"x":"bad"}}}`),
	} {
		if !apierrors.IsInvalid(err) {
			t.Errorf("a change against the rules: %v", err)
		}
	}
	if err := change(`{"spec":{"width":98}}`); err != nil {
		t.Fatal(err)
	}
	if err := objs.Delete(c.ctx, "c", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := objs.DeleteCollection(c.ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "part=b"}); err != nil {
		t.Fatal(err)
	}
	if list, err := objs.List(c.ctx, metav1.ListOptions{}); err != nil || len(list.Items) != 1 || list.Items[0].GetName() != "a" {
		t.Errorf("after deletions: %v %v", list, err)
	}
	for _, want := range []string{"ADDED", "MODIFIED", "DELETED"} {
		select {
		case e := <-w.ResultChan():
			if string(e.Type) != want {
				t.Errorf("the watch sent %s for %s", e.Type, want)
			}
		case <-time.After(waitTimeout):
			t.Fatalf("the watch has not sent %s", want)
		}
	}
	rule := []byte(`[{"op":"replace","value":"self.width < 9",` +
		`"path":"/spec/versions/0/schema/openAPIV3Schema/properties/spec/x-kubernetes-validations/0/rule"}]`)
	if _, err := c.objs.Resource(definitions).Patch(c.ctx, "doors."+group, types.JSONPatchType, rule, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	select {
	case e, ok := <-w.ResultChan():
		if ok {
			t.Errorf("the watch sent %v", e)
		}
	case <-time.After(waitTimeout):
		t.Error("the watch has not ended with the rule")
	}
	eventually(c, "the new rule counts", func() bool {
		_, err := objs.Create(c.ctx, door(t, group, "d", "{width: 50}"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return apierrors.IsInvalid(err)
	})
}

// Rules are compiled for writes, and not for reads. No other test of the process runs beside this one, as it counts.
func TestReadsCompileNoRules(t *testing.T) { //nolint:paralleltest // it reads metrics of the process
	c := newCustom(t)
	const group = "ruled.example.com"
	c.establish(twin(group, true))
	objs := c.objs.Resource(doors(group)).Namespace("default")
	before := compilations(t)
	if _, err := objs.List(c.ctx, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	w, err := objs.Watch(c.ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.Stop()
	if n := compilations(t) - before; n != 0 {
		t.Errorf("reads compiled %v rules", n)
	}
	if _, err := objs.Create(c.ctx, door(t, group, "a", "{}"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if n := compilations(t) - before; n == 0 {
		t.Error("a write compiled no rule")
	}
}

// compilations is how many rules the process has compiled.
func compilations(t *testing.T) (n uint64) {
	t.Helper()
	all, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == "apiserver_cel_compilation_duration_seconds" {
			for _, m := range f.GetMetric() {
				n += m.GetHistogram().GetSampleCount()
			}
		}
	}
	return n
}
