package apiserver_test

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/apiserver/store"
	archive "github.com/fairlead/fairlead/internal/backup"
)

// A server is backed up while it runs and after a kill -9, and comes back in another directory: with
// all objects and keys, so that old credentials count, and with newer revisions than clients have seen.
func TestBackupAndRestore(t *testing.T) {
	t.Parallel()
	dir, other := t.TempDir(), filepath.Join(t.TempDir(), "other")
	back := func(name string) string {
		t.Helper()
		file := filepath.Join(t.TempDir(), name)
		m, err := store.Backup(t.Context(), dir, file, "v0.test", slog.New(slog.DiscardHandler))
		if err != nil || m.Keys == 0 || m.Revision == 0 || m.Version != "v0.test" {
			t.Fatal(m, err)
		}
		if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
			t.Fatalf("%v, %v", info.Mode(), err)
		}
		if left, err := os.ReadDir(filepath.Dir(file)); err != nil || len(left) != 1 {
			t.Errorf("beside it are %v, %v", left, err)
		}
		return file
	}
	kill, c := spawn(t, dir)
	make1 := func(c *kubernetes.Clientset, name string) *corev1.ConfigMap {
		t.Helper()
		made, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}},
			metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return made
	}
	make1(c, "before")
	running := back("running.tar")
	if _, err := store.Backup(t.Context(), dir, running, "", slog.New(slog.DiscardHandler)); err == nil ||
		!strings.Contains(err.Error(), "exists already") {
		t.Errorf("a second time into one file: %v", err)
	}
	last := make1(c, "after")
	kill()
	killed := back("killed.tar")
	if _, err := store.Restore(killed, dir, false); err == nil || !strings.Contains(err.Error(), "move it away") {
		t.Errorf("restore over a server: %v", err)
	}
	if _, err := store.Backup(t.Context(), other, filepath.Join(t.TempDir(), "x"), "", slog.New(slog.DiscardHandler)); err == nil ||
		!strings.Contains(err.Error(), "there is no store") {
		t.Errorf("a backup of nothing: %v", err)
	}

	if _, err := store.Restore(killed, other, false); err != nil {
		t.Fatal(err)
	}
	old, err := clientcmd.LoadFromFile(filepath.Join(dir, "admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	stop, c := spawn(t, other)
	for _, name := range []string{"before", "after"} {
		if _, err := c.CoreV1().ConfigMaps("default").Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			t.Error(err)
		}
	}
	rv := func(m *corev1.ConfigMap) int { n, _ := strconv.Atoi(m.ResourceVersion); return n }
	restored := make1(c, "now")
	if rv(restored) < rv(last)+1_000_000 {
		t.Errorf("the resourceVersion was %s and is %s", last.ResourceVersion, restored.ResourceVersion)
	}
	// The old administrator's credentials, at the new address.
	now, err := clientcmd.LoadFromFile(filepath.Join(other, "admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	for name, cluster := range old.Clusters {
		cluster.Server = now.Clusters[name].Server
	}
	cfg, err := clientcmd.NewDefaultClientConfig(*old, nil).ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kubernetes.NewForConfigOrDie(cfg).CoreV1().ConfigMaps("default").Get(t.Context(), "now", metav1.GetOptions{}); err != nil {
		t.Errorf("with the credentials from before: %v", err)
	}
	stop()
	dir = testDamagedBackup(t, running)
	_, c = spawn(t, dir)
	if again := make1(c, "again"); rv(again) <= rv(restored) {
		t.Errorf("the resourceVersion was %s and is %s after a restore of an older backup", restored.ResourceVersion, again.ResourceVersion)
	}
	authority, err := tls.LoadX509KeyPair(filepath.Join(dir, "pki/ca.crt"), filepath.Join(dir, "pki/ca.key"))
	if err != nil {
		t.Error(authority, err)
	}
}

// A damaged backup writes nothing, and on demand the rest but for the other halves of damaged pairs.
// It returns a directory restored without the authority and the server's certificate.
func testDamagedBackup(t *testing.T, file string) (dir string) {
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	a, err := archive.Open(bytes.NewReader(good), int64(len(good)))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		damaged, halves []string
		store           bool
	}{
		{[]string{archive.Store}, nil, false},
		{[]string{"pki/ca.key", "pki/server.key"}, []string{"pki/ca.crt", "pki/server.crt"}, true},
	} {
		data := bytes.Clone(good)
		if !x.store {
			data = data[:len(data)-len(data)/3] // cut short, with the second manifest
		}
		for i, p := range a.Parts {
			if content, err := io.ReadAll(a.Content(i)); err != nil {
				t.Fatal(err)
			} else if x.store && slices.Contains(x.damaged, p.Name) {
				data[bytes.LastIndex(data, content)] ^= 1 // the key of a pair is in both files
			}
		}
		bad := filepath.Join(t.TempDir(), "bad.tar")
		if err := os.WriteFile(bad, data, 0o600); err != nil {
			t.Fatal(err)
		}
		dir = filepath.Join(t.TempDir(), "restored")
		_, err := store.Restore(bad, dir, false)
		var damage *store.DamagedBackupError
		if !errors.As(err, &damage) || !slices.Equal(damage.Damaged, x.damaged) || !slices.Equal(damage.Halves, x.halves) ||
			len(damage.Good) != len(a.Parts)-len(x.damaged)-len(x.halves) || !strings.Contains(err.Error(), "is damaged in "+x.damaged[0]) {
			t.Errorf("%s: %v", x.damaged, err)
		}
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s: something was written: %v", x.damaged, err)
		}
		leftover := filepath.Join(dir, "restore-1", "pki")
		if err := os.MkdirAll(leftover, 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := store.Restore(bad, dir, true); err != nil {
			t.Errorf("%s: the rest: %v", x.damaged, err)
		}
		if _, err := os.Stat(filepath.Join(dir, "etcd/member/snap/db")); os.IsNotExist(err) == x.store {
			t.Errorf("%s: the store: %v", x.damaged, err)
		}
		if list, err := os.ReadDir(filepath.Join(dir, "pki")); err != nil || len(list) < 3 {
			t.Errorf("%s: the keys: %v, %v", x.damaged, list, err)
		}
		if left, err := filepath.Glob(filepath.Join(dir, "restore-*")); err != nil || len(left) > 0 {
			t.Errorf("left over: %v, %v", left, err)
		}
	}
	return dir
}
