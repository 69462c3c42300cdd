package runner_test

import (
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/runner"
)

// Volumes are mounted at any path, also at those that the machine does not have and in each other, and nothing of it is on
// the machine.
func TestMountPathsThatTheMachineLacks(t *testing.T) {
	armed(t)
	c := newCluster(t, func(o *runner.Options) { o.Hide = []string{filepath.Dir(o.StateDir)} })
	const script = `set -e
		echo own > /data-of-a-test/file
		echo inner > /data-of-a-test/in/side/file
		for f in /srv/x/y/file /usr/share/nothing-of-a-test/there/name /file-of-a-test /data-of-a-test/in/side/file \
			/fields-of-a-test/name /fields-of-a-test/sub/dir/file; do echo $(cat $f); done
		ls /data-of-a-test; ls -d /etc/passwd /usr/bin`
	const want = "own\nattack\nattack\ninner\nattack\ninner\nfile\nin\n/etc/passwd\n/usr/bin\n"
	var lists [2][]os.DirEntry
	read := func(i int) {
		var err error
		if lists[i], err = os.ReadDir("/"); err != nil {
			t.Fatal(err)
		}
	}
	read(0)
	for _, level := range []string{"baseline", "privileged"} {
		p := c.attack(level, func(p *corev1.Pod) {
			p.Labels = map[string]string{"name": "attack"}
			fields := corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{
				Path: "name", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels['name']"},
			}}}
			p.Spec.Volumes = append(p.Spec.Volumes,
				corev1.Volume{Name: "w", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
				corev1.Volume{Name: "fields", VolumeSource: corev1.VolumeSource{DownwardAPI: &fields}})
			main := &p.Spec.Containers[0]
			main.Command, main.Env = []string{"/bin/sh", "-c", script}, nil
			main.VolumeMounts = []corev1.VolumeMount{
				{Name: "fields", MountPath: "/file-of-a-test", SubPath: "name"},
				{Name: "w", MountPath: "/data-of-a-test/in/side"},
				{Name: "w", MountPath: "/fields-of-a-test/sub/dir", ReadOnly: true},
				{Name: "v", MountPath: "/data-of-a-test"},
				{Name: "v", MountPath: "/srv/x/y"},
				{Name: "fields", MountPath: "/usr/share/nothing-of-a-test/there"},
				{Name: "fields", MountPath: "/fields-of-a-test"},
			}
		})
		if out := c.outcome(p); out != want {
			t.Errorf("%s: %q, want %q", level, out, want)
		}
	}
	read(1)
	if len(lists[0]) != len(lists[1]) {
		t.Errorf("/ had %q, and has %q", lists[0], lists[1])
	}
	for _, path := range []string{"/data-of-a-test", "/srv/x", "/usr/share/nothing-of-a-test", "/file-of-a-test", "/fields-of-a-test"} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is on the machine", path)
		}
	}
}
