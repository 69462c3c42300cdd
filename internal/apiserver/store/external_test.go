package store

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/etcd"
)

// An etcd without a quota has the shares of etcd's default.
func TestSharesWithoutQuota(t *testing.T) {
	t.Parallel()
	e := etcd.Start(t, func(c *embed.Config) { c.QuotaBackendBytes = -1 })
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{etcd.URL(e)}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	of := externalSource{client, []string{"http://127.0.0.1:1", etcd.URL(e)}, slog.New(slog.DiscardHandler)} // the first one is down
	if got := of.quota(t.Context()); got != externalQuota {
		t.Errorf("the quota is %d, want %d", got, externalQuota)
	}
}

// In an external etcd, too, Events and namespaces keep to their shares of its quota, also for what was there before.
func TestSharesOfAnExternalEtcd(t *testing.T) {
	t.Parallel()
	const quota, size = 16 << 20, 100 << 10
	e := etcd.Start(t, func(c *embed.Config) { c.QuotaBackendBytes = quota })
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{etcd.URL(e)}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	put := func(key string, size int) {
		t.Helper()
		if _, err := client.Put(t.Context(), key, strings.Repeat("x", size)); err != nil {
			t.Fatal(err)
		}
	}
	put("/registry/configmaps/shop/before", 1<<20)
	put("/registry/events/bank/other", 10)
	for i := range 8 {
		put(fmt.Sprintf("/registry/events/shop/%02d", i), size)
	}
	s, err := Reach(t.Context(), External{Servers: []string{etcd.URL(e)}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	validate := func(name string) error {
		object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop"},
			Data: map[string]string{"x": strings.Repeat("x", 1<<20)}}
		return s.Shares(func(string) bool { return false }).Validate(t.Context(), admission.NewAttributesRecord(object, nil,
			corev1.SchemeGroupVersion.WithKind("ConfigMap"), "shop", name, corev1.SchemeGroupVersion.WithResource("configmaps"), "",
			admission.Create, &metav1.CreateOptions{}, false, &user.DefaultInfo{Name: "ann"}), nil)
	}
	if err := validate("first"); err != nil {
		t.Errorf("within the share: %v", err)
	}
	for i := 8; i < 16; i++ {
		put(fmt.Sprintf("/registry/events/shop/%02d", i), size)
	}
	testbed.Until(t, "the removal of the oldest Events", func() error {
		r, err := client.Get(t.Context(), "/registry/events/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			return err
		}
		var left []string
		for _, kv := range r.Kvs {
			left = append(left, strings.TrimPrefix(string(kv.Key), "/registry/events/"))
		}
		if len(left) > quota/eventShare/size+2 || left[0] != "bank/other" || left[len(left)-1] != "shop/15" {
			return fmt.Errorf("left are %v", left)
		}
		return nil
	})
	put("/registry/configmaps/shop/more", 1<<20)
	testbed.Until(t, "the end of the namespace's share", func() error {
		if err := validate("more"); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), fmt.Sprint(quota/namespaceShare)) {
			return fmt.Errorf("admitted: %w", err)
		}
		return nil
	})
}
