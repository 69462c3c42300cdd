package apiserver_test

import (
	"context"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/barrier"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// lbClient returns a client of fairlead.dev, which is served.
func lbClient(t *testing.T, s *apiserver.Server) *v1.Client {
	t.Helper()
	client, err := v1.NewClient(s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	definitions, err := v1.Definitions()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range definitions {
		_, err := extensions.NewForConfigOrDie(s.LoopbackConfig()).ApiextensionsV1().CustomResourceDefinitions().Create(t.Context(), d,
			metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the kinds are served", func() bool {
		_, err := client.Pools.List(t.Context(), metav1.ListOptions{})
		_, err2 := client.Speakers.List(t.Context(), metav1.ListOptions{})
		return err == nil && err2 == nil
	})
	return client
}

// A node's speaker reads what it announces by, and writes its own Speaker alone.
func TestNodeAsSpeaker(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	adminLB := lbClient(t, s)
	if _, err := admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "mine"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fairlead-lb", "fairlead-bgp-router", "other"} {
		meta := metav1.ObjectMeta{Namespace: "kube-system", Name: name}
		if _, err := admin.CoreV1().Secrets("kube-system").Create(t.Context(), &corev1.Secret{ObjectMeta: meta},
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"fairlead-lb-voters", "other"} {
		meta := metav1.ObjectMeta{Namespace: "kube-system", Name: name}
		if _, err := admin.CoreV1().ConfigMaps("kube-system").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: meta},
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := adminLB.Speakers.Create(t.Context(), &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: "theirs"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	config := joined(t, s, "mine", t.TempDir()).Config()
	c := kubernetes.NewForConfigOrDie(config)
	lb, err := v1.NewClient(config)
	if err != nil {
		t.Fatal(err)
	}
	get, list, create := metav1.GetOptions{}, metav1.ListOptions{}, metav1.CreateOptions{}
	secret := func(name string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := c.CoreV1().Secrets("kube-system").Get(ctx, name, get)
			return err
		}
	}
	configMaps := func(name string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := c.CoreV1().ConfigMaps("kube-system").List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
			return err
		}
	}
	speaker := func(name string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := lb.Speakers.Create(ctx, &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}}, create)
			return err
		}
	}
	status := func(name string) func(context.Context) error {
		return func(ctx context.Context) error {
			o, err := adminLB.Speakers.Get(ctx, name, get)
			if err != nil {
				return err
			}
			o.Status.Eligible = true
			_, err = lb.Speakers.UpdateStatus(ctx, o, metav1.UpdateOptions{})
			return err
		}
	}
	lease := func(name string) func(context.Context) error {
		return func(ctx context.Context) error {
			l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}
			_, err := c.CoordinationV1().Leases("kube-system").Create(ctx, l, create)
			return err
		}
	}
	marked := func(ctx context.Context) error {
		_, err := c.CoordinationV1().Leases("kube-system").Patch(ctx, "fairlead-lb-witness", types.MergePatchType,
			[]byte(`{"metadata":{"labels":{"fairlead.dev/apiserver":"true"}}}`), metav1.PatchOptions{})
		return err
	}
	for _, q := range []struct {
		what    string
		allowed bool
		do      func(context.Context) error
	}{
		{"read pools", true, func(ctx context.Context) error { _, err := lb.Pools.List(ctx, list); return err }},
		{"read peers", true, func(ctx context.Context) error { _, err := lb.Peers.List(ctx, list); return err }},
		{"read speakers", true, func(ctx context.Context) error { _, err := lb.Speakers.List(ctx, list); return err }},
		{"read claims", true, func(ctx context.Context) error { _, err := c.NetworkingV1().IPAddresses().List(ctx, list); return err }},
		{"read the key", true, secret("fairlead-lb")},
		{"read a password of BGP", true, secret("fairlead-bgp-router")},
		{"read another Secret", false, secret("other")},
		{"list all Secrets", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Secrets("kube-system").List(ctx, list)
			return err
		}},
		{"follow the voters", true, configMaps("fairlead-lb-voters")},
		{"follow another ConfigMap", false, configMaps("other")},
		{"write the voters", false, func(ctx context.Context) error {
			_, err := c.CoreV1().ConfigMaps("kube-system").Update(ctx,
				&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "fairlead-lb-voters"}}, metav1.UpdateOptions{})
			return err
		}},
		{"make its Speaker", true, speaker("mine")},
		{"write its status", true, status("mine")},
		{"make another one's Speaker", false, speaker("another")},
		{"write another one's status", false, status("theirs")},
		{"delete another one's Speaker", false, func(ctx context.Context) error {
			return lb.Speakers.Delete(ctx, "theirs", metav1.DeleteOptions{})
		}},
		{"delete all Speakers", false, func(ctx context.Context) error {
			return lb.Speakers.DeleteCollection(ctx, metav1.DeleteOptions{}, list)
		}},
		{"delete its Speaker", true, func(ctx context.Context) error { return lb.Speakers.Delete(ctx, "mine", metav1.DeleteOptions{}) }},
		{"make a pool", false, func(ctx context.Context) error {
			_, err := lb.Pools.Create(ctx, &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "p"},
				Spec: v1.IPAddressPoolSpec{Addresses: []string{"192.0.2.0/24"}}}, create)
			return err
		}},
		{"claim an address", false, func(ctx context.Context) error {
			o := &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: "192.0.2.1"}}
			_, err := c.NetworkingV1().IPAddresses().Create(ctx, o, create)
			return err
		}},
		{"take the witness", true, lease("fairlead-lb-witness")},
		{"pass the witness for an API server", false, marked},
		{"make a Lease of its name beside those of servers", false, lease("mine")},
		{"tell the nodes what is awaited", false, lease(svc.ProgrammedLease)},
		{"read what is awaited", true, func(ctx context.Context) error {
			_, err := c.CoordinationV1().Leases(barrier.Namespace).List(ctx,
				metav1.ListOptions{FieldSelector: "metadata.name=" + svc.ProgrammedLease})
			return err
		}},
		{"read the Leases of servers", false, func(ctx context.Context) error {
			_, err := c.CoordinationV1().Leases(barrier.Namespace).List(ctx, list)
			return err
		}},
		{"make a server's Lease", false, lease("fairlead-apiserver-192-0-2-1-6443")},
		{"take the controllers' Lease", false, lease("fairlead-controllers")},
	} {
		err := q.do(t.Context())
		if q.allowed && err != nil || !q.allowed && !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v, want it allowed: %t", q.what, err, q.allowed)
		}
	}
}

// Users read pools; who may write in a namespace may not make any.
func TestUsersAndPools(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	admin := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	for _, role := range []string{"admin", "edit", "view"} {
		rules, err := admin.RbacV1().ClusterRoles().Get(t.Context(), role, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]bool{}
		for _, r := range rules.Rules {
			for _, g := range r.APIGroups {
				for _, resource := range r.Resources {
					for _, v := range r.Verbs {
						if g == "fairlead.dev" {
							got[v+" "+resource] = true
						}
					}
				}
			}
		}
		if !got["list ipaddresspools"] || !got["get speakers"] || len(got) != 9 {
			t.Errorf("%s may %v", role, got)
		}
	}
}
