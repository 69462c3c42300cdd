package ipvs

import (
	"fmt"
	"os"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
)

// prepare makes the device and sets what the whole node needs.
func (m *Mode) prepare() error {
	if err := m.kernel.device.Ensure(); err != nil {
		return err
	}
	for _, s := range m.sysctls() {
		if err := sysctl.Set(s[0], s[1]); err != nil {
			return err
		}
	}
	if m.cfg.Timeouts == (ipvs.Timeouts{}) {
		return nil
	}
	return m.kernel.servers.SetTimeouts(m.cfg.Timeouts)
}

func (m *Mode) sysctls() [][2]string {
	out := [][2]string{
		// Connections are known to conntrack, so that they can be masqueraded.
		{"net/ipv4/vs/conntrack", "1"},
		// A client that uses a port again gets an endpoint that takes new
		// connections, not the one it had (kubernetes/kubernetes#81775).
		{"net/ipv4/vs/conn_reuse_mode", reuseMode()},
		// A connection whose endpoint was removed is forgotten with its next
		// packet, and a client that sticks to an endpoint that is leaving gets
		// another one.
		{"net/ipv4/vs/expire_nodest_conn", "1"},
		{"net/ipv4/vs/expire_quiescent_template", "1"},
	}
	if m.cfg.StrictARP {
		out = append(out, [2]string{"net/ipv4/conf/all/arp_ignore", "1"}, [2]string{"net/ipv4/conf/all/arp_announce", "2"})
	}
	return out
}

// reuseMode is the value of conn_reuse_mode. Before Linux 5.9 mode 1 dropped the
// first packet of a client that used a port again, which cost it a second
// (kubernetes/kubernetes#70747, Linux f0a5e4d7a594); since then it does not, and
// mode 0 would lead the client to its old endpoint.
func reuseMode() string {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	var major, minor int
	if err == nil {
		_, err = fmt.Sscanf(strings.TrimSpace(string(release)), "%d.%d", &major, &minor)
	}
	if err == nil && (major < 5 || major == 5 && minor < 9) {
		return "0"
	}
	return "1"
}
