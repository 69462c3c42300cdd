package listing

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// A Reader reads in all namespaces, or where the user may not in each that it is given, knows the ones that it could not read, and
// reports long work, and what was not read when the time is over.
func TestList(t *testing.T) {
	server := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(server.LoopbackConfig())
	ctx := t.Context()
	const many = 620 // more than a page
	for _, n := range []string{"shop", "infra", "dark"} {
		if _, err := admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n}},
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range many {
		if _, err := admin.CoreV1().ConfigMaps("shop").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("c", i)}},
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range []string{"shop", "infra"} {
		if _, err := admin.RbacV1().RoleBindings(n).Create(ctx, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "tenant"},
			Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "tenant"}},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	maps := func(ctx context.Context, client kubernetes.Interface, r *Reader) []*corev1.ConfigMap {
		return List[*corev1.ConfigMapList, corev1.ConfigMap](ctx, r, "ConfigMaps",
			func(n string) Func[*corev1.ConfigMapList] { return client.CoreV1().ConfigMaps(n).List })
	}
	of := func(all []*corev1.ConfigMap, namespace string) (n int) {
		for _, o := range all {
			if o.Namespace == namespace && o.Name[0] == 'c' {
				n++
			}
		}
		return n
	}
	r := New([]string{"infra"}, nil)
	var told []string
	r.Tell, r.Each = func(text string) { told = append(told, text) }, 0
	if n := of(maps(ctx, admin, r), "shop"); n != many || r.Failed() != nil || r.Beyond("ConfigMaps") != nil {
		t.Errorf("%d objects of %d: %v", n, many, r.Failed())
	}
	if len(told) < 2 || told[0] != "ConfigMaps: 500 read so far" {
		t.Errorf("of two pages it tells %q", told)
	}

	cfg := rest.CopyConfig(server.LoopbackConfig())
	cfg.Impersonate.UserName, cfg.QPS = "tenant", -1
	tenant := kubernetes.NewForConfigOrDie(cfg)
	r = New([]string{"shop", "dark"}, []string{"infra", "shop", ""})
	if n := of(maps(ctx, tenant, r), "shop"); n != many || r.Failed() != nil {
		t.Errorf("a tenant reads %d objects of %d: %v", n, many, r.Failed())
	}
	what, has, lacks := r.Partly("Services", "ConfigMaps")
	if what != "ConfigMaps" || has != "shop, infra" || lacks != "dark" || fmt.Sprint(r.Own("ConfigMaps")) != "[dark]" || r.None("ConfigMaps") {
		t.Errorf("%q of %q, not of %q; own %q", what, has, lacks, r.Own("ConfigMaps"))
	}
	if beyond := r.Beyond("ConfigMaps"); beyond("shop") || !beyond("dark") || !beyond("other") {
		t.Error("it does not know of which namespaces the kind was not read")
	}
	if _, may := Whole[*corev1.NodeList, corev1.Node](ctx, r, "Nodes", tenant.CoreV1().Nodes().List); may || r.Failed() != nil {
		t.Errorf("a tenant may list Nodes: %v, %v", may, r.Failed())
	}
	r = New([]string{"dark"}, nil)
	if maps(ctx, tenant, r); !r.None("ConfigMaps") {
		t.Error("the user may list the kind in no namespace")
	}

	late, cancel := context.WithDeadline(ctx, time.Now())
	defer cancel()
	r = New(nil, nil)
	r.Expect("ConfigMaps", "Pods", "Nodes")
	maps(late, admin, r)
	r.Begin("Pods")
	err := r.Late(late, r.Failed(), time.Minute)
	if err == nil || !strings.Contains(err.Error(), "was not made within 1m0s, and nothing is known of what would change; not read: "+
		"ConfigMaps (only 0), Pods, Nodes.") {
		t.Errorf("when the time is over: %v", err)
	}
	r = New(nil, nil)
	if _, may := Whole[*corev1.NodeList, corev1.Node](ctx, r, "Nodes", tenant.CoreV1().Nodes().List); may {
		t.Error("a tenant may list Nodes")
	}
	err = r.Late(late, context.DeadlineExceeded, time.Minute)
	if err == nil || strings.Contains(err.Error(), "not read") ||
		!strings.HasSuffix(err.Error(), "would change. Give it more time with --timeout") {
		t.Errorf("when the time is over behind a refused list: %v", err)
	}
	r.Compare()
	err = r.Late(late, context.DeadlineExceeded, time.Minute)
	if err == nil || !strings.Contains(err.Error(), "; all was read, and not all compared. Give") {
		t.Errorf("when the time is over behind all lists: %v", err)
	}
	if other := errors.New("x"); r.Late(ctx, other, time.Minute) != other || r.Late(late, nil, time.Minute) != nil {
		t.Error("another error is not of the time")
	}
}

// Many namespaces are tried up to a bound, the plan's own first, and a text names some.
func TestNamespaces(t *testing.T) {
	var others []string
	for i := range mostNamespaces + 4 {
		others = append(others, fmt.Sprint("n", i))
	}
	r := New([]string{"own"}, others)
	if len(r.namespaces) != mostNamespaces || r.namespaces[0] != "own" || r.left != 5 {
		t.Errorf("%d namespaces, %d left", len(r.namespaces), r.left)
	}
	r.refused["Pods"] = others[:20]
	if _, _, lacks := r.Partly("Pods"); lacks != "n0, n1, n2, n3, n4, n5, n6, n7, 17 more" {
		t.Errorf("not of %q", lacks)
	}
}
