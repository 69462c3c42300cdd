package controller

import (
	"fmt"
	"os"
	"strings"
)

// process names one process so that others of the same machine can tell
// whether it still runs. Its text form is
// "host_boot.namespace.pid.start".
type process struct {
	host string
	// boot is the machine's boot and pid namespace: numbers of processes mean
	// the same only within both.
	boot string
	pid  int
	// start is when the process started, in ticks since boot: process numbers
	// are used again.
	start string
}

func thisProcess() (process, error) {
	host, err := os.Hostname()
	if err != nil {
		return process{}, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return process{}, err
	}
	namespace, err := os.Readlink("/proc/self/ns/pid") // "pid:[4026531836]"
	if err != nil {
		return process{}, err
	}
	p := process{host: host, boot: string(boot[:min(8, len(boot))]) + "." + strings.Trim(namespace, "pid:[]"), pid: os.Getpid()}
	var ok bool
	if p.start, ok = startOf(p.pid); !ok {
		return process{}, fmt.Errorf("/proc does not show process %d", p.pid)
	}
	return p, nil
}

func (p process) String() string { return fmt.Sprintf("%s_%s.%d.%s", p.host, p.boot, p.pid, p.start) }

// startOf returns the start time of a process: field 22 of proc_pid_stat(5).
func startOf(pid int) (string, bool) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", false
	}
	text := string(raw)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const start = 22 - 3 // the first of fields is number 3
	if len(fields) <= start || fields[0] == "Z" {
		return "", false
	}
	return fields[start], true
}

// knowsDead says that text is a process of this machine that runs no more. Of
// processes elsewhere nothing is known.
func (p process) knowsDead(text string) bool {
	rest, ok := strings.CutPrefix(text, p.host+"_"+p.boot+".")
	if !ok {
		return false
	}
	var pid int
	var start string
	if n, err := fmt.Sscanf(strings.Replace(rest, ".", " ", 1), "%d %s", &pid, &start); n != 2 || err != nil {
		return false
	}
	now, runs := startOf(pid)
	return !runs || now != start
}
