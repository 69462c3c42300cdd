package apiserver_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// An object that is larger than etcd takes is answered with 413, its size and the limit, whatever makes it so large. Without
// a server-side apply it is stored without its managed fields where these are the reason.
func TestLargerThanEtcdTakes(t *testing.T) {
	t.Parallel()
	client := kubernetes.NewForConfigOrDie(apiservertest.Start(t)).CoreV1().ConfigMaps("default")
	ctx := t.Context()
	// Long keys, since the cost of an apply is by their number.
	configMap := func(name string, keys, value int) *corev1.ConfigMap {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{}}
		m.APIVersion, m.Kind = "v1", "ConfigMap"
		for i := range keys {
			m.Data[fmt.Sprintf("key-%0200d", i)] = strings.Repeat("v", value)
		}
		return m
	}
	apply := func(m *corev1.ConfigMap) error {
		text := []string{"apiVersion: v1", "kind: ConfigMap", "metadata: {name: " + m.Name + "}", "data:"}
		for k, v := range m.Data {
			text = append(text, fmt.Sprintf("  %s: %q", k, v))
		}
		_, err := client.Patch(ctx, m.Name, types.ApplyYAMLPatchType, []byte(strings.Join(text, "\n")),
			metav1.PatchOptions{FieldManager: "tester"})
		return err
	}
	large := func(what string, err error, want ...string) {
		t.Helper()
		if !apierrors.IsRequestEntityTooLargeError(err) {
			t.Errorf("%s: %.300v, want 413", what, err)
			return
		}
		for _, w := range append(want, "1572864 bytes", "make it smaller") {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %.300v; want %q", what, err, w)
			}
		}
	}
	// 5,300 keys and their managed fields are more than the 2 MiB that the client of etcd sends, 4,400 are fewer, and more
	// than etcd takes.
	for _, keys := range []int{5_300, 4_400} {
		large(fmt.Sprintf("an apply of %d keys", keys), apply(configMap("many", keys, 6)), "of them in metadata.managedFields")
	}
	if err := apply(configMap("many", 10, 6)); err != nil {
		t.Fatal(err)
	}
	large("an apply that lets it grow", apply(configMap("many", 4_400, 6)), "of them in metadata.managedFields")
	if _, err := client.Create(ctx, configMap("created", 4_400, 6), metav1.CreateOptions{}); err != nil {
		t.Errorf("created without managed fields: %v", err)
	}
	// Only the values count for the API's own limit of a ConfigMap.
	_, err := client.Create(ctx, configMap("keys", 8_000, 1), metav1.CreateOptions{})
	large("a create", err)
	m := configMap("many", 8_000, 1)
	_, err = client.Update(ctx, m, metav1.UpdateOptions{})
	large("an update", err)
}
