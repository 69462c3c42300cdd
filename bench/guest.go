package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// guestMachine is the folder, below that of the peers, of the kernel and the file system that guest/make makes.
const guestMachine = "guest"

// guest runs a test of guest/inner, by its name there, from an initial file system of guest/make, on a machine of QEMU's whose clock counts
// instructions, a nanosecond each: times in it depend on what its one processor has to do, and on nothing that the machine below is busy
// with. It returns what the machine printed, which is in the file log, too.
func (b *bench) guest(ctx context.Context, test, initrd string) (out []byte, log string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	at := filepath.Join(b.peers, guestMachine)
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg", "-icount", "shift=0,sleep=off", "-m", "4096", "-smp", "1",
		"-nographic", "-no-reboot", "-nic", "none", "-kernel", filepath.Join(at, "vmlinuz"), "-initrd", filepath.Join(at, initrd),
		"-append", "console=ttyS0 quiet panic=-1 edd=off GUEST="+test)
	out, err = cmd.CombinedOutput()
	log = filepath.Join(b.dir, test+".log")
	if e := os.WriteFile(log, out, 0o600); e != nil {
		return nil, log, e
	}
	if err != nil {
		return nil, log, fmt.Errorf("qemu-system-x86_64: %w", err)
	}
	return out, log, nil
}
