package apiserver_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

func withExternalIPs(name string, ips ...string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{ExternalIPs: ips, Ports: []corev1.ServicePort{{Port: 80}}}}
}

// Whoever may write Services may not add external IPs to one, unless a role or the
// flag allows it; what a Service has may stay, and go.
func TestExternalIPsNeedARight(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	bindEdit(t, admin, "ann")
	services := clientAs(s, "ann").CoreV1().Services("default")
	forbidden := func(what string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "spec.externalIPs") ||
			!strings.Contains(err.Error(), "192.0.2.9") || !strings.Contains(err.Error(), "services/externalips") {
			t.Errorf("%s: %v, want 403 that names the field, the address and the right", what, err)
		}
	}
	_, err := services.Create(t.Context(), withExternalIPs("web", "192.0.2.9"), metav1.CreateOptions{})
	forbidden("create", err)
	if _, err := services.Create(t.Context(), withExternalIPs("plain"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err = services.Patch(t.Context(), "plain", types.MergePatchType,
		[]byte(`{"spec":{"externalIPs":["192.0.2.9"]}}`), metav1.PatchOptions{})
	forbidden("patch", err)
	_, err = services.Patch(t.Context(), "new", types.ApplyPatchType, []byte(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"new"},
		"spec":{"externalIPs":["192.0.2.9"],"ports":[{"port":80}]}}`), metav1.PatchOptions{FieldManager: "test"})
	forbidden("apply", err)

	// An administrator's stay under the user's changes, one by one removed, not added.
	own, err := admin.CoreV1().Services("default").Create(t.Context(),
		withExternalIPs("web", "192.0.2.1", "192.0.2.2"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, ips := range []string{`"192.0.2.1","192.0.2.2"`, `"192.0.2.2"`} {
		patch := fmt.Sprintf(`{"metadata":{"labels":{"step":"s%d"}},"spec":{"externalIPs":[%s]}}`, i, ips)
		if _, err := services.Patch(t.Context(), own.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Errorf("externalIPs [%s]: %v", ips, err)
		}
	}
	_, err = services.Patch(t.Context(), own.Name, types.MergePatchType,
		[]byte(`{"spec":{"externalIPs":["192.0.2.2","192.0.2.9"]}}`), metav1.PatchOptions{})
	forbidden("add", err)

	// The right, in one namespace.
	if _, err := admin.RbacV1().Roles("default").Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "external-ips"},
		Rules: rules("use", "services/externalips")}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "ann-external-ips"}, RoleRef: roleRef("Role", "external-ips"),
		Subjects: subjects(rbacv1.Subject{Kind: "User", APIGroup: rbacv1.GroupName, Name: "ann"})}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the right counts", func() bool {
		_, err := services.Create(t.Context(), withExternalIPs("allowed", "192.0.2.9"), metav1.CreateOptions{})
		return err == nil
	})
}

// bindEdit gives a user the role edit everywhere.
func bindEdit(t *testing.T, admin *kubernetes.Clientset, name string) {
	t.Helper()
	if _, err := admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name + "-edits"}, RoleRef: roleRef("ClusterRole", "edit"),
		Subjects: subjects(rbacv1.Subject{Kind: "User", APIGroup: rbacv1.GroupName, Name: name})}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, name+" may edit", func() bool { return allowed(t, admin, name, "create", "services", "default", "") })
}

func TestAllowServiceExternalIPs(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t, func(o *apiserver.Options) { o.AllowServiceExternalIPs = true })
	bindEdit(t, kubernetes.NewForConfigOrDie(s.LoopbackConfig()), "ann")
	services := clientAs(s, "ann").CoreV1().Services("default")
	if _, err := services.Create(t.Context(), withExternalIPs("web", "192.0.2.9"), metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
}
