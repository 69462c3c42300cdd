package runner_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/testbed"
)

// held is what Pods take of an agent and its machine.
type held struct{ files, goroutines, mounts, processes, devices, directories int }

func (c *cluster) held() held {
	c.t.Helper()
	files, _ := os.ReadDir("/proc/self/fd")
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	devices, err := link.Devices()
	if err != nil {
		c.t.Fatal(err)
	}
	directories, _ := filepath.Glob(c.state + "/pods/*")
	return held{
		files: len(files), goroutines: runtime.NumGoroutine(), mounts: bytes.Count(mounts, []byte("\n")),
		processes: len(process.Children(os.Getpid())), devices: len(devices), directories: len(directories),
	}
}

// short runs n Pods that end at once, ten at a time, half of them confined, and deletes
// them.
func (c *cluster) short(round string, n int) {
	c.t.Helper()
	for begin := 0; begin < n; begin += 10 {
		var batch []*corev1.Pod
		for i := begin; i < min(n, begin+10); i++ {
			p := pod(fmt.Sprintf("short-%s-%d", round, i), "echo done")
			p.Spec.RestartPolicy = corev1.RestartPolicyNever
			if i%2 == 0 {
				p.Namespace = c.namespace("baseline")
			}
			batch = append(batch, c.create(p))
		}
		for _, p := range batch {
			await(c.t, "the end of "+p.Name, func() bool { return c.again(p).Status.Phase == corev1.PodSucceeded })
			if err := c.client.CoreV1().Pods(p.Namespace).Delete(c.t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
				c.t.Fatal(err)
			}
		}
		for _, p := range batch {
			await(c.t, "the removal of "+p.Name, func() bool {
				_, err := c.client.CoreV1().Pods(p.Namespace).Get(c.t.Context(), p.Name, metav1.GetOptions{})
				return apierrors.IsNotFound(err)
			})
		}
	}
}

// Pods that come and go leave nothing with the agent or on its machine.
func TestShortPodsLeaveNothing(t *testing.T) {
	c := newCluster(t, nil)
	c.short("warm", 10)
	before := c.held()
	c.short("all", 30)
	// What belongs to the API server and its client, in this process, varies a little.
	const some = 20
	var after held
	for deadline := time.Now().Add(testbed.Patience); ; <-time.After(20 * time.Millisecond) {
		after = c.held()
		if after.files < before.files+some && after.goroutines < before.goroutines+some && after.mounts == before.mounts &&
			after.processes == 0 && after.devices == 0 && after.directories == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v, after 30 Pods %+v", before, after)
		}
	}
	t.Logf("%+v, after 30 Pods %+v", before, after)
	if left, _ := filepath.Glob(c.state + "/*"); strings.Count(strings.Join(left, " "), "short") > 0 {
		t.Errorf("left in the state directory: %v", left)
	}
}
