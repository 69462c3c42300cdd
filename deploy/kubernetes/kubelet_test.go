package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// kubelet runs the Pods of nodes: the program of an image with the arguments, ConfigMaps, account and probe that the Pod
// has, as a process in the network namespace of the node, or in one with an address if the Pod has no hostNetwork.
type kubelet struct {
	*rig
	nodes    map[string]*testbed.Host
	dir      string            // of the Pods
	programs map[string]string // by image, or what is before its colon
	pods     map[types.UID]*process.Process
	ending   map[types.UID]bool // was sent SIGTERM
	probed   map[types.UID]time.Time
	logs     sync.Map // of the last process of a Pod, by namespace and name
}

const serviceAccountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

// startKubelet runs a kubelet of the rig's node and of others until the test ends; then it ends its processes.
func startKubelet(r *rig, programs map[string]string, others ...*testbed.Host) {
	r.Helper()
	k := &kubelet{rig: r, dir: r.TempDir(), programs: programs, pods: map[types.UID]*process.Process{}, ending: map[types.UID]bool{},
		probed: map[types.UID]time.Time{}}
	k.nodes = map[string]*testbed.Host{r.node.Name(): r.node}
	for _, h := range others {
		k.nodes[h.Name()] = h
	}
	r.mu.Lock()
	r.podLog = func(namespace, name string) (string, bool) {
		p, ok := k.logs.Load(namespace + "/" + name)
		if !ok {
			return "", false
		}
		return p.(*process.Process).Log(), true
	}
	r.mu.Unlock()
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			if err := k.sync(ctx); err != nil && ctx.Err() == nil {
				r.Logf("kubelet: %v", err)
			}
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
		for uid, p := range k.pods {
			p.End()
			if r.Failed() {
				r.Logf("pod %s %s\n%s", uid, p, p.Log())
			}
		}
	})
	r.Cleanup(func() { stop(); wg.Wait() })
}

// sync starts and ends Pods, and writes their status.
func (k *kubelet) sync(ctx context.Context) error {
	list, err := k.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var errs []error
	for i := range list.Items {
		if k.nodes[list.Items[i].Spec.NodeName] == nil {
			continue
		}
		errs = append(errs, k.syncPod(ctx, &list.Items[i]))
	}
	return errors.Join(errs...)
}

func (k *kubelet) syncPod(ctx context.Context, pod *corev1.Pod) error {
	p := k.pods[pod.UID]
	now := int64(0)
	switch {
	case pod.DeletionTimestamp != nil && p != nil && !p.Ended():
		if !k.ending[pod.UID] { // once: a second signal ends a server that still answers for a while
			k.ending[pod.UID] = true
			p.Signal(syscall.SIGTERM)
		}
		return nil
	case pod.DeletionTimestamp != nil:
		if k.beforeRemoval != nil {
			k.beforeRemoval(pod)
		}
		err := k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
		if apierrors.IsNotFound(err) {
			err = nil
		}
		return err
	case p == nil && k.program(pod) == "":
		return k.report(ctx, pod, corev1.PodPending, false, corev1.ContainerState{
			Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "no such image"},
		})
	case p == nil:
		p, err := k.start(ctx, pod)
		if err == nil {
			k.pods[pod.UID] = p
			k.logs.Store(pod.Namespace+"/"+pod.Name, p)
		}
		return err
	case p.Ended() && pod.Spec.RestartPolicy == corev1.RestartPolicyNever:
		ended, phase := &corev1.ContainerStateTerminated{ExitCode: int32(p.Code())}, corev1.PodSucceeded
		if p.Code() != 0 {
			phase, ended.Message = corev1.PodFailed, p.Log()
		}
		return k.report(ctx, pod, phase, false, corev1.ContainerState{Terminated: ended})
	case p.Ended():
		k.Logf("%s ended and is started again:\n%s", pod.Name, p.Log())
		delete(k.pods, pod.UID)
		return nil
	}
	return k.report(ctx, pod, corev1.PodRunning, k.ready(ctx, pod), corev1.ContainerState{Running: &corev1.ContainerStateRunning{}})
}

// program is that of the first container, or none.
func (k *kubelet) program(pod *corev1.Pod) string {
	image := pod.Spec.Containers[0].Image
	name, _, _ := strings.Cut(image, ":")
	return cmp.Or(k.programs[image], k.programs[name])
}

// host is where a Pod runs.
func (k *kubelet) host(pod *corev1.Pod) *testbed.Host {
	node := k.nodes[pod.Spec.NodeName]
	if pod.Spec.HostNetwork {
		return node
	}
	return node.Pod("p" + string(pod.UID)[:8])
}

// probePeriod is how often a Pod that is ready is asked whether it still is: more often than the manifests have it.
const probePeriod = time.Second

// ready asks the readiness probe.
func (k *kubelet) ready(ctx context.Context, pod *corev1.Pod) bool {
	c := &pod.Spec.Containers[0]
	if c.ReadinessProbe == nil {
		return true
	}
	isReady := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	if isReady && time.Since(k.probed[pod.UID]) < probePeriod {
		return true
	}
	k.probed[pod.UID] = time.Now()
	get := c.ReadinessProbe.HTTPGet
	port := get.Port.String()
	for _, named := range c.Ports {
		if named.Name == port {
			port = fmt.Sprint(named.ContainerPort)
		}
	}
	_, err := process.Try(k.nodes[pod.Spec.NodeName].Command(ctx, "curl", "-sf", "-m", "2",
		fmt.Sprintf("http://%s:%s%s", cmp.Or(get.Host, k.host(pod).Addr4().String()), port, get.Path)))
	return err == nil
}

func (k *kubelet) report(ctx context.Context, pod *corev1.Pod, phase corev1.PodPhase, ready bool, state corev1.ContainerState) error {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	if pod.Status.Phase == phase && len(pod.Status.Conditions) > 0 && len(pod.Status.ContainerStatuses) > 0 &&
		slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == status }) {
		return nil
	}
	pod.Status.Phase = phase
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status, LastTransitionTime: metav1.Now()}}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: pod.Spec.Containers[0].Name, Ready: ready, State: state}}
	if !pod.Spec.HostNetwork {
		pod.Status.PodIP = k.host(pod).Addr4().String()
		pod.Status.PodIPs = []corev1.PodIP{{IP: pod.Status.PodIP}}
	}
	_, err := k.client.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return err
}

// start starts the first container.
func (k *kubelet) start(ctx context.Context, pod *corev1.Pod) (*process.Process, error) {
	dir, err := os.MkdirTemp(k.dir, "pod")
	if err != nil {
		return nil, err
	}
	paths, err := k.volumes(ctx, pod, dir)
	if err != nil {
		return nil, err
	}
	c := &pod.Spec.Containers[0]
	args := slices.Clone(c.Args)
	if len(c.Command) > 0 {
		args = append(slices.Clone(c.Command[1:]), args...)
	}
	for i := range args {
		args[i] = paths.Replace(strings.ReplaceAll(args[i], "$(NODE_NAME)", pod.Spec.NodeName))
	}
	cmd := k.host(pod).Command(context.Background(), k.program(pod), args...)
	cmd.Env = []string{"KUBECONFIG=" + filepath.Join(dir, kubeconfigFile), "HOME=" + dir, "PATH=" + os.Getenv("PATH")}
	for _, e := range c.Env {
		value := e.Value
		if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil {
			value = map[string]string{
				"metadata.name": pod.Name, "metadata.namespace": pod.Namespace,
				"spec.nodeName": pod.Spec.NodeName, "status.podIP": k.host(pod).Addr4().String(),
				"status.hostIP": k.nodes[pod.Spec.NodeName].Addr4().String(),
			}[e.ValueFrom.FieldRef.FieldPath]
		}
		cmd.Env = append(cmd.Env, e.Name+"="+paths.Replace(value))
	}
	return process.Begin(k.T, filepath.Join(dir, "log"), cmd)
}

// kubeconfigFile is in the directory of a Pod.
const kubeconfigFile = "kubeconfig"

// volumes writes the ConfigMaps, the Secrets, the account and a kubeconfig of a Pod, and returns what replaces paths of the container.
func (k *kubelet) volumes(ctx context.Context, pod *corev1.Pod, dir string) (*strings.Replacer, error) {
	account := filepath.Join(dir, "account")
	replace := map[string]string{serviceAccountDir: account}
	for i, m := range pod.Spec.Containers[0].VolumeMounts {
		if m.MountPath != serviceAccountDir { // which admission has added
			replace[m.MountPath] = filepath.Join(dir, fmt.Sprint("mount", i))
		}
	}
	var pairs []string
	for _, from := range slices.Backward(slices.Sorted(maps.Keys(replace))) {
		pairs = append(pairs, from, replace[from])
	}
	paths := strings.NewReplacer(pairs...)
	token, err := k.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName,
		&authv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	write := func(file, text string) {
		err = errors.Join(err, os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(text), 0o600))
	}
	write(filepath.Join(account, "token"), token.Status.Token)
	write(filepath.Join(account, "ca.crt"), string(k.gatewayCA()))
	for _, v := range pod.Spec.Volumes {
		at := slices.IndexFunc(pod.Spec.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == v.Name })
		if at >= 0 && v.Secret != nil {
			secret, gone := k.client.CoreV1().Secrets(pod.Namespace).Get(ctx, v.Secret.SecretName, metav1.GetOptions{})
			if gone != nil {
				return nil, gone
			}
			for name, data := range secret.Data {
				write(filepath.Join(dir, fmt.Sprint("mount", at), itemPath(v.Secret.Items, name)), string(data))
			}
		}
		if v.ConfigMap == nil || at < 0 || v.ConfigMap.Optional != nil && *v.ConfigMap.Optional {
			continue
		}
		config, gone := k.client.CoreV1().ConfigMaps(pod.Namespace).Get(ctx, v.ConfigMap.Name, metav1.GetOptions{})
		if gone != nil {
			return nil, gone
		}
		for name, text := range config.Data {
			write(filepath.Join(dir, fmt.Sprint("mount", at), itemPath(v.ConfigMap.Items, name)), paths.Replace(text))
		}
	}
	return paths, errors.Join(err, k.kubeconfig(filepath.Join(dir, kubeconfigFile), token.Status.Token))
}

// itemPath is where a volume has a key.
func itemPath(items []corev1.KeyToPath, key string) string {
	for _, item := range items {
		if item.Key == key {
			return item.Path
		}
	}
	return key
}
