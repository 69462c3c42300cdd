package flows

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Connections that are open belong to the port that clients sent to, whatever its endpoint and client. Clients are named only if they
// are asked for, and of more than MaxClients the ones with the most connections.
func TestReportOfOpenConnections(t *testing.T) {
	c, tab := sample()
	c.served, c.lost = nil, nil
	usage := func(p svc.Protocol, client, to, from string, bytes uint64) *conntrack.Usage {
		return &conntrack.Usage{Protocol: p, Client: netip.MustParseAddr(client), OrigDst: ap(to), ReplySrc: ap(from),
			Sent: conntrack.Traffic{Packets: 1, Bytes: bytes}, Received: conntrack.Traffic{Packets: 2, Bytes: 10 * bytes}}
	}
	list := []*conntrack.Usage{
		usage(svc.TCP, "198.51.100.1", "10.96.0.1:80", "10.0.0.1:8080", 100),
		usage(svc.TCP, "198.51.100.1", "192.0.2.1:30080", "10.0.0.2:8080", 1), // a node port of the same
		usage(svc.TCP, "198.51.100.2", "10.96.0.1:80", "10.0.0.1:8080", 7),
		usage(svc.UDP, "198.51.100.3", "10.96.0.2:53", "10.96.0.2:53", 5),         // not translated: no endpoint
		usage(svc.TCP, "198.51.100.9", "203.0.113.1:443", "203.0.113.1:443", 1e6), // of no Service
	}
	ended := usage(svc.TCP, "198.51.100.8", "10.96.0.1:80", "10.0.0.1:8080", 100)
	ended.Closed = true
	list = append(list, ended)
	r := read(c, func() *table.Table { return tab })
	r.usage = func(_ context.Context, each func(*conntrack.Usage)) error {
		for _, u := range list {
			each(u)
		}
		return nil
	}
	r.counts = func() bool { return true }
	report := func(clients bool) string {
		got, err := r.Report(t.Context(), clients)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	open := func(n, bytes uint64) string {
		return fmt.Sprintf(`"connections":%d,"sent":{"packets":%d,"bytes":%d},"received":{"packets":%d,"bytes":%d}`, n, n, bytes, 2*n, 10*bytes)
	}
	dns := `{"namespace":"shop","service":"dns","port":"","protocol":"UDP","connections":0,"refusedPackets":0,"droppedPackets":0,` +
		`"endpoints":[],"open":{` + open(1, 5) + `}`
	web := `{"namespace":"shop","service":"web","port":"http","protocol":"TCP","connections":0,"refusedPackets":0,"droppedPackets":0,` +
		`"endpoints":[{"address":"10.0.0.1:8080","connections":0,"open":{` + open(2, 107) + `}},` +
		`{"address":"10.0.0.2:8080","connections":0,"open":{` + open(1, 1) + `}}],"open":{` +
		open(3, 108) + `}`
	head := `{"countsConnections":true,"countsBytes":true,"ports":[`
	if got, want := report(false), head+dns+`},`+web+`}]}`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	want := head + dns + `,"clients":[{"address":"198.51.100.3",` + open(1, 5) + `}]},` + web +
		`,"clients":[{"address":"198.51.100.1",` + open(2, 101) + `},{"address":"198.51.100.2",` +
		open(1, 7) + `}]}]}`
	if got := report(true); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	for i := range 2 * MaxClients {
		list = append(list, usage(svc.UDP, netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}).String(), "10.96.0.2:53", "10.0.0.9:53", 1))
	}
	list = append(list, usage(svc.UDP, "203.0.113.19", "10.96.0.2:53", "10.0.0.9:53", 1))
	got, err := r.Report(t.Context(), true)
	if err != nil || len(got.Ports[0].Clients) != MaxClients || got.Ports[0].Clients[0].Address != "203.0.113.19" {
		t.Errorf("%+v, %v", got.Ports[0].Clients, err)
	}
	r.usage = func(context.Context, func(*conntrack.Usage)) error { return errors.New("no module") }
	if got, err := r.Report(t.Context(), true); err != nil || got.Problem != "no module" || got.CountsBytes {
		t.Errorf("%+v, %v", got, err)
	}
}
