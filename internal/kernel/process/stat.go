package process

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Zombie is the Stat.State of a process that has ended and was not waited for.
const Zombie = 'Z'

// tick is the unit of processor times, 1/USER_HZ, which is 100 on every
// architecture that Go has.
const tick = 10 * time.Millisecond

// Stat is what proc_pid_stat(5) shows of a process.
type Stat struct {
	State byte
	// Group is the process group.
	Group int
	// CPU is the processor time of the process, ChildCPU that of the children it
	// has waited for; both in steps of 10 ms.
	CPU, ChildCPU time.Duration
	// Start is the start time in clock ticks since boot.
	Start uint64
	// Resident is the resident memory in bytes.
	Resident int
}

// ReadStat reads the Stat of a process.
func ReadStat(pid int) (Stat, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Stat{}, fmt.Errorf("process %d: %w", pid, err)
	}
	s, err := parseStat(string(b))
	if err != nil {
		return Stat{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return s, nil
}

func parseStat(text string) (Stat, error) {
	// The name in parentheses may hold blanks and parentheses: count from the
	// last one. The first field after it is number 3.
	const first, last = 3, 24
	f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(f) <= last-first {
		return Stat{}, fmt.Errorf("/proc stat has %d fields after the name, want %d", len(f), last-first+1)
	}
	var err error
	number := func(field int) int64 {
		n, e := strconv.ParseInt(f[field-first], 10, 64)
		if e != nil && err == nil {
			err = fmt.Errorf("field %d of /proc stat: %w", field, e)
		}
		return n
	}
	s := Stat{
		State:    f[0][0],
		Group:    int(number(5)),
		CPU:      time.Duration(number(14)+number(15)) * tick,
		ChildCPU: time.Duration(number(16)+number(17)) * tick,
		Start:    uint64(number(22)),
		Resident: int(number(24)) * os.Getpagesize(),
	}
	return s, err
}
