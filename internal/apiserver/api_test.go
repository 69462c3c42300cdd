package apiserver_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// waitTimeout bounds every wait of these tests.
const waitTimeout = 30 * time.Second

// testTimeout bounds one test of TestAPI, which may make hundreds of requests, beside other packages.
const testTimeout = 3 * time.Minute

// api is one server shared by the subtests of TestAPI, each in a namespace of
// its own.
type api struct {
	*testing.T
	ctx    context.Context
	cfg    *rest.Config
	client *kubernetes.Clientset
	ns     string
}

func TestAPI(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t)
	client := kubernetes.NewForConfigOrDie(cfg)
	for name, f := range map[string]func(api){
		"pages": testPages, "watch": testWatch, "bookmarks": testBookmarks, "patches": testPatches, "apply": testApply,
		"dry run": testDryRun, "delete collection": testDeleteCollection, "tables": testTables, "encodings": testEncodings,
		"field selectors": testFieldSelectors, "conflict": testConflict, "unknown fields": testUnknownFields,
		"pod defaults": testPodDefaults, "pod validation": testPodValidation, "pod update": testPodUpdate,
		"pod deletion": testPodDeletion, "pod deleted once bound": testPodDeletedOnceBound,
		"binding": testBinding, "status": testStatus, "namespace": testNamespace,
		"events": testEvents, "secret": testSecret, "node": testNode, "documents": testDocuments, "config map": testConfigMap,
		"preconditions": testPreconditions, "default class": testDefaultClass,
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
			defer cancel()
			a := api{t, ctx, cfg, client, "test-" + strings.ReplaceAll(name, " ", "-")}
			_, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: a.ns}}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			f(a)
		})
	}
}

func (a api) must(err error) {
	a.Helper()
	if err != nil {
		a.Fatal(err)
	}
}

// settled waits for the one ConfigMap that the server makes in every namespace.
func (a api) settled() {
	a.Helper()
	eventually(a, "the namespace has the authority's certificate", func() bool {
		_, err := a.client.CoreV1().ConfigMaps(a.ns).Get(a.ctx, "kube-root-ca.crt", metav1.GetOptions{})
		return err == nil
	})
}

func (a api) configMap(name string, labels map[string]string) *corev1.ConfigMap {
	a.Helper()
	cm, err := a.client.CoreV1().ConfigMaps(a.ns).Create(a.ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Data: map[string]string{"k": "v"},
	}, metav1.CreateOptions{})
	a.must(err)
	return cm
}

func (a api) pod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	a.Helper()
	p, err := a.client.CoreV1().Pods(a.ns).Create(a.ctx, podNamed(name, change...), metav1.CreateOptions{})
	a.must(err)
	return p
}

func podNamed(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "host"}}}}
	for _, f := range change {
		f(p)
	}
	return p
}

func onNode(node string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.NodeName = node } }

// eventually polls f until it returns true.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(waitTimeout); !f(); {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s", what, waitTimeout)
		}
		select {
		case <-t.Context().Done():
			t.Fatal("stopped")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// invalidAt requires err to be a 422 that names exactly the given fields.
func invalidAt(t *testing.T, err error, fields ...string) {
	t.Helper()
	var s *apierrors.StatusError
	if !errors.As(err, &s) || s.ErrStatus.Code != http.StatusUnprocessableEntity {
		t.Fatalf("got %v, want 422", err)
	}
	var got []string
	for _, c := range s.ErrStatus.Details.Causes {
		if !slices.Contains(got, c.Field) {
			got = append(got, c.Field)
		}
	}
	slices.Sort(got)
	slices.Sort(fields)
	if !slices.Equal(got, fields) {
		t.Fatalf("wrong fields: got %q, want %q (%v)", got, fields, err)
	}
}

func testPages(a api) {
	a.settled()
	for i := range 7 {
		a.configMap(fmt.Sprintf("cm-%d", i), map[string]string{"parity": fmt.Sprint(i % 2)})
	}
	var names []string
	next, pages := "", 0
	for {
		l, err := a.client.CoreV1().ConfigMaps(a.ns).List(a.ctx, metav1.ListOptions{Limit: 3, Continue: next})
		a.must(err)
		pages++
		for _, cm := range l.Items {
			names = append(names, cm.Name)
		}
		if pages == 1 && (l.RemainingItemCount == nil || *l.RemainingItemCount != 5) {
			a.Errorf("%v remain after the first page, want 5", l.RemainingItemCount)
		}
		if next = l.Continue; next == "" {
			break
		}
	}
	if pages != 3 || len(names) != 8 || !slices.IsSorted(names) {
		a.Errorf("got %d pages with %v", pages, names)
	}
	l, err := a.client.CoreV1().ConfigMaps(a.ns).List(a.ctx, metav1.ListOptions{LabelSelector: "parity in (1)"})
	a.must(err)
	if len(l.Items) != 3 {
		a.Errorf("label selector found %d, want 3", len(l.Items))
	}
}

func testWatch(a api) {
	a.settled()
	first := a.configMap("old", nil)
	w, err := a.client.CoreV1().ConfigMaps(a.ns).Watch(a.ctx, metav1.ListOptions{ResourceVersion: first.ResourceVersion})
	a.must(err)
	defer w.Stop()
	cm := a.configMap("new", nil)
	cm.Data["k"] = "w"
	_, err = a.client.CoreV1().ConfigMaps(a.ns).Update(a.ctx, cm, metav1.UpdateOptions{})
	a.must(err)
	a.must(a.client.CoreV1().ConfigMaps(a.ns).Delete(a.ctx, "new", metav1.DeleteOptions{}))
	for _, want := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted} {
		select {
		case e := <-w.ResultChan():
			if got, ok := e.Object.(*corev1.ConfigMap); !ok || e.Type != want || got.Name != "new" {
				a.Fatalf("got %v %v, want %v of new", e.Type, e.Object, want)
			}
		case <-time.After(waitTimeout):
			a.Fatalf("no %v", want)
		}
	}
	// A change by which an object leaves the selection is its deletion.
	sel, err := a.client.CoreV1().ConfigMaps(a.ns).Watch(a.ctx, metav1.ListOptions{LabelSelector: "keep=yes"})
	a.must(err)
	defer sel.Stop()
	cm = a.configMap("labelled", map[string]string{"keep": "yes"})
	cm.Labels = nil
	_, err = a.client.CoreV1().ConfigMaps(a.ns).Update(a.ctx, cm, metav1.UpdateOptions{})
	a.must(err)
	for _, want := range []watch.EventType{watch.Added, watch.Deleted} {
		if e := <-sel.ResultChan(); e.Type != want {
			a.Fatalf("got %v, want %v", e.Type, want)
		}
	}
}

// The initial list of an informer may come through the watch, ended by a
// bookmark.
func testBookmarks(a api) {
	a.settled()
	a.configMap("one", nil)
	send := true
	w, err := a.client.CoreV1().ConfigMaps(a.ns).Watch(a.ctx, metav1.ListOptions{
		AllowWatchBookmarks: true, SendInitialEvents: &send, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
	})
	a.must(err)
	defer w.Stop()
	for range 2 {
		if e := <-w.ResultChan(); e.Type != watch.Added {
			a.Fatalf("got %v, want the initial objects", e)
		}
	}
	e := <-w.ResultChan()
	cm, ok := e.Object.(*corev1.ConfigMap)
	if !ok || e.Type != watch.Bookmark || cm.Annotations[metav1.InitialEventsAnnotationKey] != "true" || cm.ResourceVersion == "" {
		a.Fatalf("got %v, want a bookmark at the end of the initial objects", e)
	}
}

// table fetches the table that kubectl get shows.
func (a api) table(path string) *metav1.Table {
	a.Helper()
	raw, err := a.client.CoreV1().RESTClient().Get().AbsPath(path).SetHeader("Accept",
		"application/json;as=Table;v=v1;g=meta.k8s.io").DoRaw(a.ctx)
	a.must(err)
	t := &metav1.Table{}
	a.must(json.Unmarshal(raw, t))
	return t
}

func testTables(a api) {
	a.configMap("cm", nil)
	a.pod("p")
	ns := "/api/v1/namespaces/" + a.ns
	for path, want := range map[string]string{
		ns + "/pods":       "Name Ready Status Restarts Age IP* Node* Nominated Node* Readiness Gates*",
		ns + "/configmaps": "Name Data Age", "/api/v1/namespaces": "Name Status Age", ns + "/secrets": "Name Type Data Age",
		ns + "/serviceaccounts": "Name Age",
		"/api/v1/nodes": "Name Status Roles Age Version Internal-IP* External-IP* OS-Image* Kernel-Version* " +
			"Container-Runtime*",
		ns + "/events":                             "Last Seen Type Reason Object Subobject* Source* Message First Seen* Count* Name*",
		ns + "/services":                           "Name Type Cluster-IP External-IP Port(s) Age Selector*",
		ns + "/endpoints":                          "Name Endpoints Age",
		"/apis/coordination.k8s.io/v1/leases":      "Name Holder Age",
		"/apis/discovery.k8s.io/v1/endpointslices": "Name AddressType Ports Endpoints Age",
		"/apis/networking.k8s.io/v1/ipaddresses":   "Name ParentRef",
		"/apis/networking.k8s.io/v1/servicecidrs":  "Name CIDRs Age",
		"/apis/events.k8s.io/v1/events":            "Last Seen Type Reason Object Subobject* Source* Message First Seen* Count* Name*",
	} {
		var cols []string
		for _, c := range a.table(path).ColumnDefinitions {
			if c.Priority > 0 {
				c.Name += "*"
			}
			cols = append(cols, c.Name)
		}
		if got := strings.Join(cols, " "); got != want {
			a.Errorf("%s: columns %q, want %q", path, got, want)
		}
	}
	row := a.table(ns + "/pods").Rows[0].Cells
	if got := fmt.Sprintln(row[0], row[1], row[2], row[3], row[5]); got != "p 0/1 Pending 0 <none>\n" {
		a.Errorf("row of the pod: %q", got)
	}
}

func testEncodings(a api) {
	for _, contentType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		cfg := rest.CopyConfig(a.cfg)
		cfg.ContentType, cfg.AcceptContentTypes = contentType, contentType
		c := kubernetes.NewForConfigOrDie(cfg)
		name := contentType[strings.LastIndexAny(contentType, "./")+1:]
		_, err := c.CoreV1().Pods(a.ns).Create(a.ctx, podNamed(name), metav1.CreateOptions{})
		a.must(err)
		p, err := c.CoreV1().Pods(a.ns).Get(a.ctx, name, metav1.GetOptions{})
		a.must(err)
		if p.Spec.Containers[0].Image != "host" {
			a.Errorf("%s: %+v", contentType, p.Spec)
		}
		l, err := c.CoreV1().Pods(a.ns).List(a.ctx, metav1.ListOptions{})
		a.must(err)
		if len(l.Items) == 0 {
			a.Errorf("%s: empty list", contentType)
		}
	}
	yaml := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: from-yaml}\ndata: {k: v}\n"
	raw, err := a.client.CoreV1().RESTClient().Post().AbsPath("/api/v1/namespaces/"+a.ns+"/configmaps").
		SetHeader("Content-Type", runtime.ContentTypeYAML).SetHeader("Accept", runtime.ContentTypeYAML).Body([]byte(yaml)).DoRaw(a.ctx)
	a.must(err)
	if !strings.Contains(string(raw), "name: from-yaml") {
		a.Errorf("YAML answer: %s", raw)
	}
}

func testFieldSelectors(a api) {
	a.pod("bound", onNode("node-a"))
	a.pod("free")
	pods := a.client.CoreV1().Pods(a.ns)
	for sel, want := range map[string]string{
		"spec.nodeName=node-a": "bound", "spec.nodeName=": "free", "status.phase=Pending,metadata.name=free": "free",
		"status.phase=Running": "", "spec.nodeName!=node-a": "free", "metadata.namespace=" + a.ns + ",metadata.name=bound": "bound",
		"spec.restartPolicy=Never": "",
	} {
		l, err := pods.List(a.ctx, metav1.ListOptions{FieldSelector: sel})
		a.must(err)
		var names []string
		for _, p := range l.Items {
			names = append(names, p.Name)
		}
		if got := strings.Join(names, " "); got != want {
			a.Errorf("%s found %q, want %q", sel, got, want)
		}
	}
	_, err := pods.List(a.ctx, metav1.ListOptions{FieldSelector: "spec.hostname=x"})
	if !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), "spec.nodeName") {
		a.Errorf("unknown label: got %v, want a 400 that names the allowed ones", err)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}}
	_, err = a.client.CoreV1().Secrets(a.ns).Create(a.ctx, secret, metav1.CreateOptions{})
	a.must(err)
	s, err := a.client.CoreV1().Secrets(a.ns).List(a.ctx, metav1.ListOptions{FieldSelector: "type=Opaque"})
	a.must(err)
	if len(s.Items) != 1 {
		a.Errorf("type=Opaque found %d secrets", len(s.Items))
	}
	n, err := a.client.CoreV1().Namespaces().List(a.ctx, metav1.ListOptions{FieldSelector: "status.phase=Active,metadata.name=" + a.ns})
	a.must(err)
	if len(n.Items) != 1 {
		a.Errorf("found %d namespaces", len(n.Items))
	}
}

func testDocuments(a api) {
	for path, wants := range map[string][]string{
		"/version":            {`"major": "1"`, `"minor": "37"`, `"gitVersion": "v1.37.0+fairlead"`},
		"/livez?verbose":      {"[+]etcd ok"},
		"/readyz?verbose":     {"[+]etcd ok", "[+]poststarthook/fairlead/bootstrap ok"},
		"/healthz":            {"ok"},
		"/metrics":            {"apiserver_request_total", "etcd_request_duration_seconds", "etcd_server_has_leader 1", "etcd_disk_wal_fsync_"},
		"/openapi/v2":         {`"x-kubernetes-group-version-kind":[{"group":"","kind":"Pod","version":"v1"}]`},
		"/openapi/v3":         {"/openapi/v3/api/v1"},
		"/openapi/v3/api/v1":  {`"io.k8s.api.core.v1.Pod"`, "fieldValidation"},
		"/api":                {`"v1"`},
		"/apis":               {"discovery.k8s.io", "networking.k8s.io", "coordination.k8s.io", "events.k8s.io"},
		"/api/v1":             {`"shortNames":["po"]`, `"shortNames":["svc"]`, `"pods/exec"`},
		"/apis/events.k8s.io": {"events.k8s.io/v1"},
	} {
		raw, err := a.client.CoreV1().RESTClient().Get().RequestURI(path).DoRaw(a.ctx)
		if err != nil {
			a.Errorf("%s: %v", path, err)
		}
		for _, want := range wants {
			if !strings.Contains(string(raw), want) {
				a.Errorf("%s lacks %s", path, want)
			}
		}
		if strings.Contains(string(raw), "__internal") {
			a.Errorf("%s shows the hub version", path)
		}
	}
}
