package apiserver_test

import (
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/access"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// clientAs is a client in the name of user.
func clientAs(s *apiserver.Server, user string, groups ...string) *kubernetes.Clientset {
	cfg := rest.CopyConfig(s.LoopbackConfig())
	cfg.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	return kubernetes.NewForConfigOrDie(cfg)
}

func TestRBAC(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, stop := apiservertest.StartStoppable(t, func(o *apiserver.Options) { o.DataDir = dir })
	defer stop()
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	t.Run("validation", func(t *testing.T) { testRoleValidation(t, admin) })
	t.Run("grant", func(t *testing.T) { testGrant(t, s, admin) })
	t.Run("escalation", func(t *testing.T) { testEscalation(t, s, admin) })
	t.Run("aggregation", func(t *testing.T) { testAggregation(t, s, admin) })
	t.Run("reviews", func(t *testing.T) { testReviews(t, s, admin) })
	t.Run("defaults", func(t *testing.T) { spoilDefaults(t, admin) })
	stop()
	s = apiservertest.StartServer(t, func(o *apiserver.Options) { o.DataDir = dir })
	t.Run("reconciled", func(t *testing.T) { testReconciled(t, kubernetes.NewForConfigOrDie(s.LoopbackConfig())) })
}

func subjects(list ...rbacv1.Subject) []rbacv1.Subject { return list }

func roleRef(kind, name string) rbacv1.RoleRef {
	return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: name}
}

func rules(verbs, resources string) []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{{Verbs: strings.Fields(verbs), APIGroups: []string{""}, Resources: strings.Fields(resources)}}
}

func testRoleValidation(t *testing.T, c *kubernetes.Clientset) {
	api := c.RbacV1()
	_, err := api.Roles("default").Create(t.Context(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: "bad"},
		Rules:      []rbacv1.PolicyRule{{}, {Verbs: []string{"get"}, NonResourceURLs: []string{"/x"}, Resources: []string{"pods"}}},
	}, metav1.CreateOptions{})
	invalidAt(t, err, "rules[0].verbs", "rules[0].apiGroups", "rules[0].resources", "rules[1].nonResourceURLs")
	_, err = api.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "bad"},
		AggregationRule: &rbacv1.AggregationRule{}}, metav1.CreateOptions{})
	invalidAt(t, err, "aggregationRule.clusterRoleSelectors")
	_, err = api.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "bad"}, RoleRef: roleRef("Role", ""),
		Subjects: subjects(rbacv1.Subject{Kind: "User"}, rbacv1.Subject{Kind: "Robot", Name: "x"},
			rbacv1.Subject{Kind: "ServiceAccount", Name: "x"}),
	}, metav1.CreateOptions{})
	invalidAt(t, err, "roleRef.kind", "roleRef.name", "subjects[0].name", "subjects[1].kind", "subjects[2].namespace")
	b, err := api.RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "fixed"}, RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "view"},
		Subjects: subjects(rbacv1.Subject{Kind: "User", Name: "u"}),
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if b.RoleRef.APIGroup != rbacv1.GroupName || b.Subjects[0].APIGroup != rbacv1.GroupName {
		t.Errorf("no defaults: %+v", b)
	}
	b.RoleRef.Name = "edit"
	_, err = api.RoleBindings("default").Update(t.Context(), b, metav1.UpdateOptions{})
	invalidAt(t, err, "roleRef")
}

// allowed asks by a SubjectAccessReview.
func allowed(t *testing.T, c *kubernetes.Clientset, user, verb, resource, namespace, name string, groups ...string) bool {
	t.Helper()
	resource, sub, _ := strings.Cut(resource, "/")
	r, err := c.AuthorizationV1().SubjectAccessReviews().Create(t.Context(),
		&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user, Groups: groups,
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Resource: resource, Subresource: sub, Namespace: namespace,
				Name: name},
		}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Status.Allowed
}

// What a binding gives begins when it is made and ends when it is deleted.
func testGrant(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	api := c.RbacV1()
	bob := clientAs(s, "bob", "readers")
	list := func() error {
		_, err := bob.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
		return err
	}
	if err := list(); !apierrors.IsForbidden(err) {
		t.Fatalf("bob without a binding: %v", err)
	}
	if _, err := api.Roles("default").Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "reader"}, Rules: append(
		rules("get list", "pods */log"),
		rbacv1.PolicyRule{Verbs: []string{"update"}, APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{"one"}},
	)}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, subject := range []rbacv1.Subject{{Kind: "User", Name: "bob"}, {Kind: "Group", Name: "readers"}} {
		b, err := api.RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "read"}, RoleRef: roleRef("Role", "reader"),
			Subjects: subjects(subject, rbacv1.Subject{Kind: "ServiceAccount", Name: "robot"}),
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "the binding counts", func() bool { return list() == nil })
		for _, q := range []struct {
			user, verb, resource, namespace, name string
			want                                  bool
		}{
			{"bob", "get", "pods/log", "default", "p", true},
			{"bob", "get", "pods/exec", "default", "p", false},
			{"bob", "list", "pods", "kube-system", "", false},
			{"bob", "list", "pods", "", "", false},
			{"bob", "delete", "pods", "default", "p", false},
			{"bob", "update", "configmaps", "default", "one", true},
			{"bob", "update", "configmaps", "default", "two", false},
			{"system:serviceaccount:default:robot", "list", "pods", "default", "", true},
			{"system:serviceaccount:other:robot", "list", "pods", "default", "", false},
			{"alice", "list", "pods", "default", "", false},
		} {
			if got := allowed(t, c, q.user, q.verb, q.resource, q.namespace, q.name,
				map[bool][]string{true: {"readers"}}[q.user == "bob"]...); got != q.want {
				t.Errorf("%+v: %v", q, got)
			}
		}
		if err := api.RoleBindings("default").Delete(t.Context(), b.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the binding counts no more", func() bool { return apierrors.IsForbidden(list()) })
	}
}

// No user gives away more than he has.
func testEscalation(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	for _, b := range []struct{ name, role, user string }{{"ann-admin", "admin", "ann"}} {
		if _, err := c.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: b.name}, RoleRef: roleRef("ClusterRole", b.role),
			Subjects: subjects(rbacv1.Subject{Kind: "User", Name: b.user}),
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "ann is an admin", func() bool { return allowed(t, c, "ann", "create", "pods", "default", "") })
	ann := clientAs(s, "ann").RbacV1()
	role := func(name string, r []rbacv1.PolicyRule) error {
		_, err := ann.Roles("default").Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: r},
			metav1.CreateOptions{})
		return err
	}
	bind := func(name, target string) error {
		_, err := ann.RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: roleRef("ClusterRole", target),
			Subjects: subjects(rbacv1.Subject{Kind: "User", Name: "tom"}),
		}, metav1.CreateOptions{})
		return err
	}
	if err := role("small", rules("get list", "pods")); err != nil {
		t.Error(err)
	}
	if err := role("large", rules("get list", "nodes")); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), `{APIGroups:[""], Resources:["nodes"], Verbs:["get" "list"]}`) {
		t.Errorf("a role with more than she has: %v", err)
	}
	small, err := ann.Roles("default").Get(t.Context(), "small", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	small.Rules = rules("*", "*")
	if _, err := ann.Roles("default").Update(t.Context(), small, metav1.UpdateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a role that grows beyond what she has: %v", err)
	}
	if err := bind("gives-edit", "edit"); err != nil {
		t.Error(err)
	}
	if err := bind("gives-all", "cluster-admin"); !apierrors.IsForbidden(err) {
		t.Errorf("she binds cluster-admin: %v", err)
	}
	if _, err := ann.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "x"}},
		metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("an admin of a namespace makes a ClusterRole: %v", err)
	}
	// The verbs bind and escalate stand above the check.
	if _, err := c.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "above"},
		Rules: []rbacv1.PolicyRule{
			{Verbs: []string{"bind"}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{"clusterroles"},
				ResourceNames: []string{"cluster-admin"}},
			{Verbs: []string{"escalate"}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{"roles"}},
		}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "ann-above"}, RoleRef: roleRef("ClusterRole", "above"),
		Subjects: subjects(rbacv1.Subject{Kind: "User", Name: "ann"}),
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "she may bind cluster-admin", func() bool { return bind("gives-all", "cluster-admin") == nil })
	eventually(t, "she may write any role", func() bool { return role("large", rules("get", "nodes")) == nil })
}

// A ClusterRole with the label of another becomes a part of it.
func testAggregation(t *testing.T, s *apiserver.Server, c *kubernetes.Clientset) {
	api := c.RbacV1().ClusterRoles()
	has := func(name, resource string) bool {
		r, err := api.Get(t.Context(), name, metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(r.Rules, func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, resource) })
	}
	for _, name := range []string{"view", "edit", "admin"} {
		eventually(t, name+" has what view has", func() bool { return has(name, "configmaps") })
	}
	if _, err := api.Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "see-widgets", Labels: map[string]string{"rbac.authorization.k8s.io/aggregate-to-view": "true"}},
		Rules:      rules("get", "widgets"),
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"view", "edit", "admin"} {
		eventually(t, name+" sees widgets", func() bool { return has(name, "widgets") })
	}
	if err := api.Delete(t.Context(), "see-widgets", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "admin sees no widgets", func() bool { return !has("admin", "widgets") })
	// Whoever may gather anything has everything.
	if _, err := c.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "rolewriter"}, RoleRef: roleRef("ClusterRole", "rolewriter"),
		Subjects: subjects(rbacv1.Subject{Kind: "User", Name: "rolewriter"}),
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := api.Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "rolewriter"}, Rules: []rbacv1.PolicyRule{
		{Verbs: []string{"*"}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{"clusterroles/x"}},
		{Verbs: []string{"create", "get"}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{"clusterroles"}},
	}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w := clientAs(s, "rolewriter").RbacV1().ClusterRoles()
	eventually(t, "the writer may create", func() bool {
		_, err := w.Get(t.Context(), "view", metav1.GetOptions{})
		return err == nil
	})
	_, err := w.Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "all"}, AggregationRule: &rbacv1.AggregationRule{
		ClusterRoleSelectors: []metav1.LabelSelector{{}},
	}}, metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "must have cluster-admin privileges to use the aggregationRule") {
		t.Errorf("anybody may aggregate: %v", err)
	}
}

// kubectl auth can-i and kubectl auth whoami.
func testReviews(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	ann := clientAs(s, "ann", "dev")
	self := func(verb, resource string) bool {
		r, err := ann.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(),
			&authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
				ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "default", Verb: verb, Resource: resource},
			}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return r.Status.Allowed
	}
	if !self("create", "pods") || self("create", "nodes") {
		t.Error("can-i answers otherwise than requests")
	}
	list, err := ann.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(),
		&authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "default"}}, metav1.CreateOptions{})
	if err != nil || list.Status.Incomplete || !slices.ContainsFunc(list.Status.ResourceRules, func(r authorizationv1.ResourceRule) bool {
		return slices.Contains(r.Resources, "pods") && slices.Contains(r.Verbs, "create")
	}) {
		t.Errorf("can-i --list: %+v, %v", list.Status, err)
	}
	who, err := ann.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil || who.Status.UserInfo.Username != "ann" || !slices.Contains(who.Status.UserInfo.Groups, "dev") {
		t.Errorf("whoami: %+v, %v", who, err)
	}
	local, err := admin.AuthorizationV1().LocalSubjectAccessReviews("default").Create(t.Context(), &authorizationv1.LocalSubjectAccessReview{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default"},
		Spec: authorizationv1.SubjectAccessReviewSpec{User: "ann",
			ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "default", Verb: "create", Resource: "pods"}},
	}, metav1.CreateOptions{})
	if err != nil || !local.Status.Allowed {
		t.Errorf("local review: %+v, %v", local, err)
	}
	if _, err := ann.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{},
		metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("ann may ask about others: %v", err)
	}
	_, err = admin.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{}, metav1.CreateOptions{})
	invalidAt(t, err, "spec.resourceAttributes", "spec.user")
	paths := authorizationv1.SubjectAccessReviewSpec{User: "ann", Groups: []string{"system:authenticated"},
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: "get", Path: "/apis/x"}}
	r, err := admin.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{Spec: paths},
		metav1.CreateOptions{})
	if err != nil || !r.Status.Allowed {
		t.Errorf("discovery: %+v, %v", r, err)
	}
	tok, err := admin.AuthenticationV1().TokenReviews().Create(t.Context(),
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: s.Token()}}, metav1.CreateOptions{})
	if err != nil || !tok.Status.Authenticated || tok.Status.User.Username != access.UserNodeToken ||
		!slices.Contains(tok.Status.User.Groups, "system:authenticated") {
		t.Errorf("the join token: %+v, %v", tok.Status, err)
	}
	tok, err = admin.AuthenticationV1().TokenReviews().Create(t.Context(),
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: "x.y.z"}}, metav1.CreateOptions{})
	if err != nil || tok.Status.Authenticated {
		t.Errorf("a wrong token: %+v, %v", tok.Status, err)
	}
}

// spoilDefaults damages the default roles; the next start repairs them.
func spoilDefaults(t *testing.T, c *kubernetes.Clientset) {
	api := c.RbacV1()
	if err := api.ClusterRoleBindings().Delete(t.Context(), "system:discovery", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r, err := api.ClusterRoles().Get(t.Context(), "system:node-proxier", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.Rules = append(r.Rules[1:], rules("get", "mine")...)
	if _, err := api.ClusterRoles().Update(t.Context(), r, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	kept, err := api.ClusterRoles().Get(t.Context(), "system:kube-dns", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	kept.Annotations[rbacv1.AutoUpdateAnnotationKey], kept.Rules = "false", nil
	if _, err := api.ClusterRoles().Update(t.Context(), kept, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func testReconciled(t *testing.T, c *kubernetes.Clientset) {
	api := c.RbacV1()
	if _, err := api.ClusterRoleBindings().Get(t.Context(), "system:discovery", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	r, err := api.ClusterRoles().Get(t.Context(), "system:node-proxier", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, resource := range []string{"endpoints", "mine"} {
		if !slices.ContainsFunc(r.Rules, func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, resource) }) {
			t.Errorf("the repaired role lacks %s: %+v", resource, r.Rules)
		}
	}
	kept, err := api.ClusterRoles().Get(t.Context(), "system:kube-dns", metav1.GetOptions{})
	if err != nil || len(kept.Rules) > 0 {
		t.Errorf("autoupdate=false was not respected: %+v, %v", kept, err)
	}
}
