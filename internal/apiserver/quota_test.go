package apiserver_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// awaitUsed waits until the status of the quota has used.
func awaitUsed(t *testing.T, c kubernetes.Interface, name string, want func(corev1.ResourceList) bool) {
	t.Helper()
	deadline := time.Now().Add(waitTimeout)
	for {
		q, err := c.CoreV1().ResourceQuotas("default").Get(t.Context(), name, metav1.GetOptions{})
		if err == nil && q.Status.Hard != nil && want(q.Status.Used) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the status: %+v, %v", q.Status, err)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// secrets is limited to none by quotas for which awaitEnforced waits.
const secrets = corev1.ResourceName("count/secrets")

// awaitEnforced waits until the cache that admission reads has a namespace's quota that forbids Secrets.
func awaitEnforced(t *testing.T, c kubernetes.Interface, namespace string) {
	t.Helper()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "forbidden"}}
	for deadline := time.Now().Add(waitTimeout); ; <-time.After(10 * time.Millisecond) {
		_, err := c.CoreV1().Secrets(namespace).Create(t.Context(), secret, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("a Secret that the quota forbids: %v", err)
		}
	}
}

// A tenant with a quota has no more objects and no more bytes than it says, neither
// by creation nor by updates, and gets back what is deleted.
func TestResourceQuota(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t)
	system, user := kubernetes.NewForConfigOrDie(cfg), tenant(t, cfg)
	const bytes, services = corev1.ResourceName("fairlead.dev/bytes"), corev1.ResourceName("count/services")
	limit := func(name string, hard corev1.ResourceList) error {
		_, err := system.CoreV1().ResourceQuotas("default").Create(t.Context(), &corev1.ResourceQuota{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{})
		return err
	}
	wrong := corev1.ResourceList{services: resource.MustParse("-1"), "apples": resource.MustParse("1")}
	if err := limit("wrong", wrong); !apierrors.IsInvalid(err) {
		t.Errorf("a wrong quota: %v", err)
	}
	// default/kubernetes is there.
	hard := corev1.ResourceList{services: resource.MustParse("2"), bytes: resource.MustParse("3M"), secrets: resource.MustParse("0")}
	if err := limit("q", hard); err != nil {
		t.Fatal(err)
	}
	awaitUsed(t, system, "q", func(u corev1.ResourceList) bool {
		s, b := u[services], u[bytes]
		return s.Value() == 1 && b.Value() > 0
	})
	awaitEnforced(t, user, "default")
	service := func(name string) error {
		_, err := user.CoreV1().Services("default").Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
		return err
	}
	exceeded := func(err error, what string) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: q") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := service("a"); err != nil {
		t.Fatal(err)
	}
	exceeded(service("b"), "the third Service")
	maps := user.CoreV1().ConfigMaps("default")
	for i := range 2 {
		if _, err := maps.Create(t.Context(), large(fmt.Sprintf("cm-%d", i), i), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	_, err := maps.Create(t.Context(), large("cm-2", 2), metav1.CreateOptions{})
	exceeded(err, "3 MB by creation")
	small := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "small"}}
	if _, err := maps.Create(t.Context(), small, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err = maps.Update(t.Context(), large("small", 0), metav1.UpdateOptions{})
	exceeded(err, "3 MB by an update")
	if err := maps.Delete(t.Context(), "cm-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := user.CoreV1().Services("default").Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	awaitUsed(t, system, "q", func(u corev1.ResourceList) bool {
		s, b := u[services], u[bytes]
		return s.Value() == 1 && b.Value() < 2_000_000
	})
	eventually(t, "room for 1 MB", func() bool { // admission reads a cache
		_, err := maps.Create(t.Context(), large("cm-2", 2), metav1.CreateOptions{})
		return err == nil
	})
	eventually(t, "room for a Service", func() bool { return service("b") == nil })
}

// Custom resources count by number and by bytes, by creation and by updates.
func TestQuotaOfCustomResources(t *testing.T) {
	c := newCustom(t)
	c.install("testdata/backups.yaml")
	const bytes, count = corev1.ResourceName("fairlead.dev/bytes"), corev1.ResourceName("count/backups.example.com")
	in := c.objs.Resource(backups).Namespace("default")
	make := func(name string, size int) error {
		o := object(t, backup(name, "{source: disk, options: {text: "+strings.Repeat("x", size)+"}}"))
		_, err := in.Create(c.ctx, o, metav1.CreateOptions{})
		return err
	}
	if err := make("before", 100_000); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kube.CoreV1().ResourceQuotas("default").Create(c.ctx, &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "q"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			bytes: resource.MustParse("300k"), count: resource.MustParse("3"), secrets: resource.MustParse("0")}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	used := func(objects, least, most int64) {
		t.Helper()
		awaitUsed(t, c.kube, "q", func(u corev1.ResourceList) bool {
			n, b := u[count], u[bytes]
			return n.Value() == objects && b.Value() >= least && b.Value() < most
		})
	}
	exceeded := func(err error, what string) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: q") {
			t.Errorf("%s: %v", what, err)
		}
	}
	used(1, 100_000, 120_000)
	awaitEnforced(t, c.kube, "default")
	exceeded(make("large", 250_000), "300 kB by creation")
	if err := make("second", 100_000); err != nil {
		t.Fatal(err)
	}
	used(2, 200_000, 230_000)
	_, err := in.Patch(c.ctx, "second", types.MergePatchType,
		[]byte(`{"spec":{"options":{"text":"`+strings.Repeat("y", 250_000)+`"}}}`), metav1.PatchOptions{})
	exceeded(err, "300 kB by an update")
	if err := make("third", 10); err != nil {
		t.Fatal(err)
	}
	exceeded(make("fourth", 10), "the fourth object")
	if err := in.Delete(c.ctx, "before", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	used(2, 100_000, 130_000)
	eventually(t, "room for 100 kB", func() bool { return make("fourth", 100_000) == nil })
}

// A new namespace gets the default quota, unless it has one.
func TestDefaultQuota(t *testing.T) {
	t.Parallel()
	const services = corev1.ResourceName("count/services")
	cfg := apiservertest.Start(t, func(o *apiserver.Options) {
		o.DefaultQuota = corev1.ResourceList{services: resource.MustParse("1"), secrets: resource.MustParse("0")}
	})
	system := kubernetes.NewForConfigOrDie(cfg)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}
	if _, err := system.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	awaitEnforced(t, system, "shop")
	web := func(name string) error {
		_, err := system.CoreV1().Services("shop").Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
		return err
	}
	if err := web("a"); err != nil {
		t.Fatal(err)
	}
	if err := web("b"); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: default") {
		t.Errorf("the second Service: %v", err)
	}
	if list, err := system.CoreV1().ResourceQuotas("kube-system").List(t.Context(), metav1.ListOptions{}); err != nil || len(list.Items) > 0 {
		t.Errorf("kube-system: %v, %v", list, err)
	}
}

// A quota keeps the resources of Kubernetes: what Services take of the cluster, and what Pods ask of the nodes. Objects of
// kinds that are not served count as none.
func TestQuotaOfKubernetesResources(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t)
	system, user := kubernetes.NewForConfigOrDie(cfg), tenant(t, cfg)
	quotas := system.CoreV1().ResourceQuotas("default")
	create := func(name string, hard map[corev1.ResourceName]string, scopes ...corev1.ResourceQuotaScope) error {
		list := corev1.ResourceList{}
		for n, amount := range hard {
			list[n] = resource.MustParse(amount)
		}
		_, err := quotas.Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ResourceQuotaSpec{Hard: list, Scopes: scopes}}, metav1.CreateOptions{})
		return err
	}
	for what, err := range map[string]error{
		"memory of best effort": create("x", map[corev1.ResourceName]string{"memory": "1"}, corev1.ResourceQuotaScopeBestEffort),
		"Services in a scope":   create("x", map[corev1.ResourceName]string{"services": "1"}, corev1.ResourceQuotaScopeTerminating),
		"bytes in a scope":      create("x", map[corev1.ResourceName]string{"fairlead.dev/bytes": "1"}, corev1.ResourceQuotaScopeTerminating),
		"conflicting scopes": create("x", map[corev1.ResourceName]string{"pods": "1"}, corev1.ResourceQuotaScopeBestEffort,
			corev1.ResourceQuotaScopeNotBestEffort),
		"an unknown scope": create("x", map[corev1.ResourceName]string{"pods": "1"}, "Slow"),
	} {
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.scopes") {
			t.Errorf("%s: %v", what, err)
		}
	}
	used := func(quota string, want map[corev1.ResourceName]string) {
		t.Helper()
		awaitUsed(t, system, quota, func(u corev1.ResourceList) bool {
			for name, amount := range want {
				have, ok := u[name]
				if !ok || have.Cmp(resource.MustParse(amount)) != 0 {
					return false
				}
			}
			return true
		})
	}
	for name, err := range map[string]error{
		"q": create("q", map[corev1.ResourceName]string{"services": "4", "services.nodeports": "2", "services.loadbalancers": "1", "pods": "2",
			"requests.cpu": "1", "limits.memory": "1Gi", "configmaps": "9", "resourcequotas": "2", "count/replicasets.apps": "0",
			"replicationcontrollers": "3", "persistentvolumeclaims": "3", "requests.storage": "1Gi", "secrets": "0"}),
		"deadline": create("deadline", map[corev1.ResourceName]string{"pods": "1"}, corev1.ResourceQuotaScopeTerminating),
	} {
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	used("q", map[corev1.ResourceName]string{"services": "1", "services.nodeports": "0", "pods": "0", "requests.cpu": "0",
		"resourcequotas": "2", "replicationcontrollers": "0", "persistentvolumeclaims": "0", "requests.storage": "0",
		"count/replicasets.apps": "0"})
	used("deadline", map[corev1.ResourceName]string{"pods": "0"})
	awaitEnforced(t, user, "default")
	exceeded := func(err error, what, limit string) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: ") || !strings.Contains(err.Error(), limit) {
			t.Errorf("%s: %v; want %q", what, err, limit)
		}
	}
	service := func(name string, kind corev1.ServiceType) error {
		_, err := user.CoreV1().Services("default").Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ServiceSpec{Type: kind, Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
		return err
	}
	for name, kind := range map[string]corev1.ServiceType{"lb": corev1.ServiceTypeLoadBalancer, "np": corev1.ServiceTypeNodePort} {
		if err := service(name, kind); err != nil {
			t.Fatal(err)
		}
	}
	used("q", map[corev1.ResourceName]string{"services": "3", "services.nodeports": "2", "services.loadbalancers": "1"})
	exceeded(service("np2", corev1.ServiceTypeNodePort), "a third node port", "services.nodeports=1, used: services.nodeports=2")
	if err := service("plain", corev1.ServiceTypeClusterIP); err != nil {
		t.Fatal(err)
	}
	retype := func(name string, kind corev1.ServiceType) error {
		_, err := user.CoreV1().Services("default").Patch(t.Context(), name, types.MergePatchType,
			[]byte(`{"spec":{"type":"`+string(kind)+`"}}`), metav1.PatchOptions{})
		return err
	}
	exceeded(retype("plain", corev1.ServiceTypeLoadBalancer), "a second load balancer by an update", "services.loadbalancers=1")
	if err := retype("lb", corev1.ServiceTypeClusterIP); err != nil {
		t.Fatal(err)
	}
	used("q", map[corev1.ResourceName]string{"services.nodeports": "1", "services.loadbalancers": "0"})

	pod := func(name, cpu, memory string, deadline *int64) error {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{ActiveDeadlineSeconds: deadline,
			Containers: []corev1.Container{{Name: "c", Image: "x", Command: []string{"/bin/true"}}}}}
		if cpu != "" {
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{
				Requests: corev1.ResourceList{"cpu": resource.MustParse(cpu)}, Limits: corev1.ResourceList{"memory": resource.MustParse(memory)}}
		}
		_, err := system.CoreV1().Pods("default").Create(t.Context(), p, metav1.CreateOptions{})
		return err
	}
	if err := pod("none", "", "", nil); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), "failed quota: q: must specify limits.memory for: c; requests.cpu for: c") {
		t.Errorf("a Pod without requests: %v", err)
	}
	exceeded(pod("large", "2", "1Mi", nil), "2 CPUs", "requested: requests.cpu=2, used: requests.cpu=0, limited: requests.cpu=1")
	if err := pod("a", "500m", "1Mi", ptr.To[int64](100)); err != nil {
		t.Fatal(err)
	}
	used("deadline", map[corev1.ResourceName]string{"pods": "1"})
	used("q", map[corev1.ResourceName]string{"pods": "1", "requests.cpu": "500m", "limits.memory": "1Mi"})
	exceeded(pod("b", "100m", "1Mi", ptr.To[int64](100)), "a second Pod with a deadline", "exceeded quota: deadline, requested: pods=1")
	if _, err := system.CoreV1().Pods("default").Patch(t.Context(), "a", types.MergePatchType, []byte(`{"status":{"phase":"Succeeded"}}`),
		metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	used("deadline", map[corev1.ResourceName]string{"pods": "0"})
	used("q", map[corev1.ResourceName]string{"pods": "0", "requests.cpu": "0"})
	exceeded(create("third", map[corev1.ResourceName]string{"pods": "1"}), "a third quota", "resourcequotas=1")
	// A status that somebody else wrote is put right.
	if _, err := quotas.Patch(t.Context(), "q", types.MergePatchType, []byte(`{"status":{"hard":{"pods":"77"}}}`), metav1.PatchOptions{},
		"status"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the limits of the spec in the status", func() bool {
		q, err := quotas.Get(t.Context(), "q", metav1.GetOptions{})
		hard := q.Status.Hard["pods"]
		return err == nil && hard.Value() == 2
	})
}

// Events count by number and by bytes, through both groups.
func TestQuotaOfEvents(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t)
	system, user := kubernetes.NewForConfigOrDie(cfg), tenant(t, cfg)
	const bytes, count = corev1.ResourceName("fairlead.dev/bytes"), corev1.ResourceName("count/events")
	if _, err := system.CoreV1().ResourceQuotas("default").Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "q"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			bytes: resource.MustParse("500k"), count: resource.MustParse("3"), secrets: resource.MustParse("0")}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	awaitUsed(t, system, "q", func(u corev1.ResourceList) bool { return len(u) == 3 })
	awaitEnforced(t, user, "default")
	event := func(name string, size int) error {
		e, err := user.CoreV1().Events("default").Create(t.Context(), &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{Name: name, Annotations: map[string]string{"a": strings.Repeat("x", size)}},
			InvolvedObject: corev1.ObjectReference{Namespace: "default"}, Message: strings.Repeat("ü", 1000),
		}, metav1.CreateOptions{})
		if err == nil && (len(e.Message) > 1024 || !strings.HasSuffix(e.Message, "ü...")) {
			t.Errorf("a message of %d bytes", len(e.Message))
		}
		return err
	}
	newEvent := func(name string) error {
		_, err := user.EventsV1().Events("default").Create(t.Context(), &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Name: name},
			EventTime: metav1.NowMicro(), ReportingController: "x", ReportingInstance: "x", Action: "x", Reason: "x", Type: "Normal",
			Regarding: corev1.ObjectReference{Namespace: "default"}}, metav1.CreateOptions{})
		return err
	}
	exceeded := func(err error, what string) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: q") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for i := range 2 {
		if err := event(fmt.Sprintf("e%d", i), 200_000); err != nil {
			t.Fatal(err)
		}
	}
	exceeded(event("e2", 200_000), "600 kB of Events")
	if err := newEvent("n0"); err != nil {
		t.Fatal(err)
	}
	exceeded(event("e3", 0), "a fourth Event")
	exceeded(newEvent("n1"), "a fourth Event of events.k8s.io")
	awaitUsed(t, system, "q", func(u corev1.ResourceList) bool { n := u[count]; return n.Value() == 3 })
}
