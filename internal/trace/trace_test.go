package trace

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/explain"
)

var (
	client   = netip.MustParseAddrPort("10.244.0.5:40000")
	frontend = netip.MustParseAddrPort("10.96.0.10:80")
	endpoint = netip.MustParseAddrPort("10.244.1.7:9376")
)

func passed(hook string, to netip.AddrPort) Step {
	return Step{Space: "node n1", Hook: hook, Passed: true, Out: "eth0", Source: client, Destination: to}
}

func rule(table, chain, verdict, text string, ours bool) Step {
	return Step{
		Space: "node n1", Hook: "forward", Table: table, Chain: chain, Handle: 7, Kind: "rule", Verdict: verdict, Text: text, Ours: ours,
	}
}

// verdict is of a Service with two endpoints.
func verdict() *explain.Verdict {
	return &explain.Verdict{
		Service: "default/web",
		Frontends: []explain.Frontend{{
			Lines: []explain.Line{
				{Text: "first", Source: "a"}, {Text: "no Pod has the labels app=web", Source: "Service default/web spec.selector"},
			},
			Proof: []explain.Line{
				{Text: "default/web, 2 endpoints", Source: "vips"}, {Text: endpoint.String(), Source: "slot 0"},
				{Text: "10.244.2.9:9376", Source: "slot 1"},
			},
		}},
		Endpoints: []explain.Endpoint{{Address: endpoint.String(), Pod: "web-1"}, {Address: "10.244.2.9:9376", Pod: "web-2"}},
	}
}

func TestTell(t *testing.T) {
	translated := []Step{passed("prerouting", frontend), rule("ip fairlead", "pick", "accept", "dnat", true), passed("prerouting", endpoint)}
	for _, c := range []struct {
		name   string
		seen   Seen
		result explain.Answer
		text   string // in the decision
		source string
		why    int
	}{
		{"answered", Seen{Answer: Accepted, Steps: append(translated, passed("postrouting", endpoint))}, explain.Answers,
			"endpoint 10.244.1.7:9376 (Pod default/web-1) answered", "answer to 10.244.0.5:40000", 1},
		{"nothing listens", Seen{Answer: Reset, Steps: append(translated, passed("postrouting", endpoint))}, explain.Refused,
			"endpoint 10.244.1.7:9376 (Pod default/web-1) refuses", "answer to", 1},
		{"refused by fairlead", Seen{Answer: Reset, Steps: []Step{
			passed("prerouting", frontend), rule("ip fairlead", "refuse", Drop, "reject", true),
		}}, explain.Refused, "fairlead rejects it in chain refuse", "node n1: table ip fairlead chain refuse rule 7", 1},
		{"dropped by another program", Seen{Answer: NoAnswer, Steps: append(translated, rule("inet fw", "forward", Drop, "rule 7 drops", false))},
			explain.Dropped, "a rule of another program drops it: rule 7 drops", "table inet fw chain forward rule 7", 0},
		{"dropped by a policy", Seen{Answer: NoAnswer, Steps: append(translated,
			Step{Space: "node n1", Hook: "forward", Table: "ip filter", Chain: "FORWARD", Kind: "policy", Verdict: Drop})},
			explain.Dropped, "by the policy of chain FORWARD", "node n1: table ip filter chain FORWARD", 0},
		{"it left, and nothing answers", Seen{Answer: NoAnswer, Steps: append(translated, passed("postrouting", endpoint))}, explain.Dropped,
			"left node n1 by eth0 to endpoint 10.244.1.7:9376", "node n1: postrouting", 1},
		{"it arrived, and nothing answers", Seen{Answer: NoAnswer, Steps: append(translated, passed("input", endpoint))}, explain.Dropped,
			"arrived at endpoint", "node n1: input", 1},
		{"lost between hooks", Seen{Answer: NoAnswer, Steps: translated}, explain.Dropped, "last seen in prerouting, and no rule of nf_tables",
			"node n1: prerouting", 1},
		{"rejected outside", Seen{Answer: Rejected, Error: "no route to host", Steps: append(translated, passed("postrouting", endpoint))},
			explain.Refused, "an ICMP error came back: no route to host", "answer to", 1},
		{"not sent", Seen{Answer: NoRoute, Error: "no route to 192.0.2.1"}, explain.Dropped, "no route to 192.0.2.1", "routes of web", 0},
		{"not traced", Seen{Answer: NoAnswer, Untraced: "the kernel cannot trace"}, explain.Dropped, "was sent, and nothing answers",
			"packet from", 1},
		{"dropped, and answered all the same", Seen{Answer: Accepted, Steps: append(translated, rule("inet fw", "forward", Drop, "", false))},
			explain.Answers, "answered", "answer to", 1},
	} {
		c.seen.Source, c.seen.Destination, c.seen.Protocol = client, frontend, "TCP"
		r := Tell("web", "my-service", &c.seen, verdict())
		if r.Result != c.result || len(r.Why) != c.why ||
			!strings.Contains(r.Decision.Text, c.text) || !strings.Contains(r.Decision.Source, c.source) {
			t.Errorf("%s: %s, %+v, why %v", c.name, r.Result, r.Decision, r.Why)
		}
		if c.why > 0 && r.Why[0].Source != "Service default/web spec.selector" {
			t.Errorf("%s: why %v", c.name, r.Why)
		}
		alone := Tell("web", "my-service", &c.seen, nil)
		if alone.Result != c.result || alone.Decision.Text == "" || alone.Service != "" {
			t.Errorf("%s, without objects: %s, %+v", c.name, alone.Result, alone.Decision)
		}
	}
}

func TestElements(t *testing.T) {
	s := &Seen{Answer: Accepted, Source: client, Destination: frontend, Steps: []Step{passed("postrouting", endpoint)}}
	if r := Tell("a", "b", s, verdict()); len(r.Elements) != 2 || r.Elements[1].Text != endpoint.String() || r.Pod != "default/web-1" {
		t.Errorf("elements of the endpoint that the packet went to: %+v", r.Elements)
	}
	s.Steps = nil
	if r := Tell("a", "b", s, verdict()); len(r.Elements) != 3 {
		t.Errorf("elements, where the endpoint is not known: %+v", r.Elements)
	}
}

// A user without rights on the node learns which chain dropped the packet, and nothing else of other programs.
func TestHide(t *testing.T) {
	s := &Seen{Answer: NoAnswer, Facts: &explain.Facts{}, Steps: []Step{
		passed("prerouting", frontend), rule("ip fairlead", "services", "continue", "jump services", true),
		rule("inet fw", "forward", Drop, `rule 7 drops packets from 203.0.113.9, comment "customer"`, false),
	}}
	s.Hide()
	if s.Facts != nil || s.Steps[2].Text != "" || s.Steps[2].Handle != 0 || s.Steps[2].Chain != "forward" || s.Steps[1].Text == "" {
		t.Errorf("%+v", s)
	}
	want := explain.Line{Text: "a rule of another program drops it", Source: "node n1: table inet fw chain forward"}
	if r := Tell("a", "b", s, nil); r.Decision != want {
		t.Errorf("%+v", r.Decision)
	}
}

func TestNotes(t *testing.T) {
	s := &Seen{Protocol: "UDP", Mode: "userspace", ConnectTime: "on", Untraced: "x", Source: client, Destination: frontend, Answer: NoAnswer,
		Undescribed: 3}
	if r := Tell("a", "b", s, verdict()); len(r.Notes) != 5 {
		t.Errorf("notes %q", r.Notes)
	}
	s = &Seen{Protocol: "TCP", Mode: "nft", ConnectTime: "the kernel has none", Source: client, Destination: frontend, Answer: NoAnswer}
	if r := Tell("a", "b", s, verdict()); len(r.Notes) != 0 {
		t.Errorf("notes %q", r.Notes)
	}
}

// In mode userspace the proxy answers, whatever its own connection to an endpoint does.
func TestProxyAnswers(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:40001")
	for mode, want := range map[string]string{
		"userspace": "the proxy of the node, which carries connections itself, answered at 127.0.0.1:40001",
		"nft":       "endpoint 127.0.0.1:40001 answered",
	} {
		s := &Seen{Protocol: "TCP", Mode: mode, Source: client, Destination: frontend, Answer: Accepted, Steps: []Step{passed("input", at)}}
		if r := Tell("a", "b", s, verdict()); r.Decision.Text != want {
			t.Errorf("%s: %+v", mode, r.Decision)
		}
	}
}

// A packet that leaves its node for an endpoint of another one names that node, and the command that goes on there.
func TestNext(t *testing.T) {
	const tcp = "fairlead trace n2 10.244.1.7:9376"
	left := passed("postrouting", endpoint)
	pod := func(hook string) Step { s := passed(hook, endpoint); s.Space = "pod shop/a"; return s }
	for name, test := range map[string]struct {
		node     string // of the endpoint
		protocol string
		steps    []Step
		want     string
	}{
		"another node":           {"n2", "TCP", []Step{passed("prerouting", frontend), left}, tcp},
		"UDP":                    {"n2", "UDP", []Step{left}, tcp + " --protocol UDP"},
		"a rule after":           {"n2", "TCP", []Step{left, rule("ip fairlead", "x", "accept", "", true)}, tcp},
		"the same node":          {"n1", "TCP", []Step{passed("postrouting", endpoint)}, ""},
		"no node":                {"", "TCP", []Step{passed("postrouting", endpoint)}, ""},
		"it arrived":             {"n2", "TCP", []Step{passed("input", endpoint)}, ""},
		"not yet out of its Pod": {"n2", "TCP", []Step{pod("postrouting")}, ""},
		"elsewhere":              {"n2", "TCP", []Step{passed("postrouting", netip.MustParseAddrPort("192.0.2.1:80"))}, ""},
		"untraced":               {"n2", "TCP", nil, ""},
	} {
		v := verdict()
		v.Endpoints[0].Node = test.node
		r := Tell("a", "b", &Seen{Protocol: test.protocol, Answer: NoAnswer, Source: client, Destination: frontend, Steps: test.steps}, v)
		n := r.Next
		if test.want == "" != (n == nil) || n != nil && (n.Command != test.want || n.From != "n1" || n.Device != "eth0") {
			t.Errorf("%s: %+v, want %q", name, n, test.want)
		}
	}
}
