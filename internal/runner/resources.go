package runner

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
)

// PodsLimited is the type of the Node condition that is False where limits of Pods
// are not enforced.
const PodsLimited corev1.NodeConditionType = "fairlead.dev/PodsLimited"

// cgroupTree is the name of the group that has those of the pods that request processors.
const cgroupTree = "fairlead"

// unrequestedTree is the name of the group of all other pods, beside it and not in it as kubelet's
// besteffort: a scheduler that is fair (CFS, EEVDF) lets a group that has not run lately go first
// when it wakes up, and one with a hog somewhere below has always run. In one tree a hog would
// make a Service's pod wait for milliseconds, however little the hog weighs (bench's run hogs).
const (
	unrequestedTree   = "fairlead-unrequested"
	unrequestedWeight = 50 // half of what cgroupTree weighs, and each group of the system's
)

// cgroups has a group for each pod: PREFIX-UID, in it "shim" for the pod's shim and
// "pod", which has a group for each container.
type cgroups struct {
	tree, unrequested *cgroup.Tree

	prefix string // of this state directory: another agent may use the same tree
	err    error  // why there is no tree
	// unprotected is why the kernel may kill the agent when memory is short.
	unprotected error
}

// protectedScore is kubelet's own oom_score_adj.
const protectedScore = -999

func openCgroups(stateDir string) *cgroups {
	sum := sha256.Sum256([]byte(stateDir))
	c := &cgroups{prefix: hex.EncodeToString(sum[:4]) + "-"}
	c.tree, c.err = cgroup.Open(cgroupTree)
	if c.err == nil {
		c.unrequested, c.err = c.tree.Beside(unrequestedTree, cgroup.Limits{Weight: unrequestedWeight})
	}
	return c
}

// pod is the group of a pod that has been added.
func (c *cgroups) pod(uid types.UID) cgroup.Group {
	if g := c.unrequested.Group(c.prefix + string(uid)); g.Exists() {
		return g
	}
	return c.tree.Group(c.prefix + string(uid))
}

// containers is the group of all containers of a pod that has been added.
func (c *cgroups) containers(uid types.UID) cgroup.Group { return c.pod(uid).Below("pod") }

// add makes the groups of a pod and returns that of its shim, "" without a tree.
func (c *cgroups) add(pod *corev1.Pod, pids int64) (string, error) {
	if c.err != nil {
		return "", nil
	}
	g, l := c.tree.Group(c.prefix+string(pod.UID)), podLimits(pod)
	if l.Weight == leastWeight {
		g = c.unrequested.Group(c.prefix + string(pod.UID))
	}
	l.PIDs = pids
	shim := g.Below("shim")
	err := errors.Join(g.Make(cgroup.Limits{Weight: l.Weight}, true), shim.Make(cgroup.Limits{}, false), g.Below("pod").Make(l, true))
	return shim.Dir(), err
}

// container makes the group of a container and returns it, "" without a tree.
func (c *cgroups) container(uid types.UID, k *corev1.Container) (string, error) {
	if c.err != nil {
		return "", nil
	}
	all := c.containers(uid)
	if !all.Exists() { // a pod of a run that had no tree
		return "", nil
	}
	g := all.Below(k.Name)
	return g.Dir(), g.Make(limitsOf(k.Resources), false)
}

// limitAgain gives the groups of an adopted pod the limits that release has taken from them.
func (w *worker) limitAgain(pod *corev1.Pod) {
	if w.r.cgroups.err != nil || !w.r.cgroups.pod(w.uid).Exists() { // the latter for a pod of a run that had no tree
		return
	}
	_, err := w.r.cgroups.add(pod, w.r.podPIDs(pod))
	for _, c := range w.containers {
		if err == nil && c.running() {
			_, err = w.r.cgroups.container(w.uid, c.spec)
		}
	}
	if err != nil {
		w.log.Error("cannot limit an adopted pod again", "err", err)
		w.r.event(pod, corev1.EventTypeWarning, "LimitsNotEnforced", "the pod runs without its limits: "+err.Error())
	}
}

// podPIDs is how many processes a pod may have, 0 for any number.
func (r *Runner) podPIDs(pod *corev1.Pod) int64 {
	if confined(pod) {
		return r.o.PodPIDs
	}
	return 0
}

// release lets systemd start the agent's unit again while pods live.
func (c *cgroups) release() error {
	if c.err != nil {
		return nil
	}
	return c.tree.Release()
}

// remove ends what is left of a pod, and its groups.
func (c *cgroups) remove(ctx context.Context, uid types.UID) error {
	if c.err != nil {
		return nil
	}
	g := c.pod(uid)
	if !g.Exists() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	return errors.Join(g.Kill(ctx), g.Remove())
}

// sweep removes the groups of pods that keep does not name.
func (c *cgroups) sweep(ctx context.Context, keep func(types.UID) bool) error {
	if c.err != nil {
		return nil
	}
	var errs []error
	for _, name := range slices.Concat(c.tree.Names(), c.unrequested.Names()) {
		if uid, ours := strings.CutPrefix(name, c.prefix); ours && !keep(types.UID(uid)) {
			errs = append(errs, c.remove(ctx, types.UID(uid)))
		}
	}
	return errors.Join(errs...)
}

// condition is the Node condition PodsLimited.
func (c *cgroups) condition() corev1.NodeCondition {
	if c.err != nil {
		return corev1.NodeCondition{
			Type: PodsLimited, Status: corev1.ConditionFalse, Reason: "NoControlGroups",
			Message: "limits of memory, CPU and processes are not enforced: " + c.err.Error(),
		}
	}
	message := "each Pod has a control group"
	if c.unprotected != nil {
		message += "; the agent is not protected when memory is short: " + c.unprotected.Error()
	}
	return corev1.NodeCondition{Type: PodsLimited, Status: corev1.ConditionTrue, Reason: "ControlGroups", Message: message}
}

// limited reports whether a limit of the pod is one that a control group enforces.
func limited(pod *corev1.Pod) bool {
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
// weighs 100, like a group without a weight of its own (opencontainers/cgroups,
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

// podLimits are the limits of all containers together: of the pod itself if it has
// them, else the sums, where each container has one.
func podLimits(pod *corev1.Pod) cgroup.Limits {
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
		if isSidecar(c) {
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

// oomScoreAdj is kubelet's: a container that uses no more than it has requested
// outlives those that do (pkg/kubelet/qos/policy.go). capacity is the machine's
// memory.
func oomScoreAdj(pod *corev1.Pod, c *corev1.Container, capacity int64) int {
	switch qosClass(pod) {
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

// memoryCapacity is the machine's memory in bytes, 0 if unknown.
func memoryCapacity() int64 {
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
