package api

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/cgroup"
)

// Summary is the usage of a node and of its pods, the part of kubelet's
// /stats/summary (k8s.io/kubelet/pkg/apis/stats/v1alpha1) that control groups measure.
type Summary struct {
	Node NodeStats  `json:"node"`
	Pods []PodStats `json:"pods"`
}

// NodeStats is the usage of a machine.
type NodeStats struct {
	NodeName string       `json:"nodeName"`
	CPU      *CPUStats    `json:"cpu,omitempty"`
	Memory   *MemoryStats `json:"memory,omitempty"`
	// PodsUnmeasured is why pods have no numbers, "" if they have.
	PodsUnmeasured string `json:"podsUnmeasured,omitempty"`
}

// PodStats is the usage of a pod's containers that run.
type PodStats struct {
	PodRef     PodReference     `json:"podRef"`
	Containers []ContainerStats `json:"containers"`
	CPU        *CPUStats        `json:"cpu,omitempty"`
	Memory     *MemoryStats     `json:"memory,omitempty"`
	Processes  *ProcessStats    `json:"process_stats,omitempty"`
}

// PodReference names a pod.
type PodReference struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	UID       string `json:"uid"`
}

// ContainerStats is the usage of a container.
type ContainerStats struct {
	Name   string       `json:"name"`
	CPU    *CPUStats    `json:"cpu,omitempty"`
	Memory *MemoryStats `json:"memory,omitempty"`
}

// CPUStats is processor time: since the beginning, and that of the last moment as a
// number of processors.
type CPUStats struct {
	Time                 time.Time `json:"time"`
	UsageNanoCores       uint64    `json:"usageNanoCores"`
	UsageCoreNanoSeconds uint64    `json:"usageCoreNanoSeconds"`
}

// MemoryStats is memory in bytes; the working set is what the kernel cannot drop at once.
type MemoryStats struct {
	Time            time.Time `json:"time"`
	UsageBytes      uint64    `json:"usageBytes"`
	WorkingSetBytes uint64    `json:"workingSetBytes"`
}

// ProcessStats counts processes and threads.
type ProcessStats struct {
	ProcessCount uint64 `json:"process_count"`
}

// summaryWindow is the time over which present use of processors is measured.
const summaryWindow = 500 * time.Millisecond

// groupsOfPod are the control groups of a pod that runs.
type groupsOfPod struct {
	ref        PodReference
	all        cgroup.Group
	containers map[string]cgroup.Group
}

// Summary measures the node and its pods, for summaryWindow.
func (s *Server) Summary(ctx context.Context) (Summary, error) {
	out := Summary{Node: NodeStats{NodeName: s.o.NodeName}, Pods: []PodStats{}}
	pods := s.runningGroups()
	if s.o.Groups.Err != nil {
		out.Node.PodsUnmeasured = s.o.Groups.Err.Error()
	}
	before, node := map[string]cgroup.Usage{}, machineUsage()
	begin := time.Now()
	for _, p := range pods {
		p.each(func(g cgroup.Group) { before[g.Dir()] = g.Usage() })
	}
	select {
	case <-time.After(summaryWindow):
	case <-ctx.Done():
		return out, ctx.Err()
	}
	took := time.Since(begin)
	stats := func(was, is cgroup.Usage) (*CPUStats, *MemoryStats) {
		now := time.Now()
		cores := float64(max(0, is.CPU-was.CPU)) / float64(took)
		return &CPUStats{Time: now, UsageNanoCores: uint64(cores * 1e9), UsageCoreNanoSeconds: uint64(is.CPU)},
			&MemoryStats{Time: now, UsageBytes: uint64(is.Memory), WorkingSetBytes: uint64(is.WorkingSet)}
	}
	if is := machineUsage(); is.Memory > 0 {
		out.Node.CPU, out.Node.Memory = stats(node, is)
	}
	for _, p := range pods {
		one := PodStats{PodRef: p.ref, Containers: []ContainerStats{}}
		if s.o.Groups.Err == nil && p.all.Exists() {
			is := p.all.Usage()
			one.CPU, one.Memory = stats(before[p.all.Dir()], is)
			one.Processes = &ProcessStats{uint64(is.PIDs)}
		}
		for name, g := range p.containers {
			c := ContainerStats{Name: name}
			if g.Exists() {
				c.CPU, c.Memory = stats(before[g.Dir()], g.Usage())
			}
			one.Containers = append(one.Containers, c)
		}
		slices.SortFunc(one.Containers, func(a, b ContainerStats) int { return strings.Compare(a.Name, b.Name) })
		out.Pods = append(out.Pods, one)
	}
	return out, nil
}

func (p groupsOfPod) each(f func(cgroup.Group)) {
	if p.all == (cgroup.Group{}) {
		return
	}
	f(p.all)
	for _, g := range p.containers {
		f(g)
	}
}

// runningGroups lists the pods that run, by namespace and name.
func (s *Server) runningGroups() []groupsOfPod {
	var out []groupsOfPod
	for _, p := range s.o.Pods() {
		if p.Phase != corev1.PodRunning {
			continue
		}
		g := groupsOfPod{ref: PodReference{p.Name, p.Namespace, p.UID}, containers: map[string]cgroup.Group{}}
		if s.o.Groups.Err == nil {
			g.all = s.o.Groups.Containers(types.UID(p.UID))
			for name, c := range p.Containers {
				if c.Running {
					g.containers[name] = g.all.Below(name)
				}
			}
		}
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b groupsOfPod) int {
		return cmp.Or(strings.Compare(a.ref.Namespace, b.ref.Namespace), strings.Compare(a.ref.Name, b.ref.Name))
	})
	return out
}

// machineUsage is the usage of the whole machine (proc_stat(5), proc_meminfo(5)), zero
// where it cannot be read.
func machineUsage() cgroup.Usage {
	var u cgroup.Usage
	b, err := os.ReadFile("/proc/stat")
	line, _, _ := bytes.Cut(b, []byte("\n"))
	var user, nice, system, idle, wait, irq, softirq, steal int64
	if _, scanErr := fmt.Sscanf(string(line), "cpu %d %d %d %d %d %d %d %d",
		&user, &nice, &system, &idle, &wait, &irq, &softirq, &steal); err != nil || scanErr != nil {
		return u
	}
	const tick = time.Second / 100 // USER_HZ
	u.CPU = time.Duration(user+nice+system+irq+softirq+steal) * tick
	if b, err = os.ReadFile("/proc/meminfo"); err != nil {
		return u
	}
	kb := map[string]int64{}
	for line := range strings.Lines(string(b)) {
		var name string
		var n int64
		if _, err := fmt.Sscanf(line, "%s %d", &name, &n); err == nil {
			kb[strings.TrimSuffix(name, ":")] = n
		}
	}
	u.Memory = (kb["MemTotal"] - kb["MemFree"]) << 10
	u.WorkingSet = (kb["MemTotal"] - kb["MemAvailable"]) << 10
	return u
}

func (s *Server) serveSummary(ctx context.Context, w http.ResponseWriter, q *http.Request) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(q.Context(), cancel)()
	sum, err := s.Summary(ctx)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(sum)
}
