package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// 'fairlead backup' saves a server that runs, and one that starts where 'fairlead restore' has
// put the file has its objects.
func TestBackupAndRestoreByCommand(t *testing.T) {
	encryption := filepath.Join(t.TempDir(), "encryption.yaml")
	if err := os.WriteFile(encryption, []byte(`
apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - secretbox: {keys: [{name: one, secret: MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=}]}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	at := func(dir string) func(*apiserver.Options) {
		return func(o *apiserver.Options) { o.DataDir, o.Auth.EncryptionConfig = dir, encryption }
	}
	dir, other, file := t.TempDir(), filepath.Join(t.TempDir(), "other"), filepath.Join(t.TempDir(), "today.tar")
	s, stop := apiservertest.StartStoppable(t, at(dir))
	t.Cleanup(stop)
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kept"}, Data: map[string]string{"key": "value"}}
	maps := func() typedcorev1.ConfigMapInterface {
		return kubernetes.NewForConfigOrDie(s.LoopbackConfig()).CoreV1().ConfigMaps("default")
	}
	made, err := maps().Create(t.Context(), object, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	does := func(want int, text string, args ...string) {
		t.Helper()
		if code, out, stderr := call(t, args...); code != want || !strings.Contains(out+stderr, text) {
			t.Fatalf("%q: exit %d, want %d and %q:\n%s%s", args, code, want, text, out, stderr)
		}
	}
	does(exitDone, "keep it secret", "backup", file, "--data-dir", dir)
	if info, err := os.Stat(file); err != nil || info.Mode() != 0o600 {
		t.Errorf("the mode of the file is %v, %v", info, err)
	}
	does(exitFailed, "exists already", "backup", file, "--data-dir", dir)
	does(exitFailed, "is in use by process", "restore", file, "--data-dir", dir)
	stop()

	does(exitDone, "nothing was changed", "restore", "--dry-run", file, "--data-dir", other)
	if _, err := os.Lstat(other); !os.IsNotExist(err) {
		t.Errorf("--dry-run has made the directory: %v", err)
	}
	does(exitDone, "restored into "+other+": start its server with --encryption-provider-config and its file, which no backup has: "+
		"there are encrypted secrets\n", "restore", file, "--data-dir", other)
	s = apiservertest.StartServer(t, at(other))
	got, err := maps().Get(t.Context(), "kept", metav1.GetOptions{})
	if err != nil || got.UID != made.UID || got.Data["key"] != "value" {
		t.Errorf("restored: %v, %v", got, err)
	}
	for _, args := range [][]string{{"backup"}, {"backup", "a", "b"}, {"restore"}, {"restore", "a", "b"}} {
		does(exitUsage, "which file?", args...)
	}
}
