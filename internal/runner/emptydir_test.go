package runner_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// emptyDir gives p a volume at /mnt.
func emptyDir(p *corev1.Pod, medium corev1.StorageMedium, limit string) *corev1.Pod {
	p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
		EmptyDir: &corev1.EmptyDirVolumeSource{Medium: medium, SizeLimit: new(resource.MustParse(limit))},
	}}}
	for i := range p.Spec.Containers {
		p.Spec.Containers[i].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/mnt"}}
	}
	return p
}

// A volume in memory takes no more than its limit, is one for all containers of the Pod
// and their restarts, and is gone with the Pod, though its object stays.
func TestEmptyDirInMemory(t *testing.T) {
	c := newCluster(t, nil)
	for _, confined := range []bool{false, true} {
		name := "memory"
		p := pod(name, `echo x >> /mnt/starts; stat -f -c %T /mnt; head -c 4000000 /dev/zero > /mnt/file; stat -c %s /mnt/file
			rm /mnt/file; if [ $(wc -l < /mnt/starts) = 1 ]; then exit 1; fi; touch /mnt/done`)
		p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
		other := p.Spec.Containers[0]
		other.Name, other.Command = "other", []string{"sh", "-c", "until test -e /mnt/done; do sleep 0.02; done"}
		p.Spec.Containers = append(p.Spec.Containers, other)
		p = emptyDir(p, corev1.StorageMediumMemory, "1Mi")
		if confined {
			p.Namespace = "level-memory"
			if _, err := c.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
				Name: p.Namespace, Labels: map[string]string{"pod-security.kubernetes.io/enforce": "baseline"},
			}}, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
				t.Fatal(err)
			}
		}
		p = c.create(p)
		var got *corev1.Pod
		await(t, "the end of the Pod", func() bool {
			var err error
			if got, err = c.client.CoreV1().Pods(p.Namespace).Get(t.Context(), name, metav1.GetOptions{}); err != nil {
				t.Fatal(err)
			}
			return got.Status.Phase == corev1.PodSucceeded
		})
		for attempt := range 2 {
			log := c.logOf(got, attempt)
			if !strings.Contains(log, "tmpfs\n") || !strings.Contains(log, "No space left") || !strings.Contains(log, "F 10") {
				t.Errorf("confined %v, attempt %d: %s", confined, attempt, log)
			}
		}
		await(t, "the end of the volume", func() bool {
			b, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil {
				t.Fatal(err)
			}
			return !strings.Contains(string(b), string(p.UID))
		})
		now := metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
		if err := c.client.CoreV1().Pods(p.Namespace).Delete(t.Context(), name, now); err != nil {
			t.Fatal(err)
		}
		await(t, "the end of the state", func() bool {
			_, err := os.Stat(filepath.Join(c.state, "pods", string(p.UID)))
			return os.IsNotExist(err)
		})
	}
}

// A Pod whose volume on the disk is larger than its limit is evicted, with kubelet's
// words, and one that keeps to it runs on.
func TestEmptyDirOverItsLimit(t *testing.T) {
	c := newCluster(t, nil)
	const wait = "; trap 'exit 0' TERM; while :; do sleep 0.02; done"
	c.create(emptyDir(pod("small", "head -c 900000 /dev/zero > /mnt/file"+wait), "", "1Mi"))
	c.create(emptyDir(pod("large", "mkdir -p /mnt/a/b; head -c 3000000 /dev/zero > /mnt/a/b/file"+wait), "", "1Mi"))
	got := c.until("large", "evicted", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	const message = `Usage of EmptyDir volume "v" exceeds the limit "1Mi". `
	if got.Status.Reason != "Evicted" || got.Status.Message != message || c.record(got, 0).Process.Alive() {
		t.Errorf("status %+v", got.Status)
	}
	await(t, "the Event", func() bool {
		return strings.Contains(c.events("large"), "Warning Evicted: "+strings.TrimSpace(message))
	})
	c.until("small", "running", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
}
