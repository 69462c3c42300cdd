// Package sysctl sets kernel parameters, and sets them back.
package sysctl

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const root = "/proc/sys/"

// Set gives a parameter, named with slashes as below /proc/sys, a value, unless
// it has it. Parameters below net/ belong to the calling thread's network
// namespace. What it was before is recorded for Restore, as are the parameters also,
// which the kernel changes with this one.
func Set(key, value string, also ...string) error {
	files := make([]string, len(also))
	for i, k := range also {
		files[i] = root + k
	}
	return SetFile(root+key, value, files...)
}

// SetFile does for a file of /proc or /sys what Set does for a parameter.
func SetFile(file, value string, also ...string) error {
	if have, err := read(file); err == nil && have == value {
		return nil
	}
	changes := before(append([]string{file}, also...))
	// The record is there first: a change without one would never be taken back.
	for i := range changes {
		if changes[i].File == file {
			changes[i].Now = value
			record(changes[i : i+1])
		}
	}
	if err := write(file, value); err != nil {
		return err
	}
	for i := range changes {
		changes[i].Now, _ = read(changes[i].File)
	}
	record(changes)
	return nil
}

// Write is Set without a record, for parameters that go with a device or a network
// namespace of fairlead's own.
func Write(key, value string) error { return write(root+key, value) }

func write(file, value string) error {
	if err := os.WriteFile(file, []byte(value), 0); err != nil {
		name := strings.ReplaceAll(strings.TrimPrefix(file, root), "/", ".")
		if !strings.HasPrefix(file, root) {
			name = file
		}
		return fmt.Errorf("set %s to %s: %w; set it by hand if /proc/sys is read-only here", name, value, err)
	}
	return nil
}

// Value returns a parameter, named as for Set, "" if it cannot be read.
func Value(key string) string {
	value, _ := read(root + key)
	return value
}

func read(file string) (string, error) {
	b, err := os.ReadFile(file)
	return strings.TrimSpace(string(b)), err
}

// Writable reports whether this process may set a parameter, named as for Set.
func Writable(key string) bool { return unix.Access(root+key, unix.W_OK) == nil }

// HardenPod sets the parameters of the network namespace the calling process
// is in as a pod wants them, before its devices arrive: every packet to other
// pods goes by the gateway, so redirects are lies; and a pod owns all its
// ports. Best effort, since /proc/sys may be read-only.
func HardenPod() {
	for _, kv := range [][2]string{
		{"net/ipv4/conf/all/accept_redirects", "0"},
		{"net/ipv4/conf/default/accept_redirects", "0"},
		{"net/ipv6/conf/all/accept_redirects", "0"},
		{"net/ipv6/conf/default/accept_redirects", "0"},
		{"net/ipv6/conf/default/accept_ra", "0"},
		{"net/ipv6/conf/default/accept_dad", "0"},
		{"net/ipv4/ip_unprivileged_port_start", "0"},
		{"net/ipv4/ping_group_range", "0 2147483647"},
	} {
		_ = Write(kv[0], kv[1])
	}
}
