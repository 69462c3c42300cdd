package runner_test

import (
	"bytes"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// What a container writes to its terminationMessagePath stands in its status, of each of
// its last two attempts, and nothing of it on the machine.
func TestTerminationMessage(t *testing.T) {
	const onMachine = "/dev/termination-log"
	// In a container of Kubernetes the file exists, and is that of the container of this test.
	before, absent := os.ReadFile(onMachine)
	c := newCluster(t, nil)
	p := pod("message", `echo "attempt says $(cat /proc/sys/kernel/random/boot_id | wc -c)" > /dev/termination-log; exit 3`)
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	other := p.Spec.Containers[0]
	other.Name, other.TerminationMessagePath = "other", "/var/messages/of/this.txt"
	other.Command = []string{"sh", "-c", "echo other > /var/messages/of/this.txt; test -c /dev/null && echo > /dev/null"}
	volume := other
	volume.Name, volume.TerminationMessagePath = "volume", "/mnt/message"
	volume.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/mnt"}}
	volume.Command = []string{"sh", "-c", "echo shared > /mnt/file; echo volume > /mnt/message"}
	logs := other
	logs.Name, logs.TerminationMessagePath, logs.TerminationMessagePolicy = "logs", "", corev1.TerminationMessageFallbackToLogsOnError
	logs.Command = []string{"sh", "-c", "for i in $(seq 200); do echo line $i; done; exit 1"}
	quiet := logs
	quiet.Name, quiet.Command = "quiet", []string{"sh", "-c", "echo fine"}
	long := other
	long.Name, long.TerminationMessagePath = "long", ""
	long.Command = []string{"sh", "-c", "head -c 100000 /dev/zero | tr '\\0' x > /dev/termination-log"}
	p.Spec.Volumes = []corev1.Volume{{Name: "v"}}
	p.Spec.Containers = append(p.Spec.Containers, other, volume, logs, quiet, long)
	c.create(p)
	got := c.until("message", "over", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	messages := map[string]string{}
	for _, s := range got.Status.ContainerStatuses {
		if s.State.Terminated == nil {
			t.Fatalf("%s: %+v", s.Name, s.State)
		}
		messages[s.Name] = s.State.Terminated.Message
	}
	for name, want := range map[string]string{
		"main": "attempt says 37\n", "other": "other\n", "volume": "volume\n", "quiet": "", "long": strings.Repeat("x", 4096),
	} {
		if messages[name] != want {
			t.Errorf("%s: message %q, want %q", name, messages[name], want)
		}
	}
	if m := messages["logs"]; !strings.HasSuffix(m, "line 199\nline 200\n") || strings.Contains(m, "line 120\n") || len(m) > 2048 {
		t.Errorf("logs: message %q, want the last 80 lines of the log", m)
	}
	if now, err := os.ReadFile(onMachine); !bytes.Equal(now, before) || (err == nil) != (absent == nil) {
		t.Errorf("%s of the machine is %q, %v; before it was %q, %v", onMachine, now, err, before, absent)
	}
	for _, path := range []string{"/var/messages"} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is on the machine", path)
		}
	}
}

// The message of the attempt before stays, also when the agent comes back.
func TestTerminationMessageOfTheLastAttempt(t *testing.T) {
	c := newCluster(t, nil)
	p := pod("again", `test -s /mnt/second && exec sleep 1000
		echo first > /dev/termination-log; echo > /mnt/second; exit 1`)
	p.Spec.Volumes = []corev1.Volume{{Name: "v"}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/mnt"}}
	c.create(p)
	last := func(p *corev1.Pod) bool {
		s := p.Status.ContainerStatuses
		return len(s) > 0 && s[0].State.Running != nil && s[0].LastTerminationState.Terminated != nil &&
			s[0].LastTerminationState.Terminated.Message == "first\n"
	}
	c.until("again", "restarted with its message", last)
	c.stop()
	c.start()
	await(t, "adoption", func() bool { return c.r.Healthy() == nil })
	c.ready("again")
	if p := c.get("again"); !last(p) {
		t.Errorf("after the agent came back: %+v, want the message of the last attempt", p.Status.ContainerStatuses[0])
	}
}
