package link

import (
	"path/filepath"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/sysctl"
)

// Forwards reports whether the machine passes IPv4 packets on, and IPv6 packets where it has that.
func Forwards() bool {
	return sysctl.Value("net/ipv4/ip_forward") == "1" && (!HasIPv6() || sysctl.Value("net/ipv6/conf/all/forwarding") == "1")
}

// Forward lets the machine pass packets on between its interfaces, as Pods need it.
func Forward() error { return forward() }

// forward lets the machine pass packets on between its interfaces.
func forward() error {
	// The kernel also sets the parameter of each interface (inet_forward_change).
	if err := sysctl.Set("net/ipv4/ip_forward", "1", keys("net/ipv4/conf/*/forwarding", "net/ipv4/conf/all/accept_redirects")...); err != nil {
		return err
	}
	if !HasIPv6() || sysctl.Value("net/ipv6/conf/all/forwarding") == "1" {
		return nil
	}
	// A machine that forwards stops listening to router advertisements, unless
	// accept_ra is 2 (Documentation/networking/ip-sysctl): keep its default route.
	for _, key := range keys("net/ipv6/conf/*/accept_ra") {
		if sysctl.Value(key) == "1" {
			_ = sysctl.Set(key, "2")
		}
	}
	return sysctl.Set("net/ipv6/conf/all/forwarding", "1", keys("net/ipv6/conf/*/forwarding")...)
}

// keys returns the parameters that match patterns.
func keys(patterns ...string) (out []string) {
	for _, p := range patterns {
		files, _ := filepath.Glob("/proc/sys/" + p)
		for _, f := range files {
			out = append(out, strings.TrimPrefix(f, "/proc/sys/"))
		}
	}
	return out
}
