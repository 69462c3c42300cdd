package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// tenant has Pods that are not allowed to be privileged.
const tenant = "tenant"

func makeTenant(ctx context.Context, client kubernetes.Interface) error {
	_, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: tenant, Labels: map[string]string{"pod-security.kubernetes.io/enforce": "baseline"},
	}}, metav1.CreateOptions{})
	return err
}

func tenantPod(name string, command ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: tenant},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: new(int64(0)), AutomountServiceAccountToken: new(false),
			Containers: []corev1.Container{{Name: "main", Image: "host", Command: command}},
		},
	}
}

// until waits for a Pod to be in a phase, by a watch, and returns when it was.
func (u *standalone) until(ctx context.Context, name string, phase corev1.PodPhase) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	w, err := u.client.CoreV1().Pods(tenant).Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	if err != nil {
		return time.Time{}, err
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		if p, ok := e.Object.(*corev1.Pod); ok && p.Status.Phase == phase {
			return time.Now(), nil
		}
	}
	return time.Time{}, errors.Join(fmt.Errorf("pod %s is not %s after a minute", name, phase), u.alive())
}

// shims are the processes that hold Pods, children of the agent.
func (u *standalone) shims() ([]*process, error) {
	var out []*process
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range stats {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:]) // proc_pid_stat(5)
		if len(fields) < 2 || string(fields[1]) != strconv.Itoa(u.cmd.Process.Pid) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return nil, err
		}
		p, err := os.FindProcess(pid)
		if err != nil {
			return nil, err
		}
		out = append(out, &process{name: "shim", cmd: &exec.Cmd{Process: p}})
	}
	return out, nil
}

// runPods starts Pods on an idle node one after the other, and reads the memory of all
// that is not their own processes.
func (b *bench) runPods(ctx context.Context) (figures []figure, err error) {
	up, err := b.startUp(ctx, makeTenant)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, up.end(ctx)) }()
	n := b.few(200, 5)
	var took []float64
	for i := range n {
		name := fmt.Sprint("pod-", i)
		begin := time.Now()
		if _, err := up.client.CoreV1().Pods(tenant).Create(ctx, tenantPod(name, "sleep", "3600"), metav1.CreateOptions{}); err != nil {
			return nil, err
		}
		at, err := up.until(ctx, name, corev1.PodRunning)
		if err != nil {
			return nil, err
		}
		took = append(took, milliseconds.in(at.Sub(begin)))
	}
	if err := up.settle(30 * time.Second); err != nil {
		b.say("%v", err)
	}
	sum, err := up.memory()
	if err != nil {
		return nil, err
	}
	shims, err := up.shims()
	if err != nil || len(shims) != n {
		return nil, fmt.Errorf("%d shims for %d Pods: %w", len(shims), n, err)
	}
	ofShims := 0.0
	for _, s := range shims {
		one, err := s.memory()
		if err != nil {
			return nil, err
		}
		ofShims += one
	}
	return []figure{
		unpaired("a Pod from its creation to running, half of them at most", milliseconds, percentile(took, 0.5), expectation{below: 100}),
		unpaired("the same, p99", milliseconds, percentile(took, 0.99), expectation{below: 100}),
		unpaired(fmt.Sprintf("memory of fairlead up and %d Pods' shims", n), megabytes, (sum+ofShims)/1e6, expectation{below: 600}),
		unpaired("of which for each Pod", megabytes, ofShims/1e6/float64(n), expectation{below: 2.1}),
	}, nil
}

// leftovers counts what an agent and its machine hold for Pods.
type leftovers struct{ files, mounts, shims, directories, devices, groups int }

func (u *standalone) leftovers() (leftovers, error) {
	at := fmt.Sprintf("/proc/%d/", u.cmd.Process.Pid)
	files, err := os.ReadDir(at + "fd")
	if err != nil {
		return leftovers{}, err
	}
	mounts, err1 := os.ReadFile(at + "mountinfo")
	devices, err2 := os.ReadFile(at + "net/dev")
	shims, err3 := u.shims()
	directories, _ := filepath.Glob(filepath.Join(u.cmd.Dir, "data", "*", "pods", "*"))
	groups, _ := filepath.Glob("/sys/fs/cgroup/fairlead*/*-*")
	return leftovers{
		files: len(files), mounts: bytes.Count(mounts, []byte("\n")), shims: len(shims), directories: len(directories),
		devices: strings.Count(string(devices), "\n"), groups: len(groups),
	}, errors.Join(err1, err2, err3)
}

// runShortPods runs Pods that end at once, ten at a time, and deletes them.
func (b *bench) runShortPods(ctx context.Context) (figures []figure, err error) {
	up, err := b.startUp(ctx, makeTenant)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, up.end(ctx)) }()
	some := func(prefix string, n int) error {
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(10)
		for i := range n {
			g.Go(func() error {
				name := fmt.Sprint(prefix, i)
				pods := up.client.CoreV1().Pods(tenant)
				if _, err := pods.Create(ctx, tenantPod(name, "true"), metav1.CreateOptions{}); err != nil {
					return err
				}
				if _, err := up.until(ctx, name, corev1.PodSucceeded); err != nil {
					return err
				}
				return pods.Delete(ctx, name, metav1.DeleteOptions{})
			})
		}
		return g.Wait()
	}
	if err := some("warm-", 10); err != nil {
		return nil, err
	}
	if err := up.settle(30 * time.Second); err != nil {
		b.say("%v", err)
	}
	before, err := up.leftovers()
	if err != nil {
		return nil, err
	}
	memory, err := up.memory()
	if err != nil {
		return nil, err
	}
	n := b.few(1000, 10)
	begin := time.Now()
	if err := some("short-", n); err != nil {
		return nil, err
	}
	took := time.Since(begin)
	if err := up.settle(30 * time.Second); err != nil {
		b.say("%v", err)
	}
	after, err := up.leftovers()
	if err != nil {
		return nil, err
	}
	more, err := up.memory()
	b.say("before %+v, after %+v", before, after)
	left := func(what string, before, after int) figure {
		return unpaired(what+" left of short Pods", pieces, float64(max(0, after-before)), expectation{below: 1})
	}
	files := left("open files", before.files, after.files)
	files.want.below = 10 // connections come and go
	return []figure{
		unpaired(fmt.Sprintf("%d short Pods, ten at a time", n), perSecond, float64(n)/took.Seconds(), expectation{}),
		left("shims", before.shims, after.shims), left("mounts", before.mounts, after.mounts),
		left("directories", before.directories, after.directories),
		left("network devices", before.devices, after.devices), left("control groups", before.groups, after.groups), files,
		unpaired("more memory of fairlead up after them", megabytes, (more-memory)/1e6, expectation{}),
	}, err
}
