package election

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/process"
)

// holder identifies a process so that others of the same machine can find out
// whether it still runs. Its text form is "host_boot.namespace.pid.start".
type holder struct {
	host string
	// boot is the boot ID and the PID namespace: PIDs are unique only within
	// both.
	boot string
	id   process.ID
}

func thisProcess() (holder, error) {
	host, err := os.Hostname()
	if err != nil {
		return holder{}, err
	}
	boot := process.BootID()
	if boot == "" {
		return holder{}, errors.New("/proc does not show the boot ID")
	}
	namespace, err := os.Readlink("/proc/self/ns/pid") // "pid:[4026531836]"
	if err != nil {
		return holder{}, err
	}
	id, err := process.Find(os.Getpid())
	if err != nil {
		return holder{}, err
	}
	return holder{host: host, boot: boot[:min(8, len(boot))] + "." + strings.Trim(namespace, "pid:[]"), id: id}, nil
}

func (h holder) String() string {
	return fmt.Sprintf("%s_%s.%d.%d", h.host, h.boot, h.id.Pid, h.id.Start)
}

// isDead reports whether text identifies a process of this machine that no longer
// runs. For processes elsewhere it is false.
func (h holder) isDead(text string) bool {
	rest, ok := strings.CutPrefix(text, h.host+"_"+h.boot+".")
	if !ok {
		return false
	}
	var id process.ID
	if n, err := fmt.Sscanf(strings.Replace(rest, ".", " ", 1), "%d %d", &id.Pid, &id.Start); n != 2 || err != nil {
		return false
	}
	return !id.Alive()
}
