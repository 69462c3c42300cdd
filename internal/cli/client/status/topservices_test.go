package status

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/flows"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
)

func TestTopServicesAddsUpNodes(t *testing.T) {
	web := func(connections, refused uint64, endpoints ...flows.Endpoint) flows.Port {
		return flows.Port{Namespace: "shop", Service: "web", Port: "http", Protocol: "TCP",
			Connections: connections, Refused: refused, Endpoints: endpoints}
	}
	open := func(n, bytes uint64) *flows.Open {
		return &flows.Open{Connections: n, Sent: conntrack.Traffic{Packets: n, Bytes: bytes}}
	}
	answers := map[string]*flows.Report{
		"n1": {Ports: []flows.Port{web(3, 0, flows.Endpoint{Address: "10.0.0.1:80", Connections: 3}),
			{Namespace: "a", Service: "dns", Protocol: "UDP", Connections: 1, Dropped: 9}}},
		"n2": {Ports: []flows.Port{web(4, 2, flows.Endpoint{Address: "10.0.0.2:80", Connections: 3},
			flows.Endpoint{Address: "10.0.0.1:80", Connections: 1})}},
	}
	for node, n := range map[string]uint64{"n1": 1, "n2": 2} {
		p := &answers[node].Ports[0]
		p.Open, p.Endpoints[0].Open = open(n, 100*n), open(n, 100*n)
		p.Clients = []flows.Client{{Address: "198.51.100.1", Open: *open(n, 100*n)}}
	}
	answers["n1"].Ports[1].Open = open(9, 10)
	list := sum(answers)
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	of := func(n, bytes uint64) string {
		return fmt.Sprintf(`"connections":%d,"sent":{"packets":%d,"bytes":%d},"received":{"packets":0,"bytes":0}}`, n, n, bytes)
	}
	want := `[{"namespace":"a","service":"dns","port":"","protocol":"UDP","connections":1,"refusedPackets":0,"droppedPackets":9,` +
		`"endpoints":[],"open":{` + of(9, 10) + `},{"namespace":"shop","service":"web","port":"http","protocol":"TCP","connections":7,` +
		`"refusedPackets":2,"droppedPackets":0,"endpoints":[{"address":"10.0.0.1:80","connections":4,"open":{` + of(1, 100) + `},` +
		`{"address":"10.0.0.2:80","connections":3,"open":{` + of(2, 200) + `}],"open":{` + of(3, 300) + `,"clients":[{` +
		`"address":"198.51.100.1",` + of(3, 300) + `]}]`
	if string(text) != want {
		t.Errorf("got  %s\nwant %s", text, want)
	}
	for by, first := range map[string]string{"connections": "web", "open": "dns", "bytes": "web", "refused": "web", "dropped": "dns",
		"name": "dns"} {
		slices.SortFunc(list, func(a, b flows.Port) int { return compareServices(by, &a, &b) })
		if list[0].Service != first {
			t.Errorf("--sort-by %s begins with %s, want %s", by, list[0].Service, first)
		}
	}
}

// A rate is what came since the report before; a count that began again counts from 0, and a node that was not in both reports
// counts for nothing.
func TestTopServicesRates(t *testing.T) {
	at := func(counts ...uint64) map[string]*flows.Report { // of nodes; 0 for one that does not answer
		out := map[string]*flows.Report{}
		for i, n := range counts {
			if n > 0 {
				out[fmt.Sprint("n", i)] = &flows.Report{Ports: []flows.Port{{Namespace: "shop", Service: "web", Protocol: "TCP", Connections: n}}}
			}
		}
		return out
	}
	for _, c := range []struct {
		before, after []uint64
		want          string
	}{
		{[]uint64{10}, []uint64{40}, "10.0"}, {[]uint64{40}, []uint64{6}, "2.0"}, {[]uint64{6}, []uint64{6}, "0.0"},
		{[]uint64{10, 1000}, []uint64{40, 1003}, "11.0"},
		{[]uint64{10, 1000}, []uint64{40, 0}, "10.0"}, {[]uint64{10, 0}, []uint64{40, 1000}, "10.0"},
		{[]uint64{10, 0}, []uint64{0, 1000}, "-"},
	} {
		r := topServicesReport{answers: at(c.after...)}
		for _, p := range sum(r.answers) {
			r.Services = append(r.Services, topService{Port: p})
		}
		r.rates(at(c.before...), 3*time.Second)
		var out bytes.Buffer
		if err := r.print(&out); err != nil {
			t.Fatal(err)
		}
		_, line, _ := strings.Cut(strings.TrimSpace(out.String()), "\n")
		if got := strings.Fields(line); len(got) < 5 || got[4] != c.want {
			t.Errorf("from %d to %d: %q, want %q", c.before, c.after, got, c.want)
		}
	}
}
