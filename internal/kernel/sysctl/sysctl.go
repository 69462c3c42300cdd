// Package sysctl sets kernel parameters.
package sysctl

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Set gives a parameter, named with slashes as below /proc/sys, a value, unless
// it has it. Parameters below net/ are those of the calling thread's network
// namespace.
func Set(key, value string) error {
	file := "/proc/sys/" + key
	if b, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(b)) == value {
		return nil
	}
	if err := os.WriteFile(file, []byte(value), 0); err != nil {
		return fmt.Errorf("set %s to %s: %w; set it by hand if /proc/sys is read-only here", strings.ReplaceAll(key, "/", "."), value, err)
	}
	return nil
}

// Writable reports whether this process may set a parameter, named as for Set.
func Writable(key string) bool { return unix.Access("/proc/sys/"+key, unix.W_OK) == nil }

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
		_ = Set(kv[0], kv[1])
	}
}
