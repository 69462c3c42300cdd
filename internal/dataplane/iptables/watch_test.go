package iptables

import (
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// What the mode itself writes is no change by another program: it would read
// everything after each change of a Service.
func TestOwnChangesAreNotReported(t *testing.T) {
	variants(t, func(t *testing.T, v Variant) {
		inside(t, Config{Variant: v}, func(m *Mode) { ownChangesAreNotReported(t, v, m) })
	})
}

func ownChangesAreNotReported(t *testing.T, v Variant, m *Mode) {
	token := func() bool {
		select {
		case <-m.Changed():
			return true
		default:
		}
		ok, err := m.Intact()
		if err != nil {
			t.Error(err)
		}
		return !ok
	}
	port := func(endpoints ...string) *table.ServicePort {
		return flows.Port("web", "", svc.IPv4, svc.TCP,
			table.Frontend{Addr: flows.AP("10.96.0.10:80"), Endpoints: flows.Endpoints(endpoints...)})
	}
	flows.Apply(t, m, table.New(), nil)
	for i, p := range []*table.ServicePort{port("10.0.0.1:80"), port("10.0.0.1:80", "10.0.0.2:80"), port("10.0.0.2:80"), port()} {
		token() // an earlier one does not count
		flows.Apply(t, m, table.New(p), []table.Key{p.Key()})
		if token() {
			t.Errorf("change %d was reported", i)
		}
	}
	for _, table := range []string{tableNAT, tableFilter} {
		flows.Command(t, "*"+table+"\n-I OUTPUT -j RETURN\nCOMMIT\n", restoreProgram(v), "--noflush")
	}
	if v == Legacy && !token() {
		t.Error("a change by others was not found")
	}
	flows.Command(t, "*nat\n-F "+chainServices+"\nCOMMIT\n", restoreProgram(v), "--noflush")
	// Our own next change does not hide it.
	flows.Apply(t, m, table.New(port("10.0.0.3:80")), []table.Key{port().Key()})
	if v == NFT {
		<-m.Changed()
	} else if !token() {
		t.Error("a change by others before one of ours was not found")
	}
	flows.Apply(t, m, table.New(port("10.0.0.3:80")), nil)
	if r := m.Repaired(); len(r) == 0 || token() {
		t.Errorf("repaired %q, and then reported something", r)
	}
}
