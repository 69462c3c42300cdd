package drops

import (
	"net"
	"os/exec"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

const prefix Prefix = "test-"

// inside runs f in a network namespace where what is sent to the UDP port 9 of
// the host is counted as dropped. send sends one.
func inside(t *testing.T, lifetime time.Duration, f func(s *IPSets, host *testbed.Host, send func())) {
	t.Helper()
	host := testbed.NewNetwork(t).Outside("host")
	host.Do(func() {
		s := NewIPSets(prefix)
		s.lifetime = lifetime
		for range 2 { // to make them again is no error
			if err := s.Open(svc.IPv4, svc.IPv6); err != nil {
				t.Fatal(err)
			}
		}
		rules := "*filter\n-A OUTPUT -p udp -m udp --dport 9 " + prefix.Rule(svc.IPv4, Dropped) + "\nCOMMIT\n"
		cmd := exec.CommandContext(t.Context(), "iptables-legacy-restore", "--noflush")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = in.Write([]byte(rules)); _ = in.Close() }()
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		c, err := net.Dial("udp4", host.Addr4().String()+":9")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		f(s, host, func() {
			// The lack of a listener may be an error of this write; the packet goes all
			// the same with the next.
			if _, err := c.Write([]byte("?")); err != nil {
				if _, err := c.Write([]byte("?")); err != nil {
					t.Fatal(err)
				}
			}
		})
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if got, err := s.Drops(t.Context()); len(got) != 0 || err != nil {
			t.Errorf("after Close there is %+v, %v", got, err)
		}
	})
}

func dropped(t *testing.T, s *IPSets) uint64 {
	t.Helper()
	got, err := s.Drops(t.Context())
	if err != nil || len(got) > 1 {
		t.Fatalf("Lost = %+v, %v, want one destination at most", got, err)
	}
	if len(got) == 0 {
		return 0
	}
	if got[0].Protocol != svc.UDP || got[0].To.Port() != 9 || got[0].Rejected != 0 {
		t.Errorf("counted %+v", got[0])
	}
	return got[0].Dropped
}

// left is how much time the one destination has.
func left(t *testing.T, s *IPSets) (d time.Duration) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.conn.Counts(prefix.name(svc.IPv4, Dropped), func(c ipset.Count) { d = c.Left }); err != nil {
		t.Fatal(err)
	}
	return d
}

// The kernel's own way to renew an element begins its count anew. So that is done
// by whoever reads it: a destination with packets keeps its count beyond its
// time, one without is forgotten.
func TestCountsOutlastTheirTime(t *testing.T) {
	const lifetime = 4 * time.Second
	inside(t, lifetime, func(s *IPSets, _ *testbed.Host, send func()) {
		// On a machine that stalls, this proves nothing and begins again.
		start := time.Now()
		last, sent := start, uint64(0)
		for time.Since(start) < lifetime+time.Second {
			send()
			sent++
			switch got, gap := dropped(t, s), time.Since(last); {
			case gap > lifetime/4:
				start, sent = time.Now(), got
			case got != sent:
				t.Fatalf("%d packets counted after %s, want %d", got, time.Since(start), sent)
			}
			last = time.Now()
			pause(t, 100*time.Millisecond)
		}
		// Reading alone renews nothing, however often it is done.
		for deadline := time.Now().Add(10 * lifetime); dropped(t, s) > 0; pause(t, 100*time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("a destination without packets is there for another %s", left(t, s))
			}
		}
	})
}

// pause lets real time pass: the kernel's clock is what is tested.
func pause(t *testing.T, d time.Duration) {
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// Sets that another program removed are an error that names them, not nothing.
func TestRemovedSetsAreTold(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		s := NewIPSets(prefix)
		if err := s.Open(svc.IPv4); err != nil {
			t.Fatal(err)
		}
		if err := ipset.Remove(t.Context(), prefix.Names()...); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Drops(t.Context()); err == nil {
			t.Errorf("Lost = %+v without sets", got)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

var (
	_ dataplane.Counter = (*IPSets)(nil)
	_ dataplane.Counter = (*Tables)(nil)
)
