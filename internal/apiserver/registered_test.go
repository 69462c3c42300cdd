package apiserver_test

import (
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/svc"
)

// registeredPod is the Pod of a program on a node that no user of the role edit may have.
func registeredPod(t *testing.T, name, namespace, node string) *corev1.Pod {
	t.Helper()
	p, err := (&registration.Spec{Name: name, Namespace: namespace, Node: node, Ports: []string{"6443"}}).Pod()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRegisteredPods(t *testing.T) {
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	t.Run("tenant", func(t *testing.T) { testTenantRegisters(t, s, admin) })
	t.Run("node", func(t *testing.T) { testNodeRegisters(t, s, admin) })
	t.Run("checks", func(t *testing.T) { testChecks(t, s, admin) })
}

// A user who may write EndpointSlices cannot have nodes check addresses by one, which would scan what
// they reach: neither in a slice of his own nor in an administrator's, nor by Endpoints. No user can
// have the metadata of a cloud checked, or a command run.
func testChecks(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	slice := func(name, check, address string) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: name, Annotations: map[string]string{svc.CheckAnnotation: check}},
			AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{address}}},
		}
	}
	grant := func(name string, rule rbacv1.PolicyRule) {
		if _, err := admin.RbacV1().Roles("default").Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: name},
			Rules: []rbacv1.PolicyRule{rule}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := admin.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: roleRef("Role", name),
			Subjects: subjects(rbacv1.Subject{Kind: "User", APIGroup: rbacv1.GroupName, Name: "eve"})}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	create := metav1.CreateOptions{}
	grant("slices", rbacv1.PolicyRule{Verbs: []string{"*"}, APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}})
	eve, own := clientAs(s, "eve").DiscoveryV1().EndpointSlices("default"), admin.DiscoveryV1().EndpointSlices("default")
	eventually(t, "eve may write slices", func() bool {
		_, err := eve.Get(t.Context(), "none", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	forbidden := func(what string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "endpointslices.discovery.k8s.io/checks") {
			t.Errorf("%s: %v, want 403 that names the right", what, err)
		}
	}
	_, err := eve.Create(t.Context(), slice("scan", "tcp://:22", "10.0.0.1"), create)
	forbidden("a check of her own", err)
	for name, wrong := range map[string]*discoveryv1.EndpointSlice{
		"metadata": slice("a", "tcp://:80", "100.100.100.200"), "link-local": slice("a", "tcp://:80", "169.254.169.254"),
		"loopback": slice("a", "tcp://:80", "127.0.0.1"), "exec": slice("a", "exec:id", "192.0.2.1"),
	} {
		if _, err := own.Create(t.Context(), wrong, create); !apierrors.IsInvalid(err) {
			t.Errorf("an administrator's check of %s: %v, want it invalid", name, err)
		}
	}
	made, err := own.Create(t.Context(), slice("db", "tcp://:5432", "192.0.2.1"), create)
	if err != nil {
		t.Fatal(err)
	}
	for what, patch := range map[string]string{
		"another address": `{"endpoints":[{"addresses":["192.0.2.2"]}]}`,
		"another port":    `{"metadata":{"annotations":{"fairlead.dev/check":"tcp://:22"}}}`,
		"more often":      `{"metadata":{"annotations":{"fairlead.dev/check-interval":"1s"}}}`,
	} {
		_, err := eve.Patch(t.Context(), made.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		forbidden(what, err)
	}
	// What it is checked for may stay, as of the controller that writes what nodes find.
	ready := []byte(`{"endpoints":[{"addresses":["192.0.2.1"],"conditions":{"ready":false}}]}`)
	if _, err := eve.Patch(t.Context(), made.Name, types.MergePatchType, ready, metav1.PatchOptions{}); err != nil {
		t.Errorf("its condition: %v", err)
	}
	grant("checks", rbacv1.PolicyRule{Verbs: []string{"use"}, APIGroups: []string{"discovery.k8s.io"},
		Resources: []string{"endpointslices/checks"}})
	eventually(t, "the right counts", func() bool {
		_, err := eve.Create(t.Context(), slice("allowed", "tcp://:22", "192.0.2.1"), create)
		return err == nil
	})
}

// A tenant cannot make the API server, an agent or anything else at an address of a node a
// backend of his Service: neither with a Pod of his own nor with one of an administrator.
func testTenantRegisters(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	bindEdit(t, admin, "ann")
	ann := clientAs(s, "ann").CoreV1().Pods("default")
	create := metav1.CreateOptions{}
	if _, err := ann.Create(t.Context(), registeredPod(t, "taken", "default", "n1"), create); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), "host namespaces (hostNetwork=true)") {
		t.Errorf("a registration: %v, want it forbidden by Pod Security", err)
	}
	p := registeredPod(t, "taken", "default", "n1")
	p.Spec.HostNetwork, p.Spec.Containers[0].Ports = false, nil
	if _, err := ann.Create(t.Context(), p, create); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.hostNetwork") {
		t.Errorf("a registration without hostNetwork: %v, want it invalid", err)
	}
	own, err := ann.Create(t.Context(), podNamed("own"), create)
	if err != nil {
		t.Fatal(err)
	}
	own.Spec.Containers[0].Image = svc.RegisteredImage
	if _, err := ann.Update(t.Context(), own, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("a Pod that becomes a registration: %v, want it invalid", err)
	}

	theirs, err := admin.CoreV1().Pods("default").Create(t.Context(), registeredPod(t, "db", "default", "n1"), create)
	if err != nil {
		t.Fatal(err)
	}
	for _, patch := range []string{
		`{"metadata":{"annotations":{"fairlead.dev/address":"192.0.2.1"}}}`, `{"metadata":{"annotations":{"fairlead.dev/unit":"x.service"}}}`,
		`{"spec":{"containers":[{"name":"program","image":"host"}]}}`,
	} {
		_, err := ann.Patch(t.Context(), theirs.Name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{})
		if !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v, want it invalid", patch, err)
		}
	}
	status := []byte(`{"status":{"podIP":"192.0.2.1"}}`)
	_, err = ann.Patch(t.Context(), theirs.Name, types.MergePatchType, status, metav1.PatchOptions{}, "status")
	if !apierrors.IsForbidden(err) {
		t.Errorf("another address: %v, want it forbidden", err)
	}
}

// A node registers its own programs where it was given the right to, and nothing else;
// it gets no Secret and no token by that.
func testNodeRegisters(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	for _, n := range []string{"vm1", "vm2"} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n}}
		if _, err := admin.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	namespaceWith(t, admin, "shop")
	for _, name := range []string{"default", "robot"} {
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := admin.CoreV1().ServiceAccounts("shop").Create(t.Context(), account, metav1.CreateOptions{}); err != nil &&
			!apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	if _, err := admin.CoreV1().Secrets("shop").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "password"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	node := kubernetes.NewForConfigOrDie(joined(t, s, "vm1", t.TempDir()).Config()).CoreV1()
	fromFile := func(name, on string) *corev1.Pod {
		p := registeredPod(t, name, "shop", on)
		p.Annotations[svc.ServicesFileAnnotation] = "/etc/fairlead/services.d/a.yaml"
		return p
	}
	create := metav1.CreateOptions{}
	if _, err := node.Pods("shop").Create(t.Context(), fromFile("db", "vm1"), create); !apierrors.IsForbidden(err) {
		t.Errorf("without the right: %v, want it forbidden", err)
	}
	if _, err := admin.RbacV1().RoleBindings("shop").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "nodes-register"}, RoleRef: roleRef("ClusterRole", "system:node-registrar"),
		Subjects: subjects(rbacv1.Subject{Kind: "Group", APIGroup: rbacv1.GroupName, Name: "system:nodes"}),
	}, create); err != nil {
		t.Fatal(err)
	}
	own := fromFile("db", "vm1")
	own.Spec.ServiceAccountName, own.Spec.ImagePullSecrets = "robot", []corev1.LocalObjectReference{{Name: "password"}}
	eventually(t, "the node may register", func() bool {
		_, err := node.Pods("shop").Create(t.Context(), own, create)
		return err == nil
	})
	if mirror, err := mirrorOf(t.Context(), admin, "vm1"); err != nil {
		t.Error(err)
	} else {
		mirror.Labels = map[string]string{"app": "x"}
		if _, err := node.Pods("shop").Create(t.Context(), mirror, create); err != nil {
			t.Errorf("a mirror with labels where the node may register: %v", err)
		}
	}
	stored, err := node.Pods("shop").Get(t.Context(), own.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := node.Secrets("shop").Get(t.Context(), "password", metav1.GetOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a Secret by a registration: %v, want it forbidden", err)
	}
	ref := &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: stored.Name, UID: stored.UID}
	if _, err := node.ServiceAccounts("shop").CreateToken(t.Context(), "robot",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: ref}}, create); !apierrors.IsForbidden(err) {
		t.Errorf("a token by a registration: %v, want it forbidden", err)
	}
	plain, elseNamespace := podNamed("b"), fromFile("c", "vm1")
	plain.Spec.NodeName, elseNamespace.Namespace = "vm1", "default"
	for what, p := range map[string]*corev1.Pod{
		"on another node": fromFile("d", "vm2"), "a Pod that runs": plain,
		"in another namespace": elseNamespace, "of a user": registeredPod(t, "e", "shop", "vm1"),
	} {
		namespace := "shop"
		if p.Namespace != "" {
			namespace = p.Namespace
		}
		if _, err := node.Pods(namespace).Create(t.Context(), p, create); !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want it forbidden", what, err)
		}
	}
	if err := node.Pods("shop").Delete(t.Context(), stored.Name, metav1.DeleteOptions{}); err != nil {
		t.Errorf("the node cannot delete its own registration: %v", err)
	}
}
