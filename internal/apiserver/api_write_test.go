package apiserver_test

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1apply "k8s.io/client-go/applyconfigurations/core/v1"
)

func testPatches(a api) {
	a.pod("p", func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "a"}
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Image: "host"})
	})
	pods := a.client.CoreV1().Pods(a.ns)
	p, err := pods.Patch(a.ctx, "p", types.JSONPatchType,
		[]byte(`[{"op":"test","path":"/metadata/labels/app","value":"a"},{"op":"replace","path":"/metadata/labels/app","value":"b"}]`),
		metav1.PatchOptions{})
	a.must(err)
	if p.Labels["app"] != "b" {
		a.Errorf("JSON patch: %v", p.Labels)
	}
	if _, err = pods.Patch(a.ctx, "p", types.JSONPatchType, []byte(`[{"op":"test","path":"/metadata/labels/app","value":"z"}]`),
		metav1.PatchOptions{}); err == nil {
		a.Error("a JSON patch whose test fails was accepted")
	}
	p, err = pods.Patch(a.ctx, "p", types.MergePatchType, []byte(`{"metadata":{"labels":{"app":null,"x":"y"}}}`), metav1.PatchOptions{})
	a.must(err)
	if len(p.Labels) != 1 || p.Labels["x"] != "y" {
		a.Errorf("merge patch: %v", p.Labels)
	}
	// The strategic patch merges containers by their name.
	p, err = pods.Patch(a.ctx, "p", types.StrategicMergePatchType, []byte(`{"spec":{"containers":[{"name":"d","image":"other:1"}]}}`),
		metav1.PatchOptions{})
	a.must(err)
	if len(p.Spec.Containers) != 2 || p.Spec.Containers[1].Image != "other:1" || p.Spec.Containers[0].Image != "host" {
		a.Errorf("strategic patch: %+v", p.Spec.Containers)
	}
	if p.Generation != 2 {
		a.Errorf("generation %d after one change of the spec, want 2", p.Generation)
	}
}

func testApply(a api) {
	apply := func(manager string, force bool, data map[string]string) (*corev1.ConfigMap, error) {
		return a.client.CoreV1().ConfigMaps(a.ns).Apply(a.ctx, corev1apply.ConfigMap("cm", a.ns).WithData(data),
			metav1.ApplyOptions{FieldManager: manager, Force: force})
	}
	_, err := apply("one", false, map[string]string{"a": "1", "b": "1"})
	a.must(err)
	cm, err := apply("two", false, map[string]string{"c": "2"})
	a.must(err)
	if len(cm.Data) != 3 {
		a.Errorf("two managers: %v", cm.Data)
	}
	if _, err = apply("two", false, map[string]string{"a": "2", "c": "2"}); !apierrors.IsConflict(err) ||
		!strings.Contains(err.Error(), ".data.a") {
		a.Errorf("got %v, want a conflict on .data.a", err)
	}
	cm, err = apply("two", true, map[string]string{"a": "2", "c": "2"})
	a.must(err)
	if cm.Data["a"] != "2" {
		a.Errorf("forced: %v", cm.Data)
	}
	// What a manager applies no more is removed.
	cm, err = apply("one", false, map[string]string{})
	a.must(err)
	if _, ok := cm.Data["b"]; ok || cm.Data["a"] != "2" {
		a.Errorf("after giving up: %v", cm.Data)
	}
	// Typed merge: containers are a map by name, ports by number and protocol.
	pod := corev1apply.Pod("p", a.ns).WithSpec(corev1apply.PodSpec().WithContainers(
		corev1apply.Container().WithName("c").WithImage("host").WithPorts(corev1apply.ContainerPort().WithContainerPort(80))))
	p, err := a.client.CoreV1().Pods(a.ns).Apply(a.ctx, pod, metav1.ApplyOptions{FieldManager: "one"})
	a.must(err)
	fields := string(p.ManagedFields[0].FieldsV1.GetRawBytes())
	if !strings.Contains(fields, `k:{\"containerPort\":80,\"protocol\":\"TCP\"}`) {
		a.Errorf("the port is not merged by its keys: %s", fields)
	}
}

func testDryRun(a api) {
	dry := []string{metav1.DryRunAll}
	cms := a.client.CoreV1().ConfigMaps(a.ns)
	_, err := cms.Create(a.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "ghost"}}, metav1.CreateOptions{DryRun: dry})
	a.must(err)
	if _, err := cms.Get(a.ctx, "ghost", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		a.Errorf("a dry run created something: %v", err)
	}
	cm := a.configMap("real", nil)
	cm.Data["k"] = "changed"
	_, err = cms.Update(a.ctx, cm, metav1.UpdateOptions{DryRun: dry})
	a.must(err)
	a.must(cms.Delete(a.ctx, "real", metav1.DeleteOptions{DryRun: dry}))
	got, err := cms.Get(a.ctx, "real", metav1.GetOptions{})
	a.must(err)
	if got.Data["k"] != "v" {
		a.Error("a dry run changed something")
	}
}

func testDeleteCollection(a api) {
	for i := range 5 {
		a.configMap(fmt.Sprintf("cm-%d", i), map[string]string{"go": fmt.Sprint(i < 3)})
	}
	cms := a.client.CoreV1().ConfigMaps(a.ns)
	a.must(cms.DeleteCollection(a.ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "go=true"}))
	l, err := cms.List(a.ctx, metav1.ListOptions{LabelSelector: "go"})
	a.must(err)
	if len(l.Items) != 2 {
		a.Errorf("%d left, want 2", len(l.Items))
	}
	if err := a.client.CoreV1().RESTClient().Delete().AbsPath("/api/v1/namespaces").Do(a.ctx).Error(); !apierrors.IsMethodNotSupported(err) {
		a.Errorf("deletecollection of namespaces: got %v, want 405", err)
	}
}

func testConflict(a api) {
	cm := a.configMap("cm", nil)
	stale := cm.DeepCopy()
	cm.Data["k"] = "new"
	_, err := a.client.CoreV1().ConfigMaps(a.ns).Update(a.ctx, cm, metav1.UpdateOptions{})
	a.must(err)
	if _, err = a.client.CoreV1().ConfigMaps(a.ns).Update(a.ctx, stale, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		a.Errorf("stale update: got %v, want 409", err)
	}
	if _, err = a.client.CoreV1().ConfigMaps(a.ns).Create(a.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "cm"}},
		metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		a.Errorf("second create: got %v, want 409", err)
	}
	if _, err = a.client.CoreV1().ConfigMaps("nowhere").Create(a.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "cm"}},
		metav1.CreateOptions{}); !apierrors.IsNotFound(err) {
		a.Errorf("create in a namespace that is not there: got %v, want 404", err)
	}
	g, err := a.client.CoreV1().ConfigMaps(a.ns).Create(a.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "gen-"}},
		metav1.CreateOptions{})
	a.must(err)
	if !strings.HasPrefix(g.Name, "gen-") || len(g.Name) != len("gen-")+5 {
		a.Errorf("generated name %q", g.Name)
	}
}

func testUnknownFields(a api) {
	body := []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"typo"},"dta":{"k":"v"}}`)
	post := func(validation string) error {
		return a.client.CoreV1().RESTClient().Post().AbsPath("/api/v1/namespaces/"+a.ns+"/configmaps").Param("fieldValidation",
			validation).Body(body).Do(a.ctx).Error()
	}
	if err := post("Strict"); !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), `unknown field "dta"`) {
		a.Errorf("strict: got %v, want 400", err)
	}
	a.must(post("Ignore"))
	// Behaviour 149: an annotation that is not a string.
	err := a.client.CoreV1().RESTClient().Post().AbsPath("/api/v1/namespaces/" + a.ns + "/services").
		Body([]byte(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"x",` +
			`"annotations":{"service.kubernetes.io/local-svc-only-bind-node-with-pod":true}}}`)).Do(a.ctx).Error()
	if !apierrors.IsBadRequest(err) { // behaviour 149
		a.Errorf("boolean annotation: got %v, want 400", err)
	}
}

func testPreconditions(a api) {
	cm := a.configMap("cm", nil)
	other := types.UID("00000000-0000-0000-0000-000000000000")
	err := a.client.CoreV1().ConfigMaps(a.ns).Delete(a.ctx, "cm", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &other}})
	if !apierrors.IsConflict(err) {
		a.Errorf("wrong UID: got %v, want 409", err)
	}
	a.must(a.client.CoreV1().ConfigMaps(a.ns).Delete(a.ctx, "cm", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &cm.UID}}))
}
