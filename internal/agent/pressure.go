package agent

import (
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// The thresholds of a kubelet's --eviction-hard, and how long it calls a node under
// pressure after the last sign of it. Pods are not evicted here: the node gets a taint,
// and with it no new Pods. No images are stored here, so that minDisk is enough of a
// large disk, of which a kubelet wants a tenth.
const (
	minMemory        = 100 << 20
	minDiskPercent   = 10
	minDisk          = 1 << 30
	minInodesPercent = 5
	pressureLasts    = 5 * time.Minute
)

// Pressure returns the conditions MemoryPressure and DiskPressure of a machine: by
// root's proc/meminfo (os.DirFS("/")), and by the disk that space returns. What cannot
// be read is the status Unknown. They are for Options.Conditions.
func Pressure(root fs.FS, space func() (fileio.Space, error)) []func() corev1.NodeCondition {
	memory, disk := &pressure{now: time.Now}, &pressure{now: time.Now}
	return []func() corev1.NodeCondition{
		func() corev1.NodeCondition {
			return memory.condition(corev1.NodeMemoryPressure, func() (string, error) { return lowMemory(root) },
				"KubeletHasInsufficientMemory", "KubeletHasSufficientMemory", "the node has sufficient memory available")
		},
		func() corev1.NodeCondition {
			return disk.condition(corev1.NodeDiskPressure, func() (string, error) { return lowDisk(space) },
				"KubeletHasDiskPressure", "KubeletHasNoDiskPressure", "the node has no disk pressure")
		},
	}
}

// pressure is one condition over time.
type pressure struct {
	now   func() time.Time
	mu    sync.Mutex
	until time.Time
	why   string
}

// condition returns the condition of this moment. look returns what is low, "" if
// nothing is.
func (p *pressure) condition(t corev1.NodeConditionType, look func() (string, error), bad, good, text string) corev1.NodeCondition {
	p.mu.Lock()
	defer p.mu.Unlock()
	why, err := look()
	switch {
	case err != nil:
		return corev1.NodeCondition{Type: t, Status: corev1.ConditionUnknown, Reason: "CannotRead", Message: err.Error()}
	case why != "":
		p.until, p.why = p.now().Add(pressureLasts), why
	}
	if p.now().Before(p.until) {
		return corev1.NodeCondition{Type: t, Status: corev1.ConditionTrue, Reason: bad, Message: p.why}
	}
	return corev1.NodeCondition{Type: t, Status: corev1.ConditionFalse, Reason: good, Message: text}
}

func lowMemory(root fs.FS) (string, error) {
	text, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return "", err
	}
	for l := range strings.Lines(string(text)) {
		var kib int64
		if n, _ := fmt.Sscanf(l, "MemAvailable: %d kB", &kib); n == 1 {
			if kib<<10 < minMemory {
				return fmt.Sprintf("less than %d MiB of memory are available", minMemory>>20), nil
			}
			return "", nil
		}
	}
	return "", fmt.Errorf("/proc/meminfo has no MemAvailable")
}

func lowDisk(space func() (fileio.Space, error)) (string, error) {
	s, err := space()
	switch {
	case err != nil:
		return "", err
	case s.Free < min(minDisk, s.Total/100*minDiskPercent):
		return fmt.Sprintf("the disk of the node's state has %d MiB free, less than 1 GiB and than %d %%", s.Free>>20, minDiskPercent), nil
	case s.FreeInodes < s.Inodes/100*minInodesPercent:
		return fmt.Sprintf("less than %d %% of the inodes of the disk of the node's state are free", minInodesPercent), nil
	}
	return "", nil
}
