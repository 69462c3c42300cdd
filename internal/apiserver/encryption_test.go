package apiserver_test

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/store"
)

// encryptionOf is an EncryptionConfiguration with the providers of a kind, one a line.
func encryptionOf(t *testing.T, kind string, providers ...string) string {
	t.Helper()
	return file(t, "encryption.yaml", "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: ["+kind+
		"]\n  providers:\n  - "+strings.Join(providers, "\n  - ")+"\n")
}

// A server that cannot read encrypted objects ends at once with the kind and the flag, where it would wait for its caches
// forever.
func TestStartWithoutEncryption(t *testing.T) {
	t.Parallel()
	const (
		one   = "secretbox: {keys: [{name: one, secret: MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=}]}"
		other = "secretbox: {keys: [{name: one, secret: ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=}]}"
		two   = "secretbox: {keys: [{name: two, secret: MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=}]}"
		aes   = "aescbc: {keys: [{name: one, secret: MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=}]}"
		plain = "identity: {}"
	)
	dir := t.TempDir()
	with := func(config string) func(*apiserver.Options) {
		return func(o *apiserver.Options) { o.DataDir, o.Auth.EncryptionConfig = dir, config }
	}
	s, stop := apiservertest.StartStoppable(t, with(encryptionOf(t, "secrets", one)))
	client := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	if _, err := client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "locked"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	stop()
	if kinds, err := store.EncryptedKinds(dir, store.DefaultPrefix); err != nil || !slices.Equal(kinds, []string{"secrets"}) {
		t.Errorf("encrypted in the directory: %v, %v", kinds, err)
	}
	for what, c := range map[string]struct {
		config string
		want   []string
	}{
		"none":        {"", []string{"there are encrypted secrets", "start the server with --encryption-provider-config", `key "one"`}},
		"another key": {encryptionOf(t, "secrets", two, plain), []string{"cannot decrypt the secrets", `provider secretbox, key "one"`}},
		"another key of that name": {encryptionOf(t, "secrets", other),
			[]string{"cannot decrypt the secrets", "--encryption-provider-config /"}},
		"another provider":       {encryptionOf(t, "secrets", aes), []string{"cannot decrypt the secrets", `provider secretbox, key "one"`}},
		"another kind":           {encryptionOf(t, "events", one), []string{"cannot decrypt the secrets"}},
		"plain text not allowed": {encryptionOf(t, "secrets, configmaps", one), []string{"cannot read the configmaps", "identity: {}"}},
	} {
		o := apiserver.Options{UnsafeNoFsync: true, Log: slog.New(slog.DiscardHandler)}
		with(c.config)(&o)
		ended, err := apiserver.New(o)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		err = ended.Run(ctx)
		if ctx.Err() != nil {
			t.Errorf("%s: it does not end by itself", what)
		}
		cancel()
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v; want %q", what, err, want)
			}
		}
	}
	_, stop = apiservertest.StartStoppable(t, with(encryptionOf(t, "secrets", two, one)))
	stop()
}
