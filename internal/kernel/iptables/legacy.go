package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
	"github.com/fairlead/fairlead/internal/svc"
)

// The options and structures of linux/netfilter_ipv4/ip_tables.h and its twin for IPv6, on machines of 64 bits.
const (
	getInfo    = 64 // IPT_SO_GET_INFO, and IP6T_SO_GET_INFO
	getEntries = 65 // IPT_SO_GET_ENTRIES, and IP6T_SO_GET_ENTRIES

	tableNameBytes = 32
	entriesAt      = 40 // of ipt_get_entries, after a name, a size and padding

	nameAt      = 2  // of xt_entry_target: its name
	errorNameAt = 32 // of xt_error_target: the name of the chain that begins here
	errorTarget = "ERROR"

	// readAttempts bounds how often a table is read that changes meanwhile.
	readAttempts = 5
	// maxTableBytes bounds a table: 100,000 Services with 10 endpoints take less.
	maxTableBytes = 1 << 30
)

// legacyFamily is where a family's entries have their offsets, and where the kernel lists its tables.
type legacyFamily struct {
	domain, level int
	targetAt      int    // next_offset comes behind it
	tables        string // of thread-self: /proc/net is of the process's first thread, which may be in another namespace
}

func legacyOf(f svc.Family) legacyFamily {
	if f == svc.IPv6 {
		return legacyFamily{unix.AF_INET6, unix.SOL_IPV6, 140, "/proc/thread-self/net/ip6_tables_names"}
	}
	return legacyFamily{unix.AF_INET, unix.SOL_IP, 88, "/proc/thread-self/net/ip_tables_names"}
}

// LegacyChains returns the names of the chains that programs have added to a table of the variant Legacy, none where the network
// namespace of the calling thread has no such table. It needs no program. The caller keeps its thread.
func LegacyChains(f svc.Family, table string) ([]string, error) {
	in := legacyOf(f)
	tables, err := os.ReadFile(in.tables)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !slices.Contains(strings.Fields(string(tables)), table) { // to ask for it would make it
		return nil, nil
	}
	fd, err := unix.Socket(in.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	for range readAttempts {
		var entries []byte
		if entries, err = legacyEntries(fd, in.level, table); err == nil {
			return chainsOf(entries, in.targetAt)
		}
		if !errors.Is(err, unix.EAGAIN) {
			break
		}
	}
	return nil, fmt.Errorf("cannot read table %s of iptables (legacy, %s): %w", table, f, err)
}

// legacyEntries returns the entries of a table; the error wraps EAGAIN if it has changed meanwhile.
func legacyEntries(fd, level int, table string) ([]byte, error) {
	var of info
	copy(of[:tableNameBytes-1], table)
	if err := getsockopt(fd, level, getInfo, of[:]); err != nil {
		return nil, err
	}
	size := binary.NativeEndian.Uint32(of[len(of)-4:])
	if size > maxTableBytes {
		return nil, fmt.Errorf("it has %d bytes; at most %d are read", size, maxTableBytes)
	}
	all := make([]byte, entriesAt+int(size))
	copy(all[:tableNameBytes-1], table)
	binary.NativeEndian.PutUint32(all[tableNameBytes:], size)
	err := getsockopt(fd, level, getEntries, all)
	return all[entriesAt:], err
}

func getsockopt(fd, level, option int, b []byte) error {
	n := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(unsafe.Pointer(&n)), 0)
	runtime.KeepAlive(b)
	if errno != 0 {
		return errno
	}
	return nil
}

// chainsOf returns the names of the chains that begin in entries. targetAt is the offset of target_offset in an entry.
func chainsOf(entries []byte, targetAt int) (out []string, err error) {
	for at := 0; at < len(entries); {
		rest := entries[at:]
		if len(rest) < targetAt+4 {
			return nil, errors.New("an entry of iptables is too short")
		}
		target, next := int(binary.NativeEndian.Uint16(rest[targetAt:])), int(binary.NativeEndian.Uint16(rest[targetAt+2:]))
		if next < target+errorNameAt || next > len(rest) {
			return nil, fmt.Errorf("an entry of iptables has %d bytes, with its target at %d", next, target)
		}
		t := rest[target:next]
		if netlink.CString(t[nameAt:errorNameAt-1]) == errorTarget {
			if name := netlink.CString(t[errorNameAt:]); name != errorTarget { // that is the end of the table
				out = append(out, name)
			}
		}
		at += next
	}
	return out, nil
}
