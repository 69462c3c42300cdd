package nft

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// What is read back of single frontends is what the Table has, in every state.
func TestLook(t *testing.T) {
	for _, cfg := range []Config{{}, {Balance: dataplane.RoundRobin}} {
		flows.Looks(t, flows.States(1), empty(cfg))
	}
}

// An element that another program removed is missing in the result, and so is an endpoint.
func TestLookShowsTampering(t *testing.T) {
	empty(Config{})(t, func(p dataplane.Applier) {
		tab := flows.EveryField()
		flows.Apply(t, p, tab, nil)
		asked, want := flows.Asked(tab)
		flows.Command(t, "", "nft", "delete element ip fairlead vips { 10.96.0.12 . tcp . 5432 }")
		flows.Command(t, "", "nft", "delete element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 1 }")
		found, err := p.(dataplane.Looker).Look(t.Context(), asked, netip.Addr{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for i := range found {
			if d := found[i].Differs(&want[i]); d != "" {
				got = append(got, found[i].Front+": "+d)
			}
		}
		text := strings.Join(got, "\n")
		if len(got) != 2 || !strings.Contains(text, "TCP 10.96.0.12:5432: the frontend is not installed") ||
			!strings.Contains(text, "TCP 10.96.0.10:80: clients elsewhere are sent to ") {
			t.Errorf("%q", got)
		}
	})
}

// A client with affinity is shown with its endpoint.
func TestLookShowsAffinity(t *testing.T) {
	e := flows.NewEnv(t, create)
	web := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: flows.AP("10.96.0.10:80"), Endpoints: []table.Endpoint{
		{Addr: netip.AddrPortFrom(e.Host("a").Addr4(), 9376)}, {Addr: netip.AddrPortFrom(e.Host("b").Addr4(), 9376)}}})
	web.Affinity = time.Hour
	tab := table.New(web)
	e.Apply(t, tab, nil)
	got, err := e.Host("c").Ask(t.Context(), svc.TCP, flows.AP("10.96.0.10:80"))
	if err != nil {
		t.Fatal(err)
	}
	asked, _ := flows.Asked(tab)
	for _, client := range []string{"c", "d"} {
		found, err := e.Dataplane.(dataplane.Looker).Look(t.Context(), asked, e.Host(client).Addr4())
		if err != nil {
			t.Fatal(err)
		}
		want := netip.AddrPort{}
		if client == "c" {
			want = netip.AddrPortFrom(e.Host(got.Name).Addr4(), 9376)
		}
		if found[0].Kept != want {
			t.Errorf("%s is kept at %s, want %s: %+v", client, found[0].Kept, want, found[0])
		}
	}
}
