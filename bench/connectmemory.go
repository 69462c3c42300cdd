package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"
)

// memorySizes are the numbers of Services, of ten endpoints each, at which the memory of connect-time is looked at.
var memorySizes = []int{5000, 50000}

// mostMemory is what connect-time may take more than mode nft without it, in megabytes.
const mostMemory = 60

// runConnectMemory measures how much more memory the kernel and the process take with connect-time.
func (b *bench) runConnectMemory(ctx context.Context) (figures []figure, err error) {
	sizes := memorySizes
	if b.small {
		sizes = []int{60}
	}
	for _, n := range sizes {
		size := planeSize{services: n, endpoints: b.few(10, 3), limit: b.limit()}
		got, err := b.connectMemoryAt(ctx, size)
		if err != nil {
			return figures, fmt.Errorf("at %d Services: %w", n, err)
		}
		figures = append(figures, got...)
	}
	return figures, nil
}

// connectMemoryAt measures one size, with a BPF file system that has nothing of another one.
func (b *bench) connectMemoryAt(ctx context.Context, size planeSize) (figures []figure, err error) {
	group, err := newControlGroup()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, group.remove()) }()
	err = b.inWorld(ctx, size, func(w *world) error {
		off, _, err := b.memoryOf(ctx, w, b.fairleadProxy())
		if err != nil {
			return fmt.Errorf("off: %w", err)
		}
		on, maps, err := b.memoryOf(ctx, w, b.fairleadProxy("--connect-time", "on", "--connect-time-cgroup", group.dir))
		if err != nil {
			return fmt.Errorf("on: %w", err)
		}
		if maps == 0 {
			return errors.New("on: no maps are pinned")
		}
		b.say("%s: the process has %.1f MB with connect-time off and %.1f MB with it on, the maps %.1f MB", size, off, on, maps)
		at := fmt.Sprintf(" at %s", size)
		process := unpaired("memory of the process"+at, megabytes, on, expectation{})
		process.peer, process.peerName = off, "off"
		figures = []figure{process, unpaired("memory of the maps"+at, megabytes, maps, expectation{}),
			unpaired("both more than off"+at, megabytes, max(0, on-off)+maps, expectation{below: mostMemory})}
		return nil
	})
	return figures, err
}

// memoryOf has a proxy serve the world, and returns what it and its maps hold once it is at rest, in megabytes.
func (b *bench) memoryOf(ctx context.Context, w *world, p proxy) (own, kernel float64, err error) {
	h, err := b.net.host(ctx, fmt.Sprintf("node%d", b.net.count))
	if err != nil {
		return 0, 0, err
	}
	var proc *process
	defer func() { err = errors.Join(err, h.end(ctx, proc)) }()
	if err := makeNode(ctx, w.client, h); err != nil {
		return 0, 0, err
	}
	dir, err := os.MkdirTemp(b.dir, p.name+"-")
	if err != nil {
		return 0, 0, err
	}
	if proc, err = p.start(h, dir, w.kubeconfig); err != nil {
		return 0, 0, err
	}
	var r planeResult
	if err := w.measureLoad(ctx, h, proc, &r); err != nil {
		return 0, 0, errors.Join(err, proc.alive())
	}
	if err := proc.settle(time.Minute); err != nil {
		return 0, 0, err
	}
	select {
	case <-time.After(w.memoryAfter):
	case <-ctx.Done():
		return 0, 0, ctx.Err()
	}
	bytes, err := proc.memory()
	if err != nil {
		return 0, 0, err
	}
	held, err := pinnedBytes(filepath.Join(bpfFS, "fairlead"))
	return bytes / 1e6, float64(held) / 1e6, err
}

// pinnedBytes is what the maps take that are pinned below a folder, as the kernel reports it in their
// fdinfo (memlock). A map that makes its entries when it needs them counts only what it has (Linux 6.4). Storage of sockets goes
// with the sockets, of which there are none here.
func pinnedBytes(dir string) (total uint64, err error) {
	err = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) && path == dir { // without connect-time
			return nil
		}
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), "link-") {
			return err
		}
		m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		defer m.Close()
		info, err := m.Info()
		if err != nil {
			return err
		}
		n, ok := info.Memlock()
		if !ok {
			return fmt.Errorf("%s: the kernel does not tell what it takes", path)
		}
		total += n
		return nil
	})
	return total, err
}
