package proxy

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/dataplane/userspace"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

var serviceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}

// modes are those whose rules live in the kernel, with what takes them away; the
// last one also needs its process.
var modes = []struct {
	name    string
	create  flows.Factory
	cleanUp func(context.Context) error
}{
	{"nft", func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		p, err := nft.New(nft.Config{DropInvalid: true})
		return made(t, p, err)
	}, nft.Cleanup},
	{"iptables-nft", iptablesMode(iptables.NFT), iptables.Cleanup},
	{"iptables-legacy", iptablesMode(iptables.Legacy), iptables.Cleanup},
	{"userspace", func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		p, err := userspace.New(userspace.Config{})
		return made(t, p, err)
	}, userspace.Cleanup},
}

func iptablesMode(v iptables.Variant) flows.Factory {
	return func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		p, err := iptables.New(iptables.Config{Variant: v, DropInvalid: true})
		return made(t, p, err)
	}
}

func made(t testing.TB, p dataplane.Applier, err error) dataplane.Applier {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A node changes from any mode to any other under load: the next one writes all
// of its own before what the last one left goes. Connections that are open stay so,
// and no new one is lost.
func TestModeChangesUnderLoad(t *testing.T) {
	e := flows.NewEnv(t, modes[0].create)
	tab := e.Stable()
	tab.ServiceCIDRs = serviceCIDRs
	e.Apply(t, tab, nil)
	open, err := e.Host("c").Dial(t.Context(), svc.TCP, netip.MustParseAddrPort("10.96.0.10:80"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Close() }()
	first, err := testbed.AskOn(open)
	if err != nil {
		t.Fatal(err)
	}
	at := 0
	e.UnderLoad(t, func() {
		for _, next := range []int{1, 0, 2, 0, 2, 0, 3, 0, 3, 2} {
			old := e.Dataplane
			e.Node.Do(func() { e.Dataplane = modes[next].create(t, e.Node) })
			e.Apply(t, tab, nil)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			e.Node.Do(func() { err = modes[at].cleanUp(ctx) })
			cancel()
			if err != nil {
				t.Errorf("clean up mode %s: %v", modes[at].name, err)
			}
			if err := old.Close(); err != nil {
				t.Error(err)
			}
			at = next
			if _, err := open.Write([]byte{'?'}); err != nil {
				t.Errorf("the connection to %s that was open before is lost in mode %s: %v", first.Name, modes[at].name, err)
			}
		}
	})
	echo := make([]byte, 6)
	_ = open.SetReadDeadline(time.Now().Add(30 * time.Second))
	for n := 0; n < len(echo); {
		m, err := open.Read(echo[n:])
		if err != nil {
			t.Fatalf("of 6 bytes over the connection that was open before, %d came back: %v", n, err)
		}
		n += m
	}
}

// A long time of changes, restarts and audits costs a stable Service no request
// ($FAIRLEAD_SOAK makes it longer).
func TestSoak(t *testing.T) {
	for _, m := range modes[:3] {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			flows.Soak(t, m.create)
		})
	}
}
