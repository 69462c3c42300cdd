package uml

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// pin keeps the guest with the process id on one CPU until release is called. Its kernel and
// its processes run in turns, with a switch for each system call and page fault: between two
// CPUs that is an interrupt each time, and took half as much processor time again.
//
// Guests side by side take different CPUs; one that finds none free goes where the scheduler
// has it go. Each holds an abstract socket named by its CPU, which ends with this process at the latest.
func pin(pid int) (release func(), err error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return nil, fmt.Errorf("ask for the CPUs of this process: %w", err)
	}
	for cpu, left := 0, allowed.Count(); left > 0; cpu++ {
		if !allowed.IsSet(cpu) {
			continue
		}
		left--
		held, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("@fairlead-uml-cpu-%d", cpu), Net: "unix"})
		if errors.Is(err, unix.EADDRINUSE) {
			continue // another guest's
		}
		if err != nil {
			return nil, fmt.Errorf("take CPU %d for the guest: %w", cpu, err)
		}
		var one unix.CPUSet
		one.Set(cpu)
		if err := unix.SchedSetaffinity(pid, &one); err != nil {
			_ = held.Close()
			return nil, fmt.Errorf("keep the guest on CPU %d: %w", cpu, err)
		}
		return func() { _ = held.Close() }, nil
	}
	return func() {}, nil
}
