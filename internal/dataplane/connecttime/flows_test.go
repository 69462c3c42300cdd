package connecttime

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// rig are the places of the programs of one test.
type rig struct {
	cfg   connect.Config
	group *testbed.ControlGroup
}

func newRig(t testing.TB) rig {
	t.Helper()
	g := testbed.Group(t)
	return rig{connect.Config{Cgroup: g.Dir, FS: testbed.BPFFS(t)}, g}
}

// create is the flows.Factory.
func (r rig) create(t testing.TB, _ *testbed.Host) dataplane.Applier {
	t.Helper()
	m, err := New(nft.Config{DropInvalid: true}, r.cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// createKnown is create, with the Pods of the node known to the programs. A test's own threads enter a
// namespace only for the time of a call: a process in each Pod asks instead.
func (r rig) createKnown(t testing.TB, h *testbed.Host) dataplane.Applier {
	t.Helper()
	m := r.create(t, h).(*Mode)
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
		if _, n := m.clients.Looked(); n != 3 {
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
func TestFlows(t *testing.T) { flows.Run(t, "nft", newRig(t).createKnown) }

// Every question has the same answer as with nft only.
func TestSameAsNFT(t *testing.T) {
	r := newRig(t)
	e := flows.NewEnv(t, r.createKnown)
	for _, p := range []svc.Protocol{svc.TCP, svc.UDP} {
		flows.Compare(t, e, p, r.group.Outside)
	}
}
