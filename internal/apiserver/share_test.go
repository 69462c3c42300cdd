package apiserver_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/accounts"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/svc"
)

// Events of one tenant, several times as large as the store, fill nothing: the oldest go. Another tenant's Events stay,
// and everybody can write.
func TestEventsDoNotFillTheStore(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t, smallStore)
	system, user := kubernetes.NewForConfigOrDie(cfg), tenant(t, cfg)
	event := func(namespace, name string, size int) *corev1.Event {
		return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace,
			Annotations: map[string]string{"a": strings.Repeat("x", size)}},
			InvolvedObject: corev1.ObjectReference{Namespace: namespace}, FirstTimestamp: metav1.NewTime(time.Now())}
	}
	other := event("kube-system", "other", 10)
	if _, err := system.CoreV1().Events("kube-system").Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const size = 200 << 10
	const number = 3 * store.MinQuota / size
	busy := 0
	for i := range number {
		for {
			_, err := user.CoreV1().Events("default").Create(t.Context(), event("default", fmt.Sprintf("e%d", i), size), metav1.CreateOptions{})
			if err == nil {
				break
			}
			if busy++; !apierrors.IsTooManyRequests(err) || busy > 10*number {
				t.Fatalf("Event %d, after %d answers 429: %v (%+v)", i, busy, err, storeStatus(t, system))
			}
			<-time.After(10 * time.Millisecond)
		}
	}
	list, err := system.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for i := range list.Items {
		names[list.Items[i].Name] = true
	}
	if most := 2*store.MinQuota/16/size + 3; len(names) > most || names["e0"] || !names["other"] || !names[fmt.Sprintf("e%d", number-1)] {
		t.Errorf("%d Events are left, of %d at most: %v", len(names), most, names)
	} else {
		t.Logf("%d of %d Events of %d KiB are left in a store of %d MiB", len(names), number, size>>10, store.MinQuota>>20)
	}
	if s := storeStatus(t, system); s.Full {
		t.Errorf("the store: %+v", s)
	}
	if _, err := system.CoreV1().ConfigMaps("kube-system").Create(t.Context(), large("cm", 0), metav1.CreateOptions{}); err != nil {
		t.Errorf("another's object: %v", err)
	}
	text, err := system.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil || !strings.Contains(string(text), "fairlead_etcd_events_removed_total") ||
		strings.Contains(string(text), "fairlead_etcd_events_removed_total 0\n") {
		t.Errorf("no Event was counted as removed, %v", err)
	}
}

// Without any flag or quota a namespace takes no more than its share of the store, by creation, by updates or through the
// Pods that a controller makes, and what is rejected does not count in its quotas. Other namespaces can write, and an administrator can
// allow more.
func TestNamespaceShare(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t, smallStore)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "admin", Groups: []string{"system:masters"}} // not the server itself
	c := kubernetes.NewForConfigOrDie(cfg)
	for _, name := range []string{"shop", "bank"} {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := c.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	maps := c.CoreV1().ConfigMaps("shop")
	create := func(namespace, name string) error {
		_, err := c.CoreV1().ConfigMaps(namespace).Create(t.Context(), large(name, 0), metav1.CreateOptions{})
		return err
	}
	if err := create("shop", "a"); err != nil {
		t.Fatal(err)
	}
	const count = corev1.ResourceName("count/configmaps")
	quotas := c.CoreV1().ResourceQuotas("shop")
	eventually(t, "the ConfigMap of each namespace", func() bool {
		_, err := maps.Get(t.Context(), accounts.RootConfigMap, metav1.GetOptions{})
		return err == nil
	})
	hard := corev1.ResourceList{count: resource.MustParse("100"), secrets: resource.MustParse("0")}
	if _, err := quotas.Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "count"},
		Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	awaitEnforced(t, c, "shop")
	exceeded := func(err error) bool {
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota") &&
			strings.Contains(err.Error(), "limited: fairlead.dev/bytes=2097152")
	}
	var at sync.WaitGroup
	var made, refused atomic.Int64
	made.Add(1)
	for i := range 6 { // writes of one moment do not pass together
		at.Go(func() {
			switch err := create("shop", fmt.Sprintf("b%d", i)); {
			case err == nil:
				made.Add(1)
			case exceeded(err):
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	at.Wait()
	if made.Load() != 2 || refused.Load() != 5 {
		t.Errorf("%d objects of 1 MB in a share of 2 MiB, %d refused", made.Load(), refused.Load())
	}
	q, err := quotas.Get(t.Context(), "count", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n := q.Status.Used[count]; n.Value() != 1+made.Load() { // one is the server's
		t.Errorf("a quota counts %s ConfigMaps, %d were made", &n, 1+made.Load())
	}
	small := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "small"}}
	if _, err := maps.Create(t.Context(), small, metav1.CreateOptions{}); err != nil {
		t.Fatalf("a small object: %v", err)
	}
	if _, err := maps.Update(t.Context(), large("small", 0), metav1.UpdateOptions{}); !exceeded(err) {
		t.Errorf("an update: %v", err)
	}
	system := rest.CopyConfig(cfg)
	system.Impersonate = rest.ImpersonationConfig{UserName: svc.ControllersUser, Groups: []string{"system:masters"}}
	byController := kubernetes.NewForConfigOrDie(system).CoreV1()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "pod"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{
		Name: "c", Image: "x", Command: []string{"/bin/true"}, Args: []string{strings.Repeat("x", 1000<<10)}}}}}
	if _, err := byController.Pods("shop").Create(t.Context(), pod, metav1.CreateOptions{}); !exceeded(err) {
		t.Errorf("a Pod of a controller: %v", err)
	}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice", Annotations: map[string]string{
		"a": strings.Repeat("x", 200<<10)}}, AddressType: discoveryv1.AddressTypeIPv4}
	slices := kubernetes.NewForConfigOrDie(system).DiscoveryV1().EndpointSlices("shop")
	if _, err := slices.Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Errorf("what the system needs: %v", err)
	}
	if err := create("bank", "a"); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	if err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "room after a deletion", func() bool { return create("shop", "a") == nil })
	if _, err := c.CoreV1().ResourceQuotas("shop").Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "more"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"fairlead.dev/bytes": resource.MustParse("4M")}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "more by a quota", func() bool { return create("shop", "c") == nil })
}
