package volumes

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/fairlead/fairlead/internal/runner/values"
)

func TestVolumeFiles(t *testing.T) {
	unowned := Owner{uid: -1, gid: -1}
	dir := filepath.Join(t.TempDir(), "v")
	for _, files := range []map[string]file{
		{"a": {data: []byte("1")}, "sub/b": {data: []byte("2"), mode: new(int32(0o400))}},
		{"a": {data: []byte("3")}},
	} {
		if err := writeFiles(dir, files, new(int32(0o640)), unowned); err != nil {
			t.Fatal(err)
		}
		for name, f := range files {
			if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != string(f.data) {
				t.Errorf("%s: %q, %v", name, b, err)
			}
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "sub/b")); err == nil {
		t.Error("a file that is no more is still there")
	}
	if st, err := os.Stat(filepath.Join(dir, "a")); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	// What a group may read at once stays as it is when nothing has changed.
	link := ""
	for range 2 {
		if err := writeFiles(dir, map[string]file{"c": {}}, new(int32(0o400)), Owner{uid: -1, gid: os.Getegid(), more: 0o440}); err != nil {
			t.Fatal(err)
		}
		st, err1 := os.Stat(filepath.Join(dir, "c"))
		to, err2 := os.Readlink(filepath.Join(dir, dataLink))
		if err1 != nil || err2 != nil || st.Mode().Perm() != 0o440 || link != "" && to != link {
			t.Errorf("%v, %v, %v; the files are in %s, before in %q", st.Mode(), err1, err2, to, link)
		}
		link = to
	}
	if err := writeFiles(dir, map[string]file{"../out": {}}, nil, unowned); err == nil {
		t.Error("a file outside of the volume was written")
	}
	c := &corev1.Container{VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: "/mnt", SubPath: "../x"}}}
	if _, err := Binds(&corev1.PodSpec{}, c, map[string]string{"v": dir}, nil); err == nil {
		t.Error("a subPath outside of the volume was taken")
	}
}

func TestResourcesInVolumes(t *testing.T) {
	f := values.Facts{Pod: &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main",
		Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")}}}}}}}
	item := corev1.DownwardAPIVolumeFile{Path: "memory", ResourceFieldRef: &corev1.ResourceFieldSelector{
		ContainerName: "main", Resource: "limits.memory", Divisor: resource.MustParse("1Mi"),
	}}
	files, err := downward(f, []corev1.DownwardAPIVolumeFile{item})
	if err != nil || string(files["memory"].data) != "64" {
		t.Errorf("%q, %v; want 64", files["memory"].data, err)
	}
	item.ResourceFieldRef.ContainerName = ""
	if _, err := downward(f, []corev1.DownwardAPIVolumeFile{item}); err == nil || !strings.Contains(err.Error(), "containerName is required") {
		t.Errorf("without a container: %v", err)
	}
}

// Volumes in volumes have their places there, which stay when files change; a directory of the machine gets none.
func TestNestedVolumes(t *testing.T) {
	base := t.TempDir()
	paths := map[string]string{"files": base + "/files", "dir": base + "/dir", "machine": base + "/machine"}
	for _, p := range []string{paths["dir"], paths["machine"]} {
		if err := os.Mkdir(p, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	unowned := Owner{uid: -1, gid: -1}
	if err := writeFiles(paths["files"], map[string]file{"a": {data: []byte("1")}, "b": {}}, nil, unowned); err != nil {
		t.Fatal(err)
	}
	pod := &corev1.PodSpec{Volumes: []corev1.Volume{
		{Name: "files", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}},
		{Name: "dir", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "machine", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}},
	}}
	c := &corev1.Container{VolumeMounts: []corev1.VolumeMount{
		{Name: "files", MountPath: "/files"}, {Name: "dir", MountPath: "/files/in/dir"},
		{Name: "dir", MountPath: "/dir/", SubPath: "sub"}, {Name: "files", MountPath: "/dir/x/file", SubPath: "a"},
		{Name: "machine", MountPath: "/machine"}, {Name: "dir", MountPath: "/machine/dir"},
	}}
	if _, err := Binds(pod, c, paths, nil); err != nil {
		t.Fatal(err)
	}
	if err := writeFiles(paths["files"], map[string]file{"a": {data: []byte("2")}}, nil, unowned); err != nil {
		t.Fatal(err)
	}
	for path, dir := range map[string]bool{"files/in/dir": true, "dir/sub/x/file": false} {
		if st, err := os.Stat(filepath.Join(base, path)); err != nil || st.IsDir() != dir {
			t.Errorf("%s: %v, %v", path, st, err)
		}
	}
	for _, path := range []string{"machine/dir", "files/b"} {
		if _, err := os.Lstat(filepath.Join(base, path)); err == nil {
			t.Errorf("%s is there", path)
		}
	}
}
