package proxy

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// The past is that of one Service, in order, within its time, and bounded.
func TestHistory(t *testing.T) {
	port := func(service string, endpoints int) *table.ServicePort {
		p := &table.ServicePort{ID: svc.PortName{Name: svc.Name{Namespace: "default", Name: service}}, Family: svc.IPv4, Protocol: svc.TCP}
		list := make([]table.Endpoint, endpoints)
		for i := range list {
			list[i].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}), 80)
		}
		p.Frontends = []table.Frontend{{Addr: netip.MustParseAddrPort("10.96.0.10:80"), Endpoints: list}}
		return p
	}
	web := svc.Name{Namespace: "default", Name: "web"}
	key := []table.Key{port("web", 0).Key(), port("other", 0).Key()}
	var h history
	start := time.Unix(1000, 0)
	h.note(start, nil, table.New(port("web", 1)), key)
	if got := h.of(web, time.Time{}); len(got) != 0 {
		t.Errorf("the first Table is a change: %+v", got)
	}
	one, two := table.New(port("web", 1), port("other", 1)), table.New(port("web", 2))
	h.note(start.Add(time.Minute), one, two, key)
	h.note(start.Add(2*time.Minute), two, table.New(), key)
	h.note(start.Add(3*time.Minute), two, two, key)
	got := h.of(web, time.Time{})
	if len(got) != 2 || got[0].After != two.Get(key[0]).String() || got[1].Before != got[0].After || got[1].After != "" {
		t.Errorf("the past is %+v", got)
	}
	for after, want := range map[time.Duration]string{0: one.Get(key[0]).String(), 90 * time.Second: two.Get(key[0]).String(),
		3 * time.Minute: "unchanged"} {
		then := h.then(web, start.Add(after))
		has := "unchanged"
		if len(then.Changed) == 1 && then.Changed[0].Key == key[0] && then.Changed[0].Port != nil {
			has = then.Changed[0].Port.String()
		}
		if has != want || !then.From.Equal(start) {
			t.Errorf("after %s it was %q, remembered from %s; want %q, %s", after, has, then.From, want, start)
		}
	}
	if got := h.of(web, start.Add(90*time.Second)); len(got) != 1 {
		t.Errorf("since later: %+v", got)
	}
	h.note(start.Add(historyTime+90*time.Second), two, one, key[:1])
	if then := h.then(web, start); !then.From.Equal(start.Add(time.Minute)) {
		t.Errorf("after an hour what is remembered begins at %s", then.From)
	}
	if got := h.of(web, time.Time{}); len(got) != 2 || !got[0].Time.Equal(start.Add(2*time.Minute)) {
		t.Errorf("after an hour: %+v", got)
	}
	for i := range 50 {
		h.note(start.Add(historyTime+2*time.Minute), table.New(), table.New(port(fmt.Sprint("s", i), 10_000)),
			[]table.Key{port(fmt.Sprint("s", i), 0).Key()})
	}
	if h.total > historyEndpoints || len(h.list) > 21 || len(h.list) < 15 {
		t.Errorf("%d changes with %d endpoints are remembered", len(h.list), h.total)
	}
	for range 30 {
		many := make([]table.Key, 0, 1000)
		next := make([]*table.ServicePort, 0, 1000)
		for i := range 1000 {
			p := port(fmt.Sprint("t", i), 0)
			many, next = append(many, p.Key()), append(next, p)
		}
		h.note(start.Add(historyTime+3*time.Minute), table.New(), table.New(next...), many)
	}
	if len(h.list) != historyChanges {
		t.Errorf("%d changes are remembered", len(h.list))
	}
}
