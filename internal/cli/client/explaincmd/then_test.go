package explaincmd

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// --at is a time of today, or a whole one, within what nodes remember.
func TestParseTime(t *testing.T) {
	now := time.Date(2026, 3, 4, 12, 30, 0, 0, time.FixedZone("here", 2*3600))
	for text, want := range map[string]string{
		"12:03": "2026-03-04T12:03:00+02:00", "12:03:07": "2026-03-04T12:03:07+02:00", "2026-03-04T10:03:00Z": "2026-03-04T10:03:00Z",
		"12:31": "later than now", "11:29": "nodes remember at most 1h0m0s", "noon": `--at is "noon"; want a time`, "25:00": "want a time",
	} {
		at, err := parseTime(text, now)
		if got := at.Format(time.RFC3339); err == nil && got != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %s, %v, want %s", text, got, err, want)
		}
	}
}

// A node's earlier ports replace the ports that have changed since. A node that does not remember the time is named.
func TestThen(t *testing.T) {
	port := func(name string, endpoints ...string) *table.ServicePort {
		f := table.Frontend{Addr: netip.MustParseAddrPort("10.96.0.10:80")}
		for _, e := range endpoints {
			f.Endpoints = append(f.Endpoints, table.Endpoint{Addr: netip.MustParseAddrPort(e)})
		}
		return &table.ServicePort{ID: svc.PortName{Name: svc.Name{Namespace: "default", Name: "web"}, Port: name}, Family: svc.IPv4,
			Protocol: svc.TCP, Frontends: []table.Frontend{f}}
	}
	at := time.Date(2026, 3, 4, 12, 3, 0, 0, time.UTC)
	now := &explain.Facts{Node: "n0", Mode: "nft", Ports: []explain.Port{{ServicePort: port("new")}, {ServicePort: port("http")},
		{ServicePort: port("same", "10.244.0.9:80")}}, Probes: []explain.Probe{{}}}
	was := proxy.Then{From: at, Changed: []proxy.ThenPort{{Key: port("new").Key()},
		{Key: port("http").Key(), Port: port("http", "10.244.0.5:80")}, {Key: port("gone").Key(), Port: port("gone")}}}
	answer := was
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if q := r.URL.Query(); q.Get("service") != "default/web" || q.Get("at") != "2026-03-04T12:03:00Z" {
			t.Errorf("asked for %s", r.URL)
		}
		_ = json.NewEncoder(w).Encode(answer)
	}))
	defer server.Close()
	client := kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL})
	q := &explain.Question{Service: port("").ID.Name, Then: true}
	got := then(t.Context(), asking.New(client), q.Service, now, at)
	var ports []string
	for _, p := range got.Ports {
		ports = append(ports, p.ID.Port+strings.Repeat("+", len(p.Frontends[0].Endpoints)))
	}
	if strings.Join(ports, " ") != "same+ http+ gone" || len(got.Probes) > 0 || got.Problem != "" {
		t.Errorf("ports %q: %+v", ports, got)
	}
	answer.From = at.Add(time.Second)
	got = then(t.Context(), asking.New(client), q.Service, now, at)
	r := &Report{Question: "web", At: &at, Verdicts: []*explain.Verdict{explain.Explain(q, &explain.Objects{}, got)}}
	var out bytes.Buffer
	if err := r.print(&out); err != nil || len(got.Ports) > 0 || !strings.Contains(out.String(), "it remembers nothing before ") ||
		!strings.Contains(out.String(), "web on node n0: not known") || !strings.Contains(out.String(), unknownThen) {
		t.Errorf("%v\n%s", err, &out)
	}
}
