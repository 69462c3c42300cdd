package admit

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/registry/resourcequota"
	"github.com/fairlead/fairlead/internal/svc"
)

// newTestQuotas returns a counter whose lister knows nothing yet.
func newTestQuotas(t *testing.T, client *fake.Clientset) *Quotas {
	t.Helper()
	first := corev1.ResourceList{"count/services": resource.MustParse("1")}
	q, _, err := NewQuotas(client, informers.NewSharedInformerFactory(client, 0), t.Context().Done(), first, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// A namespace keeps its own quota alone, even one that no watch has shown yet, and an
// administrator keeps a namespace without any.
func TestDefaultQuotaIsNotASecondOne(t *testing.T) {
	t.Parallel()
	own := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "own"}}
	client := fake.NewClientset(own)
	q := newTestQuotas(t, client)
	for namespace, want := range map[string]string{"shop": "own", "bare": defaultQuota} {
		if err := q.limit(t.Context(), namespace); err != nil {
			t.Fatal(err)
		}
		list, err := client.CoreV1().ResourceQuotas(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) != 1 || list.Items[0].Name != want {
			t.Errorf("%s: %v, %v; want the quota %s", namespace, list, err, want)
		}
	}
	q.added(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "free", Annotations: map[string]string{svc.DefaultQuotaAnnotation: "none"}}})
	q.added(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "new"}})
	if got, _ := q.queue.Get(); got != (quotaWork{"new", true}) {
		t.Errorf("to be limited first: %v", got)
	}
}

// A kind that cannot be listed keeps its last count, is not asked for at each count, and
// does not keep the others from being counted; nor are bytes counted at each deletion.
func TestQuotaWithABrokenKind(t *testing.T) {
	t.Parallel()
	var broken atomic.Bool
	var lists, fails atomic.Int32
	answer := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch path := r.URL.Path; {
		case strings.HasSuffix(path, "/customresourcedefinitions"):
			fmt.Fprint(w, `{"items":[{"metadata":{"name":"as.x.example"}},{"metadata":{"name":"bs.y.example"}}]}`)
		case path == "/apis/x.example" || path == "/apis/y.example":
			fmt.Fprint(w, `{"preferredVersion":{"version":"v1"}}`)
		case path == "/apis/x.example/v1/namespaces/ns/as" && broken.Load():
			fails.Add(1)
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"InternalError","code":500}`)
		case strings.HasPrefix(path, "/apis/x.example") || strings.HasPrefix(path, "/apis/y.example"):
			lists.Add(1)
			fmt.Fprint(w, `{"items":["`+strings.Repeat("x", 98)+`"]}`)
		default:
			t.Errorf("unexpected %s", path)
		}
	}
	server := httptest.NewServer(http.HandlerFunc(answer))
	defer server.Close()
	q := newTestQuotas(t, fake.NewClientset())
	q.client = kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL})
	b := &byteCount{kinds: map[string]kindBytes{}}
	for i := range 4 {
		broken.Store(i > 0)
		if n, err := q.customBytes(t.Context(), "ns", b); n != 200 || err != nil {
			t.Errorf("count %d: %d, %v; want 200", i, n, err)
		}
	}
	if lists.Load() != 5 || fails.Load() != 1 {
		t.Errorf("%d lists and %d failed ones; want 5 and 1", lists.Load(), fails.Load())
	}
}

// Within bytesPause of a count, what admission has written stands.
func TestBytesAreNotCountedAtEachDeletion(t *testing.T) {
	t.Parallel()
	hard := corev1.ResourceList{resourcequota.Bytes: resource.MustParse("100")}
	used := corev1.ResourceList{resourcequota.Bytes: resource.MustParse("42")}
	client := fake.NewClientset(&corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "q"},
		Spec: corev1.ResourceQuotaSpec{Hard: hard}, Status: corev1.ResourceQuotaStatus{Hard: hard, Used: used}})
	q := newTestQuotas(t, client)
	if err := q.syncQuota(t.Context(), "ns", "q", &byteCount{at: time.Now()}, false); err != nil {
		t.Fatal(err)
	}
	for _, a := range client.Actions() {
		if a.GetVerb() != "get" || a.GetResource().Resource != "resourcequotas" {
			t.Errorf("unexpected %s of %s", a.GetVerb(), a.GetResource().Resource)
		}
	}
}
