package apiserver

import (
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
)

// newTestQuotas returns a counter whose lister knows nothing yet.
func newTestQuotas(t *testing.T, client *fake.Clientset) *quotas {
	t.Helper()
	first := corev1.ResourceList{"count/services": resource.MustParse("1")}
	q, _, err := newQuotas(client, informers.NewSharedInformerFactory(client, 0), t.Context().Done(), first, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// A namespace keeps its own quota alone, even one that no watch has shown yet, and an
// administrator keeps a namespace without any.
func TestDefaultQuotaIsNotASecondOne(t *testing.T) {
	own := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "own"}}
	client := fake.NewClientset(own)
	q := newTestQuotas(t, client)
	for namespace, want := range map[string]string{"shop": "own", "bare": defaultQuota} {
		q.limit(t.Context(), namespace)
		list, err := client.CoreV1().ResourceQuotas(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) != 1 || list.Items[0].Name != want {
			t.Errorf("%s: %v, %v; want the quota %s", namespace, list, err, want)
		}
	}
	q.added(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "free", Annotations: map[string]string{defaultQuotaAnnotation: "none"}}})
	q.added(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "new"}})
	if len(q.fresh) != 1 || !q.fresh["new"] {
		t.Errorf("to be limited: %v", q.fresh)
	}
}
