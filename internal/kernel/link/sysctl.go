package link

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// forward lets the machine pass packets on between its interfaces.
func forward() error {
	if err := sysctl("net/ipv4/ip_forward", "1"); err != nil {
		return err
	}
	if !HasIPv6() || value("net/ipv6/conf/all/forwarding") == "1" {
		return nil
	}
	// A machine that forwards stops listening to router advertisements, unless
	// accept_ra is 2 (Documentation/networking/ip-sysctl): keep its default route.
	files, _ := filepath.Glob("/proc/sys/net/ipv6/conf/*/accept_ra")
	for _, f := range files {
		key := strings.TrimPrefix(f, "/proc/sys/")
		if value(key) == "1" {
			_ = sysctl(key, "2")
		}
	}
	return sysctl("net/ipv6/conf/all/forwarding", "1")
}

// sysctl sets a kernel parameter, named with slashes, unless it has the value.
func sysctl(key, want string) error {
	if value(key) == want {
		return nil
	}
	if err := os.WriteFile("/proc/sys/"+key, []byte(want), 0); err != nil {
		return fmt.Errorf("set %s to %s: %w; set it by hand if /proc/sys is read-only here", strings.ReplaceAll(key, "/", "."), want, err)
	}
	return nil
}

func value(key string) string {
	b, err := os.ReadFile("/proc/sys/" + key)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
