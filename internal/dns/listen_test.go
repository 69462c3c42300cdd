package dns

import (
	"errors"
	"net/netip"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// A process that is being forked has copies of all sockets until its exec, also of
// those that are closed meanwhile: what Listen opens does not depend on that.
func TestListenWhileProcessesStart(t *testing.T) {
	program, err := exec.LookPath("true")
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var forks sync.WaitGroup
	defer forks.Wait()
	defer close(stop)
	started := make(chan struct{}, 1)
	forks.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := exec.Command(program).Run(); err != nil {
				t.Error(err)
				return
			}
			select {
			case started <- struct{}{}:
			default:
			}
		}
	})
	// Each address is used once: those of sockets that were closed may be taken still.
	failed, forked := 0, 0
	for i, end := 0, time.Now().Add(time.Minute); i < 20000 && forked < 300 && time.Now().Before(end); i++ {
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 77, byte(i / 250), byte(i%250 + 1)}), 10053)
		l, err := listenOnce(addr, 2, false)
		if err != nil {
			if failed++; failed == 1 {
				t.Error(err)
			}
			continue
		}
		l.close()
		select {
		case <-started:
			forked++
		default:
		}
	}
	if failed > 0 || forked == 0 {
		t.Errorf("%d failures while %d processes were started", failed, forked)
	}
}

// All sockets of one address get questions, and a second server does not get the
// address.
func TestWorkersShareAnAddress(t *testing.T) {
	for _, on := range []string{"127.0.0.1:0", "[::1]:0", "0.0.0.0:0"} {
		o := clusterOptions()
		o.Listen, o.Workers = []string{on}, 3
		s := start(t, o)
		fill(s.Zone(), objects(t))
		at := s.Addrs()[0]
		if c, err := listenUDP(at, false, false); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("%s: a second server: %v, %v", at, c, err)
		}
		client := at
		if at.Addr().IsUnspecified() {
			client = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port())
		}
		c := mdns.Client{Net: "udp", Timeout: 30 * time.Second}
		// The kernel chooses by a hash of both addresses; each question has its own port.
		for range 100 {
			if _, _, err := c.Exchange(question("my-service.prod.svc.cluster.local.", mdns.TypeA), client.String()); err != nil {
				t.Fatalf("%s: %v", at, err)
			}
		}
		s.stats.mu.Lock()
		for i, w := range s.stats.all {
			n := w.requests[zoneCluster][0][0].Load() + w.requests[zoneCluster][1][0].Load() // A by IPv4 and IPv6
			if w.proto == "udp" && n == 0 {
				t.Errorf("%s: socket %d got none of 100 questions", at, i)
			}
		}
		s.stats.mu.Unlock()
	}
}
