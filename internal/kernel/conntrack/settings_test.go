package conntrack_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestSettings(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		read := func(name string) string {
			b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
			if err != nil {
				t.Fatal(err)
			}
			return strings.TrimSpace(string(b))
		}
		before := read("udp_timeout_stream")
		if conntrack.BeLiberal() {
			t.Error("liberal before anything was set")
		}
		s := conntrack.Settings{TCPBeLiberal: true, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour, UDP: 17 * time.Second}
		if err := s.Set(); err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]string{
			"tcp_be_liberal": "1", "tcp_timeout_established": "86400", "tcp_timeout_close_wait": "3600",
			"udp_timeout": "17", "udp_timeout_stream": before,
		} {
			if got := read(name); got != want {
				t.Errorf("nf_conntrack_%s = %s, want %s", name, got, want)
			}
		}
		if !conntrack.BeLiberal() {
			t.Error("not liberal")
		}
		// The limit is the machine's; nothing here may change it, nor does it
		// keep the rest from being set.
		s = conntrack.Settings{Max: 12345, UDP: 18 * time.Second}
		if err := s.Set(); err == nil || !strings.Contains(err.Error(), "nf_conntrack_max") {
			t.Errorf("%v, want an error about nf_conntrack_max", err)
		}
		if got := read("udp_timeout"); got != "18" {
			t.Errorf("nf_conntrack_udp_timeout = %s after another error, want 18", got)
		}
	})
}

// As kube-proxy's getConntrackMax.
func TestMax(t *testing.T) {
	for _, c := range []struct{ perCore, least, processors, want int }{
		{0, 131072, 8, 0}, {32768, 131072, 2, 131072}, {32768, 131072, 8, 262144}, {32768, 0, 1, 32768},
	} {
		if got := conntrack.Max(c.perCore, c.least, c.processors); got != c.want {
			t.Errorf("Max(%d, %d, %d) = %d, want %d", c.perCore, c.least, c.processors, got, c.want)
		}
	}
}
