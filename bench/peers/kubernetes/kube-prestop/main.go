// Command kube-prestop runs the preStop hooks of a Pod with the code of the published kubelet of Kubernetes, without a container
// runtime: for tests of what answers the hooks. It reads the Pod from standard input, as JSON, runs the hooks of all containers
// at once, and exits with 1 if one failed.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	kubecontainer "k8s.io/kubernetes/pkg/kubelet/container"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// status is what a kubelet's runtime knows of the Pod.
type status struct{ pod *v1.Pod }

// GetPod returns the Pod as the runtime has it.
func (s status) GetPod(context.Context, types.UID) (*kubecontainer.Pod, error) {
	return &kubecontainer.Pod{ID: s.pod.UID, Name: s.pod.Name, Namespace: s.pod.Namespace}, nil
}

// GetPodStatus returns the addresses of the Pod.
func (s status) GetPodStatus(context.Context, *kubecontainer.Pod) (*kubecontainer.PodStatus, error) {
	out := &kubecontainer.PodStatus{ID: s.pod.UID, Name: s.pod.Name, Namespace: s.pod.Namespace}
	for _, ip := range s.pod.Status.PodIPs {
		out.IPs = append(out.IPs, ip.IP)
	}
	return out, nil
}

func main() {
	var pod v1.Pod
	if err := json.NewDecoder(os.Stdin).Decode(&pod); err != nil {
		fmt.Fprintln(os.Stderr, "cannot read the Pod:", err)
		os.Exit(2)
	}
	runner := lifecycle.NewHandlerRunner(&http.Client{}, nil, status{&pod}, nil)
	var wg sync.WaitGroup
	failed := make([]error, len(pod.Spec.Containers))
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		if c.Lifecycle == nil || c.Lifecycle.PreStop == nil {
			continue
		}
		wg.Go(func() {
			_, failed[i] = runner.Run(context.Background(), kubecontainer.ContainerID{}, &pod, c, c.Lifecycle.PreStop)
		})
	}
	wg.Wait()
	code := 0
	for i, err := range failed {
		if err != nil {
			fmt.Fprintf(os.Stderr, "container %s: %v\n", pod.Spec.Containers[i].Name, err)
			code = 1
		}
	}
	os.Exit(code)
}
