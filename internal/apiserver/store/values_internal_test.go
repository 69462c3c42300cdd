package store

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestEncryptionOf(t *testing.T) {
	for value, want := range map[string]Encryption{
		"":                                   {},
		"k8s\x00proto":                       {},
		`{"a":"k8s:enc:aescbc:v1:one:x"}`:    {},
		"k8s:enc:secretbox:v1:one:\x01:\x02": {"secretbox", "one"},
		"k8s:enc:kms:v2:vault:x":             {"kms", "vault"},
	} {
		if got := EncryptionOf([]byte(value)); got != want {
			t.Errorf("%q: %v", value, got)
		}
	}
}

// Values sees all objects of each kind, also the last of many.
func TestValues(t *testing.T) {
	ctx := t.Context()
	s, err := Start(ctx, t.TempDir(), Options{Quota: anyQuota, UnsafeNoFsync: true, Log: slog.New(slog.DiscardHandler)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	c, err := s.client(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const many = 800
	for begin := 0; begin < many; begin += 100 {
		var puts []clientv3.Op
		for i := range 100 {
			puts = append(puts, clientv3.OpPut(fmt.Sprintf("/registry/configmaps/default/%04d", begin+i), "x"))
		}
		if _, err := c.Txn(ctx).Then(puts...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	for _, key := range []string{
		"/fairlead/x", "/registry/apps/deployments/a/b", "/registry/example.com/widgets/a/b", "/registry/example.com/wheels/b",
		"/registry/secrets/a/b",
	} {
		if _, err := c.Put(ctx, key, "k8s:enc:secretbox:v1:one:x"); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]int{}
	err = s.Values(ctx, DefaultPrefix, func(kind schema.GroupResource, _ string, _ []byte) error {
		seen[kind.String()]++
		return nil
	})
	if n := seen["configmaps"]; err != nil || n != many {
		t.Errorf("of %d ConfigMaps %d are seen, %v", many, n, err)
	}
	delete(seen, "configmaps")
	if want := "map[deployments.apps:1 secrets:1 wheels.example.com:1 widgets.example.com:1]"; fmt.Sprint(seen) != want {
		t.Errorf("%v, want %s", seen, want)
	}
	enough := errors.New("enough")
	if err := s.Values(ctx, DefaultPrefix, func(schema.GroupResource, string, []byte) error { return enough }); !errors.Is(err, enough) {
		t.Error(err)
	}
}
