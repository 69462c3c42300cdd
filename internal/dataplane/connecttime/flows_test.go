package connecttime

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// rig are the places of the programs of one test, and what is behind them.
type rig struct {
	cfg   connect.Config
	group *testbed.ControlGroup
	// variant is the one of mode iptables that is behind the programs, empty for mode nft.
	variant iptables.Variant
}

func newRig(t testing.TB) rig {
	t.Helper()
	g := testbed.Group(t)
	return rig{cfg: connect.Config{Cgroup: g.Dir, FS: testbed.BPFFS(t)}, group: g}
}

// behind runs a test for each mode that connect-time works in front of.
func behind(t *testing.T, f func(*testing.T, rig)) {
	t.Run("nft", func(t *testing.T) { f(t, newRig(t)) })
	behindIPTables(t, f)
}

// behindIPTables runs a test for each variant of mode iptables.
func behindIPTables(t *testing.T, f func(*testing.T, rig)) {
	for _, v := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		t.Run("iptables-"+string(v), func(t *testing.T) {
			r := newRig(t)
			r.variant = v
			f(t, r)
		})
	}
}

func (r rig) mode() string {
	if r.variant == "" {
		return "nft"
	}
	return "iptables"
}

// create is the flows.Factory.
func (r rig) create(t testing.TB, _ *testbed.Host) (m dataplane.Applier) {
	t.Helper()
	var err error
	if log := slog.New(slog.DiscardHandler); r.variant == "" {
		m, err = New(nft.Config{DropInvalid: true}, r.cfg, log)
	} else {
		m, err = NewIPTables(iptables.Config{Variant: r.variant, DropInvalid: true}, r.cfg, log)
	}
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// looked is what clients of a mode have found out: how many namespaces, and how many are Pods'.
func looked(m dataplane.Applier) (all, pods int) {
	if m, ok := m.(*IPTables); ok {
		return m.clients.Looked()
	}
	return m.(*NFT).clients.Looked()
}

// createKnown is create, with the Pods of the node known to the programs. A test's own threads enter a
// namespace only for the time of a call: a process in each Pod asks instead.
func (r rig) createKnown(t testing.TB, h *testbed.Host) dataplane.Applier {
	t.Helper()
	m := r.create(t, h)
	vip := flows.AP("10.96.7.7:80")
	at := []table.Endpoint{{Addr: flows.AP("10.244.99.99:80")}}
	known := table.New(flows.Port("known", "", svc.IPv4, svc.TCP, table.Frontend{Addr: vip, Endpoints: at}))
	if err := m.Apply(t.Context(), known, nil); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for _, name := range []string{"a", "b", "c"} {
		cmd := h.Pod(name).Command(ctx, self(t))
		cmd.Env = append(os.Environ(), callEnv+"="+vip.String())
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = cmd.Wait() }()
	}
	testbed.Until(t, "the Pods to be known", func() error {
		if _, n := looked(m); n != 3 {
			return fmt.Errorf("%d are known", n)
		}
		return nil
	})
	stop()
	return m
}

func self(t testing.TB) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

// Every question has the answer that every mode gives.
func TestFlows(t *testing.T) {
	behind(t, func(t *testing.T, r rig) { flows.Run(t, r.mode(), r.createKnown) })
}

// Every question has the same answer as with only the rules of the mode.
func TestSameAsWithout(t *testing.T) {
	behind(t, func(t *testing.T, r rig) {
		e := flows.NewEnv(t, r.createKnown)
		for _, p := range []svc.Protocol{svc.TCP, svc.UDP} {
			flows.Compare(t, e, p, r.group.Outside)
		}
	})
}

// Where another program's policy is to forward nothing, and only new connections of Pods are let through, answers come back, whether
// the rules have translated a connection or the programs.
func TestAnswersAreForwarded(t *testing.T) {
	behindIPTables(t, func(t *testing.T, r rig) {
		e := flows.NewEnv(t, r.createKnown)
		for word, f := range map[string]svc.Family{"iptables-": svc.IPv4, "ip6tables-": svc.IPv6} {
			tool := word + string(r.variant)
			run(t, e.Node, tool, "-P", "FORWARD", "DROP")
			run(t, e.Node, tool, "-A", "FORWARD", "-s", e.Node.PodCIDR(f).String(), "-j", "ACCEPT")
		}
		e.Apply(t, web(e, "d"), nil)
		for _, to := range []netip.AddrPort{web4, web6} {
			ask := func(tracked bool) {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				e.Forget(t)
				got, err := e.Host("b").Ask(ctx, svc.TCP, to)
				if err != nil || got.Name != "d" || (e.Node.Tracks(svc.TCP, to) == nil) != tracked {
					t.Errorf("%s, to be tracked: %v: %q, %v", to, tracked, got.Name, err)
				}
			}
			ask(false)
			r.group.Outside(func() { ask(true) })
		}
	})
}
