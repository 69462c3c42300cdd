package uml

import (
	"bytes"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// xstateSource is in C, since linux.uml is.
//
//go:embed xstate/ptrace.c
var xstateSource []byte

// preload returns what User Mode Linux needs in its environment on this machine:
// nothing, or on a CPU with AMX a library in dir that helps versions before 6.13,
// which panic there ("ptrace set fp regs failed, errno = 14"). Linux 6.13 asks for
// the size of the CPU's state ("um: switch to regset API and depend on XSTATE").
func preload(dir string) ([]string, error) {
	cpu, err := os.ReadFile("/proc/cpuinfo")
	if err != nil || !bytes.Contains(cpu, []byte(" amx_tile")) {
		return nil, err
	}
	library := filepath.Join(dir, "xstate.so")
	cmd := exec.Command("gcc", "-O1", "-shared", "-fPIC", "-x", "c", "-o", library, "-")
	cmd.Stdin = bytes.NewReader(xstateSource)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build what User Mode Linux needs on a CPU with AMX: %w\n%s", err, out)
	}
	return []string{"LD_PRELOAD=" + library}, nil
}
