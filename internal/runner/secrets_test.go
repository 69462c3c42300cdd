package runner_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Files of Secrets, tokens and fields are in memory and never on the disk, so that a power cut leaves none. The next
// agent goes on with them, and they go with the Pod.
func TestSecretsAreNotOnTheDisk(t *testing.T) {
	c := newCluster(t, nil)
	secrets := c.client.CoreV1().Secrets("default")
	secret, err := secrets.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "key"}, StringData: map[string]string{"key": "first"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = secrets.Delete(context.Background(), "key", metav1.DeleteOptions{}) })
	p := pod("holder", `while :; do cat /mnt/key; echo; cat /opt/uid; echo; sleep 0.02; done`)
	uid := []corev1.DownwardAPIVolumeFile{{Path: "uid", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.uid"}}}
	p.Spec.Volumes = []corev1.Volume{
		{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "key"}}},
		{Name: "fields", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: uid}}},
		{Name: "both", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "key"}}},
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}},
		}}}},
	}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{
		{Name: "secret", MountPath: "/mnt"}, {Name: "fields", MountPath: "/opt"}, {Name: "both", MountPath: "/srv"},
	}
	c.create(p)
	got := c.ready("holder")
	dir := filepath.Join(c.state, "pods", string(got.UID), "volumes")
	inMemory := func(when string) {
		t.Helper()
		disk := t.TempDir() // shows what lies below the mounts
		if err := unix.Mount(dir, disk, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Unmount(disk, unix.MNT_DETACH) }()
		for _, v := range got.Spec.Volumes { // with that of the service account's token
			var fs unix.Statfs_t
			if err := unix.Statfs(filepath.Join(dir, v.Name), &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
				t.Errorf("%s: volume %s is on a file system of type %#x, %v", when, v.Name, fs.Type, err)
			}
			entries, err := os.ReadDir(filepath.Join(disk, v.Name))
			if err != nil || len(entries) > 0 {
				t.Errorf("%s: volume %s has %v on the disk, %v", when, v.Name, entries, err)
			}
			if now, err := os.ReadDir(filepath.Join(dir, v.Name)); err != nil || len(now) == 0 {
				t.Errorf("%s: volume %s is empty, %v", when, v.Name, err)
			}
		}
	}
	inMemory("at first")
	c.stop()
	c.start()
	c.ready("holder")
	inMemory("with the next agent")
	secret.StringData = map[string]string{"key": "second"}
	if _, err := secrets.Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "the new Secret in the Pod", func() bool { return strings.Contains(c.logOf(got, 0), "second\n") })
	inMemory("after a change")
	c.delete("holder", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
	c.untilGone("holder")
	await(t, "the end of the volumes", func() bool {
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		_, err = os.Stat(dir)
		return os.IsNotExist(err) && !strings.Contains(string(mounts), dir)
	})
}
