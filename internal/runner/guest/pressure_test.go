package guest_test

import (
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/agent"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// pressure has a Pod without limits fill the disk of the node's state, and another one the
// memory: the machine says so, its other Pods stay, and when what filled them has been
// deleted there are new Pods.
func (m *machine) pressure() {
	t := m.t
	t.Helper()
	conditions := agent.Pressure(os.DirFS("/"), func() (fileio.Space, error) { return fileio.SpaceOf(m.state) })
	memory, disk := conditions[0], conditions[1]
	for _, c := range conditions {
		if c := c(); c.Status != corev1.ConditionFalse {
			t.Errorf("before: %+v", c)
		}
	}
	fill := func(name string, medium corev1.StorageMedium, pressed func() corev1.NodeCondition) {
		m.pod("default", name, "while head -c 16000000 /dev/zero >> /mnt/file; do sleep 0.02; done; sleep 600", nil, func(s *corev1.PodSpec) {
			s.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: medium}}}}
			s.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/mnt"}}
		})
		p := m.until("default", name, "running", running)
		for deadline := time.Now().Add(patience); pressed().Status != corev1.ConditionTrue; <-time.After(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: the condition is %+v", name, pressed())
			}
		}
		m.freeze(filepath.Join(groups, "fairlead-unrequested/*-"+string(p.UID), "pod"), true) // before it takes what the test needs
		m.delete("default", name)
	}
	fill("disk", corev1.StorageMediumDefault, disk)
	fill("memory", corev1.StorageMediumMemory, memory) // which is faster than the memory of a process
	m.pod("default", "after", "sleep 600", nil)
	m.until("default", "after", "running", running)
	if p := m.until("default", "beside", "running", running); p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Error("the other Pod was started again")
	}
}
