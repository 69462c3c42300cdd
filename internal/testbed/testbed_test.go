package testbed

import (
	"context"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

func TestMain(m *testing.M) { Main(m) }

func TestProcessIsAloneInItsNamespace(t *testing.T) {
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		t.Error("the tests do not run as root")
	}
	if len(links) != 1 || links[0].Name != "lo" || links[0].Flags&net.FlagUp == 0 {
		t.Errorf("interfaces %v, want lo alone, up", links)
	}
}

func TestEverybodyReachesEverybodyAtOnce(t *testing.T) {
	n := NewNetwork(t)
	a, b := n.Host("a"), n.Host("b")
	servers := []*Host{a, a.Pod("a1"), a.Pod("a2"), b.Pod("b1")}
	clients := []*Host{a, b, a.Pod("a1"), a.Pod("a2"), b.Pod("b1")}
	for _, s := range servers {
		s.Serve(svc.TCP, 80)
		s.Serve(svc.UDP, 80)
		s.Serve(svc.SCTP, 80)
	}
	for _, c := range clients {
		for _, s := range servers {
			for _, p := range []svc.Protocol{svc.TCP, svc.UDP, svc.SCTP} {
				for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
					start := time.Now()
					got, err := c.Ask(t.Context(), p, netip.AddrPortFrom(s.Addr(f), 80))
					if err != nil || got.Name != s.Name() {
						t.Errorf("%s to %s %s %s: %+v, %v after %v", c.Name(), s.Name(), p, f, got, err, time.Since(start))
					}
					if c.Node() != nil && got.Client.Addr() != c.Addr(f) {
						t.Errorf("%s saw %s as %s, want %s", s.Name(), c.Name(), got.Client, c.Addr(f))
					}
				}
			}
		}
	}
}

func TestOutsideDoesNotKnowPods(t *testing.T) {
	n := NewNetwork(t)
	pod := n.Host("a").Pod("p")
	pod.Serve(svc.TCP, 80)
	out := n.Outside("client")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if got, err := out.Ask(ctx, svc.TCP, netip.AddrPortFrom(pod.Addr4(), 80)); err == nil || !Silent(err) {
		t.Errorf("got %+v, %v, want silence", got, err)
	}
	_, err := out.Ask(t.Context(), svc.TCP, netip.AddrPortFrom(n.Host("a").Addr4(), 81))
	if !Refused(err) {
		t.Errorf("closed port: %v, want refused", err)
	}
}

func TestCommandRunsOnTheHost(t *testing.T) {
	h := NewNetwork(t).Host("a")
	out, err := h.Command(t.Context(), "cat", "/proc/net/dev").Output()
	if err != nil || !strings.Contains(string(out), "eth0") {
		t.Errorf("devices %q, %v, want eth0 among them", out, err)
	}
}
