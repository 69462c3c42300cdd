package process

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/process"
)

// OfPods returns the processes of the Pods of an agent with its state in dir: processes that
// hold Pods together, and their children.
func OfPods(dir string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		exe, _ := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		line, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if strings.HasPrefix(exe, dir) || strings.Contains(string(line), dir) {
			pids = append(pids, pid)
			for _, child := range process.Children(pid) {
				pids = append(pids, child.Pid)
			}
		}
	}
	return pids
}
