package cli

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
)

// A full store is named by 'fairlead status' with what to do, and no longer when
// there is room again.
func TestStatusShowsAFullStore(t *testing.T) {
	s := apiservertest.StartServer(t, func(o *apiserver.Options) { o.EtcdQuota = store.MinQuota })
	status := func() string {
		t.Helper()
		code, out, stderr := call(t, "status", "--kubeconfig", s.Kubeconfig())
		if code != 0 {
			t.Fatalf("status ended with %d: %s%s", code, out, stderr)
		}
		return out
	}
	if out := status(); strings.Contains(out, "etcd:") {
		t.Errorf("with an empty store:\n%s", out)
	}
	cfg := s.LoopbackConfig()
	cfg.Impersonate.UserName, cfg.Impersonate.Groups = "ann", []string{"system:masters"}
	maps := kubernetes.NewForConfigOrDie(cfg).CoreV1().ConfigMaps("default")
	random := rand.NewChaCha8([32]byte{})
	made, err := 0, error(nil)
	for ; err == nil && made < 2*store.MinQuota>>20; made++ {
		data := make([]byte, 700<<10)
		random.Read(data)
		_, err = maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cm-%d", made)},
			BinaryData: map[string][]byte{"data": data}}, metav1.CreateOptions{})
	}
	if err == nil {
		t.Fatalf("the store is not full after %d objects", made)
	}
	out := status()
	if !strings.Contains(out, "etcd: the store is full") || !strings.Contains(out, "delete objects") {
		t.Errorf("with a full store (%v):\n%s", err, out)
	}
	if err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if lifecycle.UntilTrue(ctx, func() bool { out = status(); return !strings.Contains(out, "etcd:") }) != nil {
		t.Errorf("two minutes after the deletion:\n%s", out)
	}
}
