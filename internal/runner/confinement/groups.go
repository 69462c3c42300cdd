package confinement

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/cgroup"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/svc"
)

// cgroupTree is the name of the group that has the groups of Pods that request processors.
const cgroupTree = "fairlead"

// unrequestedTree is the name of the group of all other pods, beside it and not in it as kubelet's
// besteffort: a scheduler that is fair (CFS, EEVDF) lets a group that has not run lately go first
// when it wakes up, and one with a hog somewhere below has always run. In one tree a hog would
// make a Service's pod wait for milliseconds, however little the hog weighs (bench's run hogs).
const (
	unrequestedTree   = "fairlead-unrequested"
	unrequestedWeight = 50 // half of what cgroupTree weighs, and each group of the system's
)

// Groups has a group for each pod: PREFIX-UID, in it "shim" for the pod's shim and
// "pod", which has a group for each container.
type Groups struct {
	tree, unrequested *cgroup.Tree

	pids   int64  // see openCgroups
	prefix string // of this state directory: another agent may use the same tree
	Err    error  // why there is no tree
	// unprotected is why the kernel may kill the agent when memory is short.
	unprotected error
}

// protectedScore is kubelet's own oom_score_adj.
const protectedScore = -999

// OpenGroups returns the groups of the Pods of a state directory. pids bounds the processes of each confined Pod.
func OpenGroups(stateDir string, pids int64) *Groups {
	sum := sha256.Sum256([]byte(stateDir))
	c := &Groups{pids: pids, prefix: hex.EncodeToString(sum[:4]) + "-"}
	c.tree, c.Err = cgroup.Open(cgroupTree)
	if c.Err == nil {
		c.unrequested, c.Err = c.tree.Beside(unrequestedTree, cgroup.Limits{Weight: unrequestedWeight})
	}
	return c
}

// Pod is the group of a pod that has been added.
func (c *Groups) Pod(uid types.UID) cgroup.Group {
	if g := c.unrequested.Group(c.prefix + string(uid)); g.Exists() {
		return g
	}
	return c.tree.Group(c.prefix + string(uid))
}

// Containers is the group of all containers of a pod that has been added.
func (c *Groups) Containers(uid types.UID) cgroup.Group { return c.Pod(uid).Below("pod") }

// Add makes the groups of a pod and returns that of its shim, "" without a tree.
func (c *Groups) Add(pod *corev1.Pod) (string, error) {
	if c.Err != nil {
		return "", nil
	}
	g, l := c.tree.Group(c.prefix+string(pod.UID)), PodLimits(pod)
	if l.Weight == leastWeight {
		g = c.unrequested.Group(c.prefix + string(pod.UID))
	}
	if Confined(pod) {
		l.PIDs = c.pids
	}
	shim := g.Below("shim")
	err := errors.Join(g.Make(cgroup.Limits{Weight: l.Weight}, true), shim.Make(cgroup.Limits{}, false), g.Below("pod").Make(l, true))
	return shim.Dir(), err
}

// Container makes the group of a container and returns it, "" without a tree.
func (c *Groups) Container(uid types.UID, k *corev1.Container) (string, error) {
	if c.Err != nil {
		return "", nil
	}
	all := c.Containers(uid)
	if !all.Exists() { // a pod of a run that had no tree
		return "", nil
	}
	g := all.Below(k.Name)
	return g.Dir(), g.Make(limitsOf(k.Resources), false)
}

// Release lets systemd start the agent's unit again while pods live.
func (c *Groups) Release() error {
	if c.Err != nil {
		return nil
	}
	return c.tree.Release()
}

// Protect keeps the kernel from killing this process when memory is short, where it may.
func (c *Groups) Protect() error {
	c.unprotected = process.SetOOMScoreAdj(os.Getpid(), protectedScore)
	return c.unprotected
}

// Close closes the trees.
func (c *Groups) Close() {
	if c.Err == nil {
		c.unrequested.Close()
		c.tree.Close()
	}
}

// Remove ends the remaining processes of a Pod, and removes its groups.
func (c *Groups) Remove(ctx context.Context, uid types.UID) error {
	if c.Err != nil {
		return nil
	}
	g := c.Pod(uid)
	if !g.Exists() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	return errors.Join(g.Kill(ctx), g.Remove())
}

// Sweep removes the groups of pods that keep does not name.
func (c *Groups) Sweep(ctx context.Context, keep func(types.UID) bool) error {
	if c.Err != nil {
		return nil
	}
	var errs []error
	for _, name := range slices.Concat(c.tree.Names(), c.unrequested.Names()) {
		if uid, ours := strings.CutPrefix(name, c.prefix); ours && !keep(types.UID(uid)) {
			errs = append(errs, c.Remove(ctx, types.UID(uid)))
		}
	}
	return errors.Join(errs...)
}

// Condition is the Node condition PodsLimited.
func (c *Groups) Condition() corev1.NodeCondition {
	if c.Err != nil {
		return corev1.NodeCondition{
			Type: svc.PodsLimited, Status: corev1.ConditionFalse, Reason: "NoControlGroups",
			Message: "limits of memory, CPU and processes are not enforced: " + c.Err.Error(),
		}
	}
	message := "each Pod has a control group"
	if c.unprotected != nil {
		message += "; the agent is not protected when memory is short: " + c.unprotected.Error()
	}
	return corev1.NodeCondition{Type: svc.PodsLimited, Status: corev1.ConditionTrue, Reason: "ControlGroups", Message: message}
}

// Limited reports whether a limit of the pod is one that a control group enforces.
func Limited(pod *corev1.Pod) bool {
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if l := limitsOf(list[i].Resources); l.Memory > 0 || l.CPU > 0 {
				return true
			}
		}
	}
	return pod.Spec.Resources != nil && len(pod.Spec.Resources.Limits) > 0
}

// limitsOf turns resources into what a group is given, as kubelet does.
func limitsOf(r corev1.ResourceRequirements) cgroup.Limits {
	l := cgroup.Limits{Memory: r.Limits.Memory().Value(), CPU: r.Limits.Cpu().MilliValue()}
	request := r.Requests.Cpu().MilliValue()
	if _, ok := r.Requests[corev1.ResourceCPU]; !ok {
		request = l.CPU
	}
	l.Weight = weight(request)
	return l
}

// leastWeight is that of pods which request no processors.
const leastWeight = 1

// weight turns thousandths of a processor into a cpu.weight, by way of the shares of
// version 1, as the OCI runtimes under a kubelet do (runc 1.3.2, crun 1.23): a processor
// weighs 100, like a group without its own weight (opencontainers/cgroups,
// ConvertCPUSharesToCgroupV2Value; kubernetes/kubernetes#131216).
func weight(milli int64) int64 {
	shares := min(max(milli*1024/1000, 2), 262144)
	switch shares {
	case 2:
		return leastWeight
	case 262144:
		return 10_000
	}
	l := math.Log2(float64(shares))
	return int64(math.Ceil(math.Pow(10, (l*l+125*l)/612-7.0/34)))
}

// PodLimits are the limits of all containers together: of the pod itself if it has
// them, else the sums, where each container has one.
func PodLimits(pod *corev1.Pod) cgroup.Limits {
	var sum cgroup.Limits
	var request int64
	memory, cpu := true, true
	count := func(r corev1.ResourceRequirements) {
		l := limitsOf(r)
		sum.Memory, sum.CPU = sum.Memory+l.Memory, sum.CPU+l.CPU
		memory, cpu = memory && l.Memory > 0, cpu && l.CPU > 0
		if q, ok := r.Requests[corev1.ResourceCPU]; ok {
			request += q.MilliValue()
		} else {
			request += l.CPU
		}
	}
	for i := range pod.Spec.Containers {
		count(pod.Spec.Containers[i].Resources)
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if podspec.IsSidecar(c) {
			count(c.Resources)
			continue
		}
		// It runs before the others: the pod's limit is for the larger of both.
		l := limitsOf(c.Resources)
		memory, cpu = memory && l.Memory > 0, cpu && l.CPU > 0
		sum.Memory, sum.CPU = max(sum.Memory, l.Memory), max(sum.CPU, l.CPU)
	}
	if !memory {
		sum.Memory = 0
	}
	if !cpu {
		sum.CPU = 0
	}
	if r := pod.Spec.Resources; r != nil {
		if q, ok := r.Limits[corev1.ResourceMemory]; ok {
			sum.Memory = q.Value()
		}
		if q, ok := r.Limits[corev1.ResourceCPU]; ok {
			sum.CPU = q.MilliValue()
		}
		if q, ok := r.Requests[corev1.ResourceCPU]; ok {
			request = q.MilliValue()
		}
	}
	sum.Weight = weight(request)
	return sum
}

// OOMScoreAdj is kubelet's: a container that uses no more than it has requested
// outlives the ones that use more (pkg/kubelet/qos/policy.go). capacity is the machine's
// memory.
func OOMScoreAdj(pod *corev1.Pod, c *corev1.Container, capacity int64) int {
	switch QOSClass(pod) {
	case corev1.PodQOSGuaranteed:
		return -997
	case corev1.PodQOSBestEffort:
		return 1000
	}
	if capacity <= 0 {
		return 999
	}
	return int(min(max(1000-1000*c.Resources.Requests.Memory().Value()/capacity, 3), 999))
}

// MachineMemory is the machine's memory in bytes, 0 if unknown.
func MachineMemory() int64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	var kb int64
	if _, err := fmt.Sscanf(string(b), "MemTotal: %d kB", &kb); err != nil {
		return 0
	}
	return kb << 10
}

// QOSClass returns the class that the API server has set, or else derives it from
// requests and limits.
func QOSClass(pod *corev1.Pod) corev1.PodQOSClass {
	if pod.Status.QOSClass != "" {
		return pod.Status.QOSClass
	}
	guaranteed, any := true, false
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range list {
			for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
				req, hasReq := c.Resources.Requests[name]
				lim, hasLim := c.Resources.Limits[name]
				any = any || hasReq && !req.IsZero() || hasLim && !lim.IsZero()
				if !hasLim || lim.IsZero() || hasReq && req.Cmp(lim) != 0 {
					guaranteed = false
				}
			}
		}
	}
	switch {
	case !any:
		return corev1.PodQOSBestEffort
	case guaranteed:
		return corev1.PodQOSGuaranteed
	}
	return corev1.PodQOSBurstable
}
