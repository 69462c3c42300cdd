package connecttime

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// What has no room is nft's, and comes back when there is room.
func TestNoRoom(t *testing.T) {
	m := newMaps()
	m.room = 3
	rec := m.reconciler()
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80"), Local: true}, {Addr: flows.AP("10.244.0.2:80")}}
	port := func(n int) *table.ServicePort {
		addr := flows.AP(fmt.Sprintf("10.96.0.%d:80", n))
		return flows.Port(fmt.Sprintf("web%d", n), "", svc.IPv4, svc.TCP, table.Frontend{Addr: addr, Endpoints: at})
	}
	if err := rec.Apply(t.Context(), table.New(port(1), port(2)), nil); err != nil {
		t.Fatalf("no room is an error: %v", err)
	}
	if len(m.fronts) != 1 || len(m.slots) != 2 || len(m.own) != 1 {
		t.Errorf("%d frontends, %d slots, %d own endpoints; want one whole frontend", len(m.fronts), len(m.slots), len(m.own))
	}
	m.room = 10
	if err := rec.Apply(t.Context(), table.New(port(1), port(2)), []table.Key{port(1).Key(), port(2).Key()}); err != nil {
		t.Fatal(err)
	}
	if len(m.fronts) != 2 || len(m.slots) != 4 {
		t.Errorf("%d frontends, %d slots; want two whole frontends", len(m.fronts), len(m.slots))
	}
}

// Addresses of the node that have no room are nft's, and nothing else fails for their sake.
func TestNoRoomForNodeAddresses(t *testing.T) {
	m := newMaps()
	m.places = 2
	var log strings.Builder
	rec := m.reconcilerThatLogs(slog.NewTextHandler(&log, nil))
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}}
	tab := table.New(flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: web4, Endpoints: at}))
	for _, a := range []string{"192.0.2.1:0", "192.0.2.2:0", "192.0.2.3:0", "192.0.2.4:0"} {
		tab.NodePortAddrs = append(tab.NodePortAddrs, flows.AP(a).Addr())
	}
	for range 2 {
		rec.Forget()
		if err := rec.Apply(t.Context(), tab, nil); err != nil {
			t.Fatal(err)
		}
	}
	if len(m.nodes) != 2 || len(m.fronts) != 1 {
		t.Errorf("%d addresses and %d frontends, want 2 and 1", len(m.nodes), len(m.fronts))
	}
	if n := strings.Count(log.String(), "no room for all addresses"); n != 1 {
		t.Errorf("%d warnings, want 1: %s", n, log.String())
	}
	tab.NodePortAddrs = tab.NodePortAddrs[2:]
	if err := rec.Apply(t.Context(), tab, nil); err != nil {
		t.Fatal(err)
	}
	for _, a := range tab.NodePortAddrs {
		if !m.nodes[a] || len(m.nodes) != 2 {
			t.Errorf("after others went: %v, want all of %v", m.nodes, tab.NodePortAddrs)
		}
	}
}

// Where there is no room and what was begun cannot be removed, that is an error, whatever error the removal has.
func TestNoRoomAndNoRemoval(t *testing.T) {
	for _, unable := range []error{errors.New("a fault"), connect.ErrFull} {
		m := newMaps()
		m.room, m.unable = 1, unable
		rec := m.reconciler()
		at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}, {Addr: flows.AP("10.244.0.2:80")}}
		web := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: web4, Endpoints: at})
		if err := rec.Apply(t.Context(), table.New(), nil); err != nil {
			t.Fatal(err)
		}
		tab := table.New(web)
		if err := rec.Apply(t.Context(), tab, []table.Key{web.Key()}); !errors.Is(err, unable) {
			t.Errorf("%v, want %v", err, unable)
		}
		m.unable = nil
		if err := rec.Apply(t.Context(), tab, nil); err != nil || len(m.slots) > 0 {
			t.Errorf("the removal works again: %d slots, %v", len(m.slots), err)
		}
	}
}
