package agent

import (
	"bufio"
	"fmt"
	"io/fs"
	"runtime"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// MachineInfo reads the nodeInfo of a Node from the machine's root file
// system (os.DirFS("/")). version is this program's. What cannot be read stays
// empty.
func MachineInfo(root fs.FS, version string) corev1.NodeSystemInfo {
	line := func(path string) string {
		b, err := fs.ReadFile(root, path)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	return corev1.NodeSystemInfo{
		MachineID:               line("etc/machine-id"),
		SystemUUID:              line("sys/class/dmi/id/product_uuid"),
		BootID:                  line("proc/sys/kernel/random/boot_id"),
		KernelVersion:           line("proc/sys/kernel/osrelease"),
		OSImage:                 prettyName(line("etc/os-release")),
		ContainerRuntimeVersion: "fairlead://" + version,
		KubeletVersion:          version,
		OperatingSystem:         runtime.GOOS,
		Architecture:            runtime.GOARCH,
	}
}

// MachineCapacity reads the processors and the memory of a machine from its root
// file system; it only informs, since processes are not limited to a part of it.
func MachineCapacity(root fs.FS) corev1.ResourceList {
	out := corev1.ResourceList{corev1.ResourceCPU: *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI)}
	text, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return out
	}
	for l := range strings.Lines(string(text)) {
		var kib int64
		if n, _ := fmt.Sscanf(l, "MemTotal: %d kB", &kib); n == 1 {
			out[corev1.ResourceMemory] = *resource.NewQuantity(kib<<10, resource.BinarySI)
		}
	}
	return out
}

// prettyName finds PRETTY_NAME in the text of /etc/os-release (os-release(5)).
func prettyName(osRelease string) string {
	for s := bufio.NewScanner(strings.NewReader(osRelease)); s.Scan(); {
		if v, ok := strings.CutPrefix(s.Text(), "PRETTY_NAME="); ok {
			return strings.Trim(v, `"'`)
		}
	}
	return ""
}
