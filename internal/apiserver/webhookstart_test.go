package apiserver_test

import (
	"context"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// A server with a webhook for everything that cannot be reached starts, keeps its own
// Lease, and can be repaired.
func TestStartWithUnreachableWebhook(t *testing.T) {
	t.Parallel()
	dir, r := t.TempDir(), newReviewer(t)
	listen := func(o *apiserver.Options) { o.DataDir = dir }
	s, stop := apiservertest.StartStoppable(t, listen)
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), 4*waitTimeout)
	defer cancel()
	h := hookTest{api{t, ctx, s.LoopbackConfig(), kubernetes.NewForConfigOrDie(s.LoopbackConfig()), "default"}, r}
	r.Server.Close()
	configs := h.client.AdmissionregistrationV1()
	mutating := h.mutator("a", "allow")
	mutating.NamespaceSelector, mutating.Rules = nil, anything(admissionv1.AllScopes)
	_, err := configs.MutatingWebhookConfigurations().Create(ctx, &admissionv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "all"}, Webhooks: []admissionv1.MutatingWebhook{mutating}}, metav1.CreateOptions{})
	h.must(err)
	h.rejected("failed calling webhook")
	stop()

	s = apiservertest.StartServer(t, listen) // fails unless the server becomes ready
	h.cfg = s.LoopbackConfig()
	h.client = kubernetes.NewForConfigOrDie(rest.CopyConfig(h.cfg))
	if _, err := h.service("web"); err == nil || !strings.Contains(err.Error(), "failed calling webhook") {
		t.Errorf("the first request after the start: %v", err)
	}
	h.must(h.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Delete(ctx, "all", metav1.DeleteOptions{}))
	eventually(t, "Services can be made again", func() bool {
		_, err := h.service("web")
		return err == nil
	})
}

// Roles of users do not reach what decides about everybody.
func TestAdmissionIsForAdministrators(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	c := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	for _, role := range []string{"view", "edit", "admin"} {
		_, err := c.RbacV1().ClusterRoleBindings().Create(t.Context(), clusterBinding(role, role), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, role := range []string{"view", "edit", "admin"} {
		user := clientAs(s, role)
		eventually(t, role+" reads Services", func() bool {
			_, err := user.CoreV1().Services("default").List(t.Context(), metav1.ListOptions{})
			return err == nil
		})
		_, err := user.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(t.Context(),
			&admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{})
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s creates a webhook: %v", role, err)
		}
		_, err = user.AdmissionregistrationV1().MutatingAdmissionPolicies().List(t.Context(), metav1.ListOptions{})
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s reads policies: %v", role, err)
		}
	}
}

func clusterBinding(role, user string) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "test-" + role + "-" + user},
		RoleRef: roleRef("ClusterRole", role), Subjects: subjects(rbacv1.Subject{Kind: "User", Name: user})}
}

func dynamicOf(cfg *rest.Config) dynamic.Interface { return dynamic.NewForConfigOrDie(cfg) }
