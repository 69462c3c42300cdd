package apiserver_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/embed"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/space"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/testbed/etcd"
)

// tenant returns a client of a user who may edit the namespace default and no more.
func tenant(t *testing.T, system *rest.Config) kubernetes.Interface {
	t.Helper()
	_, err := kubernetes.NewForConfigOrDie(system).RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "tenant"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "tenant"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := rest.CopyConfig(system)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "tenant", Groups: []string{"system:authenticated"}}
	c := kubernetes.NewForConfigOrDie(cfg)
	deadline := time.Now().Add(waitTimeout)
	for { // the authorizer follows by a watch
		_, err := c.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
		if err == nil {
			return c
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// large is a ConfigMap of nearly 1 MB, which does not compress to nothing.
func large(name string, i int) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name},
		Data: map[string]string{"a": strings.Repeat(fmt.Sprintf("%08d", i), 1000<<10/8)}}
}

func storeStatus(t *testing.T, c kubernetes.Interface) (s space.Status) {
	t.Helper()
	text, err := c.CoreV1().RESTClient().Get().AbsPath(space.Path).DoRaw(t.Context())
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func smallStore(o *apiserver.Options) { o.EtcdQuota = store.MinQuota }

// A user who updates one object for ever fills nothing: the history goes when it is
// large, not only when it is old.
func TestHistoryDoesNotFillTheStore(t *testing.T) {
	cfg := apiservertest.Start(t, smallStore)
	system, user := kubernetes.NewForConfigOrDie(cfg), tenant(t, cfg)
	if _, err := user.CoreV1().ConfigMaps("default").Create(t.Context(), large("cm", 0), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const updates = 5 * store.MinQuota >> 20
	for i := range updates {
		if _, err := user.CoreV1().ConfigMaps("default").Update(t.Context(), large("cm", i), metav1.UpdateOptions{}); err != nil {
			t.Fatalf("update %d: %v (%+v)", i, err, storeStatus(t, system))
		}
	}
	if s := storeStatus(t, system); s.Full || s.SizeBytes > 2*s.QuotaBytes {
		t.Errorf("the store: %+v", s)
	}
	text, err := system.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil || !strings.Contains(string(text), `fairlead_etcd_upkeep_total{step="compaction"}`) {
		t.Errorf("no metric of compactions, %v", err)
	}
}

// persist writes again while the server asks for that: it makes room, or etcd had no time, which a busy machine may take for
// longer than clients retry by themselves. unsure is whether etcd had no time for one of the tries: it may have been written.
func persist(t *testing.T, write func() error) (unsure bool, err error) {
	t.Helper()
	for begin := time.Now(); ; <-time.After(100 * time.Millisecond) {
		err = write()
		timedOut := err != nil && strings.Contains(err.Error(), "request timed out")
		unsure = unsure || timedOut
		if !timedOut && !apierrors.IsTooManyRequests(err) || time.Since(begin) > waitTimeout {
			return unsure, err
		}
		t.Logf("%v; retrying", err)
	}
}

// create creates a ConfigMap.
func create(t *testing.T, maps typedcorev1.ConfigMapInterface, cm *corev1.ConfigMap) error {
	t.Helper()
	unsure, err := persist(t, func() error {
		_, err := maps.Create(t.Context(), cm, metav1.CreateOptions{})
		return err
	})
	if unsure && apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// remove deletes a ConfigMap.
func remove(t *testing.T, maps typedcorev1.ConfigMapInterface, name string) error {
	t.Helper()
	unsure, err := persist(t, func() error { return maps.Delete(t.Context(), name, metav1.DeleteOptions{}) })
	if unsure && apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// A tenant who fills the store with objects is stopped with a clear message, the
// system can still write, and writes work again when the objects are deleted.
func TestFullStoreHeals(t *testing.T) {
	t.Parallel()
	cfg := apiservertest.Start(t, smallStore)
	system, user := kubernetes.NewForConfigOrDie(cfg), tenant(t, cfg)
	maps := user.CoreV1().ConfigMaps("default")
	made := 0
	var err error
	for ; made < 2*store.MinQuota>>20 && err == nil; made++ {
		err = create(t, maps, large(fmt.Sprintf("cm-%d", made), made))
	}
	var status *apierrors.StatusError
	if !errors.As(err, &status) || status.Status().Code != 507 || !strings.Contains(err.Error(), "delete objects") {
		t.Fatalf("after %d objects: %v", made, err)
	}
	made--
	if made < store.MinQuota>>21 {
		t.Errorf("the store was full after %d objects", made)
	}
	if s := storeStatus(t, system); !s.Full || s.Message == "" {
		t.Errorf("the full store: %+v", s)
	}
	if _, err := system.CoreV1().ConfigMaps("default").Create(t.Context(),
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "system"}}, metav1.CreateOptions{}); err != nil {
		t.Errorf("the system cannot write: %v", err)
	}
	for i := range made {
		if err := remove(t, maps, fmt.Sprintf("cm-%d", i)); err != nil {
			t.Fatalf("delete %d: %v", i, err)
		}
	}
	begin := time.Now()
	for {
		if _, err = maps.Create(t.Context(), large("again", 0), metav1.CreateOptions{}); err == nil {
			break
		}
		if time.Since(begin) > waitTimeout {
			t.Fatalf("no write after the deletion: %v (%+v)", err, storeStatus(t, system))
		}
		<-time.After(10 * time.Millisecond)
	}
	t.Logf("writes work %s after the deletion, %+v", time.Since(begin), storeStatus(t, system))
}

// A store that is nearly full is named as such, and no longer when its objects are
// deleted, although nothing else makes it compact then.
func TestNearlyFullStoreHeals(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at := func(o *apiserver.Options) { o.DataDir = dir }
	server, stop := apiservertest.StartStoppable(t, at, smallStore)
	system := kubernetes.NewForConfigOrDie(server.LoopbackConfig())
	user := tenant(t, server.LoopbackConfig())
	// Nearly full is 12 of 16 MiB, full 14. What is in use counts at etcd's commits, every
	// 100 ms, so each step waits for that of its objects. It waits for a bounded time: a
	// commit that frees as many pages of earlier ones as it takes changes nothing.
	const step, size, enough, commits = 4, 100 << 10, 13<<20 + 1<<18, 2 * time.Second
	made, inUse := 0, storeStatus(t, system).InUseBytes
	for inUse < enough {
		for range step {
			cm := large(fmt.Sprintf("cm-%d", made), made)
			cm.Data["a"] = cm.Data["a"][:size]
			if err := create(t, user.CoreV1().ConfigMaps("default"), cm); err != nil {
				t.Fatalf("create %d: %v (%+v)", made, err, storeStatus(t, system))
			}
			made++
		}
		before := inUse
		for begin := time.Now(); inUse == before && time.Since(begin) < commits; <-time.After(10 * time.Millisecond) {
			inUse = storeStatus(t, system).InUseBytes
		}
	}
	stop()
	// A start measures and compacts. Compactions by size are due after 4 MiB more, or when
	// the file is beyond the quota: neither will be.
	server = apiservertest.StartServer(t, at, smallStore)
	system = kubernetes.NewForConfigOrDie(server.LoopbackConfig())
	if s := storeStatus(t, system); s.Full || s.SizeBytes > s.QuotaBytes || !strings.Contains(s.Message, "nearly full") {
		t.Fatalf("the nearly full store: %+v", s)
	}
	if _, err := persist(t, func() error {
		return system.CoreV1().ConfigMaps("default").DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{})
	}); err != nil {
		t.Fatal(err)
	}
	awaitQuietStore(t, system)
}

// awaitQuietStore waits until the status of the store names no problem.
func awaitQuietStore(t *testing.T, c kubernetes.Interface) {
	t.Helper()
	begin := time.Now()
	for s := storeStatus(t, c); s.Full || s.Message != ""; s = storeStatus(t, c) {
		if time.Since(begin) > 2*waitTimeout {
			t.Fatalf("the store after %s: %+v", time.Since(begin), s)
		}
		<-time.After(10 * time.Millisecond)
	}
	t.Logf("no problem after %s", time.Since(begin))
}

// A server starts on an etcd whose NOSPACE alarm is raised, and lifts it.
func TestStartWithoutSpace(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cfg := func(o *apiserver.Options) { o.DataDir = dir }
	_, stop := apiservertest.StartStoppable(t, cfg, smallStore)
	stop()
	fillRaw(t, filepath.Join(dir, "etcd"))
	c := kubernetes.NewForConfigOrDie(apiservertest.Start(t, cfg, smallStore))
	if _, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), large("cm", 0), metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
	awaitQuietStore(t, c)
}

// fillRaw writes to an etcd until its alarm is raised, as a server without a limit
// for users did.
func fillRaw(t *testing.T, dir string) {
	t.Helper()
	e := etcd.Launch(t, func(c *embed.Config) {
		c.Name, c.Dir, c.QuotaBackendBytes = "fairlead", dir, store.MinQuota*2
	})
	defer e.Close()
	etcd.AwaitReady(t, e)
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	value := []byte(strings.Repeat("x", 1<<20))
	var err error
	for range 64 {
		_, err = e.Server.Put(ctx, &etcdserverpb.PutRequest{Key: []byte("/registry/configmaps/default/history"), Value: value})
		if err != nil {
			break
		}
	}
	if err == nil || !strings.Contains(err.Error(), "no space") {
		t.Fatalf("etcd is not full: %v", err)
	}
	for len(e.Server.Alarms()) == 0 {
		select {
		case <-ctx.Done():
			t.Fatal("no alarm")
		case <-time.After(10 * time.Millisecond):
		}
	}
}
