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

// minMemory is the threshold of a kubelet's --eviction-hard, that of the disk is fileio.Space's;
// pressureLasts is how long a kubelet calls a node under pressure after the last sign of it. Pods
// are not evicted here: the node gets a taint, and with it no new Pods.
const (
	minMemory     = 100 << 20
	pressureLasts = 5 * time.Minute
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
	if err != nil {
		return "", err
	}
	if why := s.Low(); why != "" {
		return "the disk of the node's state has " + why, nil
	}
	return "", nil
}
