package nodecheck

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

const connected = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0B4DA8C0:9C40 0C4DA8C0:00B3 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0 20 4 24 10 -1
   1: 0100007F:2809 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: B80D0120000000000000000001000000:C000 B80D0120000000000000000002000000:00B3 01 00000000:00000000 00:00000000 0 0 0 3 1 0 20
   3: 0B4DA8C0:9C41 0C4DA8C0:01BB 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0 20 4 24 10 -1
`

// Established connections with routers count, in both families, and only one that lasts.
func TestWaiting(t *testing.T) {
	routers := []netip.AddrPort{netip.MustParseAddrPort("192.168.77.12:179"), netip.MustParseAddrPort("[2001:db8::2]:179")}
	now, err := parseConnections(strings.NewReader(connected), routers)
	if err != nil || len(now) != 2 {
		t.Fatalf("%v, %v", now, err)
	}
	since := map[connection]time.Time{}
	if got := waiting(routers, now, since, time.Hour); !strings.Contains(got, "younger than 1h0m0s") {
		t.Errorf("at the begin: %q", got)
	}
	for c := range since {
		since[c] = time.Now().Add(-time.Hour)
	}
	if got := waiting(routers, now, since, time.Hour); got != "" {
		t.Errorf("an hour later: %q", got)
	}
	if got := waiting(routers, now[:1], since, time.Hour); !strings.Contains(got, "no connection with the router [2001:db8::2]:179") {
		t.Errorf("without one: %q", got)
	}
	if got := waiting(routers, now, since, time.Hour); !strings.Contains(got, "[2001:db8::2]:179 is younger") {
		t.Errorf("with a new one: %q", got)
	}
	if _, err := parseConnections(strings.NewReader("x\n 0: 0:1 0:2 01 0\n"), routers); err == nil {
		t.Error("a wrong file is read")
	}
}
