package apiserver_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// Another program fills the disk while a server writes: the server stays, rejects what
// grows with what to do, goes on with deletions and Leases until a write could be etcd's
// last, has lost no acknowledged write, and accepts writes when there is room again, for
// longer than its reserves reach.
func TestDiskFillsWhileRunning(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("mounts a file system in a namespace of its own, which needs root")
	}
	dir := t.TempDir()
	cmd := onDisk(dir, "640m")
	_, c := spawnAs(t, cmd, dir)
	w := &diskWriter{ctx: t.Context(), c: c, acked: map[string]bool{}}
	for i := range 30 {
		if err := w.write(fmt.Sprintf("before-%d", i), 8<<10); err != nil {
			t.Fatal(err)
		}
	}
	leases := c.CoordinationV1().Leases("default")
	if _, err := leases.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "lease"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var renewals atomic.Int32
	renew := func() error {
		patch := fmt.Appendf(nil, `{"spec":{"leaseTransitions":%d}}`, renewals.Add(1))
		_, err := leases.Patch(t.Context(), "lease", types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	}

	rejected := make(chan error, 4)
	for k := range 4 {
		go func() {
			for i := 0; ; i++ {
				if err := w.write(fmt.Sprintf("during-%d-%d", k, i), 256<<10); err != nil {
					rejected <- err
					return
				}
			}
		}()
	}
	empty := fill(t, filepath.Join("/proc", fmt.Sprint(cmd.Process.Pid), "root", dir, "filler"))
	for range 4 {
		if err := <-rejected; !isDiskFull(err) || !strings.Contains(err.Error(), dir+"/etcd") || !strings.Contains(err.Error(), "128 MiB") {
			t.Errorf("a write on a full disk: %v", err)
		}
	}
	if s := storeStatus(t, c); !s.DiskFull || !strings.Contains(s.Message, "the disk of") {
		t.Errorf("the store on a full disk: %+v", s)
	}
	if err := c.CoreV1().ConfigMaps("default").Delete(t.Context(), "before-0", metav1.DeleteOptions{}); err != nil {
		t.Errorf("a deletion on a full disk: %v", err)
	}
	w.forget("before-0")
	if _, err := c.CoreV1().RESTClient().Get().AbsPath("/readyz").DoRaw(t.Context()); err != nil {
		t.Errorf("/readyz on a full disk: %v", err)
	}
	// Renewals go on; the last reserve is kept.
	var renewed atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				if err := renew(); isDiskFull(err) {
					return
				} else if apierrors.IsConflict(err) {
					continue
				} else if err != nil {
					t.Errorf("a renewal on a full disk: %v", err)
					return
				}
				renewed.Add(1)
			}
		})
	}
	wg.Wait()
	if renewed.Load() == 0 || renewed.Load() == 8000 {
		t.Errorf("%d renewals on a full disk", renewed.Load())
	}
	t.Logf("%d renewals on a full disk, then %s", renewed.Load(), storeStatus(t, c).Message)
	w.check(t)
	body, err := c.CoreV1().RESTClient().Get().AbsPath("/readyz/etcd-space").DoRaw(t.Context())
	if err == nil || !strings.Contains(string(body), "all writes are rejected") {
		t.Errorf("/readyz/etcd-space while no write is accepted: %v, %s", err, body)
	}

	empty()
	eventually(t, "writes when there is room", func() bool { return w.write("after", 8<<10) == nil })
	if _, err := c.CoreV1().RESTClient().Get().AbsPath("/readyz").DoRaw(t.Context()); err != nil {
		t.Errorf("/readyz when there is room again: %v", err)
	}
	for i := range 80 { // several segments of the log
		if err := w.write("again-"+fmt.Sprint(i%4), 1000<<10); err != nil {
			t.Fatalf("write %d after the disk was full: %v", i, err)
		}
		if err := c.CoreV1().ConfigMaps("default").Delete(t.Context(), "again-"+fmt.Sprint(i%4), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.forget("again-" + fmt.Sprint(i%4))
	}
	awaitQuietStore(t, c)
	w.check(t)
	if err := renew(); err != nil {
		t.Error(err)
	}
}

func isDiskFull(err error) bool {
	var status *apierrors.StatusError
	return errors.As(err, &status) && status.Status().Code == 507 && status.Status().Reason == "DiskFull"
}

// fill makes a file that takes all of its disk, also what becomes free, until the result
// is called, which removes the file.
func fill(t *testing.T, path string) (empty func()) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for buffer := make([]byte, 1<<20); ctx.Err() == nil; {
			n, err := f.Write(buffer)
			if err != nil && !errors.Is(err, syscall.ENOSPC) {
				t.Error(err)
				return
			}
			if n == 0 {
				select {
				case <-ctx.Done():
				case <-time.After(time.Millisecond):
				}
			}
		}
	}()
	empty = sync.OnceFunc(func() {
		cancel()
		<-done
		if err := errors.Join(f.Close(), os.Remove(path)); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(empty)
	return empty
}

// diskWriter writes ConfigMaps, and knows which writes were acknowledged.
type diskWriter struct {
	ctx   context.Context
	c     kubernetes.Interface
	mu    sync.Mutex
	acked map[string]bool
}

func (w *diskWriter) write(name string, size int) error {
	_, err := w.c.CoreV1().ConfigMaps("default").Create(w.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name},
		Data: map[string]string{"a": strings.Repeat("x", size)}}, metav1.CreateOptions{})
	if err == nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.acked[name] = true
	}
	return err
}

func (w *diskWriter) forget(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.acked, name)
}

// check compares what is stored with what was acknowledged.
func (w *diskWriter) check(t *testing.T) {
	t.Helper()
	list, err := w.c.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stored := map[string]bool{}
	for i := range list.Items {
		stored[list.Items[i].Name] = true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for name := range w.acked {
		if !stored[name] {
			t.Errorf("%s was acknowledged and is not stored", name)
		}
	}
	t.Logf("%d acknowledged, %d stored", len(w.acked), len(stored))
}
