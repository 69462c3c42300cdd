package socket

import (
	"errors"
	"os"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// Families are the families that this kernel has.
func Families() []svc.Family {
	if _, err := os.Stat("/proc/sys/net/ipv6"); errors.Is(err, os.ErrNotExist) {
		return []svc.Family{svc.IPv4}
	}
	return []svc.Family{svc.IPv4, svc.IPv6}
}

// UsableFamilies are the Families of which interfaces of the calling thread's network
// namespace can have addresses: not IPv6 where net.ipv6.conf.all.disable_ipv6 is set.
func UsableFamilies() []svc.Family {
	all := Families()
	if text, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6"); err == nil && strings.TrimSpace(string(text)) == "1" {
		return all[:1]
	}
	return all
}
