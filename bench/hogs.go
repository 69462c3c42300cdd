package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"time"
)

// hogsMachine is the folder, below that of the peers, of the kernel and the file system that guest/make makes.
const hogsMachine = "guest"

// hogsLine is what the test logs of the requests' times.
var hogsLine = regexp.MustCompile(`99 of 100 requests take (\S+) at most, (\S+) beside hogs`)

// runHogs runs the test of package runner/guest on a machine of QEMU's whose clock counts instructions, a nanosecond each: times in
// it depend on what its one processor has to do, and on nothing that the machine below is busy with.
func (b *bench) runHogs(ctx context.Context) ([]figure, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	at := filepath.Join(b.peers, hogsMachine)
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg", "-icount", "shift=0,sleep=off", "-m", "4096", "-smp", "1",
		"-nographic", "-no-reboot", "-nic", "none", "-kernel", filepath.Join(at, "vmlinuz"), "-initrd", filepath.Join(at, "initrd"),
		"-append", "console=ttyS0 quiet panic=-1 edd=off")
	out, err := cmd.CombinedOutput()
	log := filepath.Join(b.dir, "hogs.log")
	if e := os.WriteFile(log, out, 0o600); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, fmt.Errorf("qemu-system-x86_64: %w", err)
	}
	found := hogsLine.FindSubmatch(out)
	if found == nil || !bytes.Contains(out, []byte("--- PASS: TestLimits")) {
		err = fmt.Errorf("the test did not pass: see %s", log)
	}
	if found == nil {
		return nil, err
	}
	var took [2]time.Duration
	for i := range took {
		d, e := time.ParseDuration(string(found[i+1]))
		if e != nil {
			return nil, e
		}
		took[i] = d
	}
	return []figure{{
		what: "p99 of requests to a Pod beside hogs of processes, memory and disk", unit: microseconds,
		fairlead: microseconds.in(took[1]), peer: microseconds.in(took[0]), peerName: "hogs asleep", want: expectation{share: 2},
	}}, err
}
