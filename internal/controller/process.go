package controller

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/process"
)

// holder names one process so that others of the same machine can tell
// whether it still runs. Its text form is
// "host_boot.namespace.pid.start".
type holder struct {
	host string
	// boot is the machine's boot and pid namespace: process IDs mean the same
	// only within both.
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

// knowsDead reports whether text is a process of this machine that has ended. Of
// processes elsewhere nothing is known.
func (h holder) knowsDead(text string) bool {
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
