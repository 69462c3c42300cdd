package hubble

import (
	"fmt"
	"regexp/syntax"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
)

// Each filter that the hubble command makes takes exactly the flows that have what it asks for.
func TestFilters(t *testing.T) {
	type f = flow.FlowFilter
	for _, c := range []struct {
		name string
		f    *f
		want string // the numbers of the flows
	}{
		{"nothing", &f{}, "012"},
		{"source address", &f{SourceIp: []string{"10.244.0.5"}}, "02"},
		{"source range", &f{SourceIp: []string{"192.0.2.0/24", "2001:db8::/32"}}, "1"},
		{"masqueraded as", &f{SourceIpXlated: []string{"192.0.2.1"}}, "0"},
		{"destination range", &f{DestinationIp: []string{"10.96.0.0/16"}}, "2"},
		{"source Pod by a prefix", &f{SourcePod: []string{"shop/cli"}}, "02"},
		{"any Pod of a namespace", &f{DestinationPod: []string{"shop/"}}, "01"},
		{"a Pod of any namespace", &f{DestinationPod: []string{"/dns-"}}, "1"},
		{"a Pod of namespace default", &f{SourcePod: []string{"client"}}, ""},
		{"Service", &f{DestinationService: []string{"shop/web"}}, "0"},
		{"Service of any namespace", &f{DestinationService: []string{"/t", "/x"}}, "2"},
		{"source Service", &f{SourceService: []string{"shop/web"}}, ""},
		{"label", &f{SourceLabel: []string{"app=client"}}, "02"},
		{"label with a source", &f{DestinationLabel: []string{"k8s:app=web", "reserved:world"}}, "02"},
		{"label of another source", &f{DestinationLabel: []string{"reserved:app=web"}}, ""},
		{"label like a source", &f{DestinationLabel: []string{"k8s.example.com/tier in (front,back)"}}, "01"},
		{"labels together", &f{DestinationLabel: []string{"app,any:app!=dns"}}, "0"},
		{"workload", &f{DestinationWorkload: []*flow.Workload{{Name: "web"}}}, "0"},
		{"workload's kind", &f{SourceWorkload: []*flow.Workload{{Kind: "Deployment"}}}, "02"},
		{"identity", &f{SourceIdentity: []uint32{ReservedWorld}}, "1"},
		{"ports", &f{DestinationPort: []string{"53", "80"}}, "12"},
		{"source port", &f{SourcePort: []string{"40000"}}, "0"},
		{"direction", &f{TrafficDirection: []flow.TrafficDirection{flow.TrafficDirection_INGRESS}}, "1"},
		{"verdict", &f{Verdict: []flow.Verdict{flow.Verdict_FORWARDED}}, "01"},
		{"reason", &f{DropReasonDesc: []flow.DropReason{flow.DropReason_SERVICE_BACKEND_NOT_FOUND}}, "2"},
		{"family", &f{IpVersion: []flow.IPVersion{flow.IPVersion_IPv6}}, "1"},
		{"not a reply", &f{Reply: []bool{false}}, "012"},
		{"reply", &f{Reply: []bool{true}}, ""},
		{"protocol", &f{Protocol: []string{"UDP"}}, "1"},
		{"TCP flags", &f{TcpFlags: []*flow.TCPFlags{{ACK: true, SYN: true}, {SYN: true}}}, "2"},
		{"all of the TCP flags", &f{TcpFlags: []*flow.TCPFlags{{ACK: true, SYN: true}, {FIN: true}}}, ""},
		{"event", &f{EventType: []*flow.EventTypeFilter{{Type: eventDrop}}}, "2"},
		{"kind of event", &f{EventType: []*flow.EventTypeFilter{{Type: eventTrace, MatchSubType: true}}}, "1"},
		{"node", &f{NodeName: []string{"node-?"}}, "012"},
		{"node of a cluster", &f{NodeName: []string{"default/"}}, "012"},
		{"another node", &f{NodeName: []string{"other"}}, ""},
		{"two fields", &f{SourcePod: []string{"shop/client"}, Verdict: []flow.Verdict{flow.Verdict_DROPPED}}, "2"},
		{"UUID", &f{Uuid: []string{uuid(7, 1)}}, "1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, deny := range []bool{false, true} {
				lists := [2][]*f{{c.f}, nil}
				if deny {
					lists[0], lists[1] = lists[1], lists[0]
				}
				filter, err := NewFilter(lists[0], lists[1])
				if err != nil {
					t.Fatal(err)
				}
				for i, one := range sample() {
					one.number = uint64(i)
					if got := filter.Has(one.message("node-1", 7)); got != (strings.Contains(c.want, fmt.Sprint(i)) != deny) {
						t.Errorf("flow %d: %t, as a deny list: %t", i, got, deny)
					}
				}
			}
		})
	}
}

// A filter that this server cannot judge is an error with the field, not one that lets pass what it should not.
func TestFiltersThatNothingHas(t *testing.T) {
	type f = flow.FlowFilter
	unknown := &f{}
	unknown.ProtoReflect().SetUnknown([]byte{0xf8, 0x3f, 1}) // field 1023
	many := &f{SourcePort: make([]string, maxFilterValues+1)}
	for i := range many.SourcePort {
		many.SourcePort[i] = "1"
	}
	for _, c := range []struct {
		f    *f
		want string
	}{
		{&f{HttpHeader: []*flow.HTTPHeader{{Key: "a"}}},
			"whitelist[0].http_header: flows of this server do not have that; they have destination_identity,"},
		{&f{SourceFqdn: []string{"*"}}, "source_fqdn"},
		{&f{Experimental: &flow.FlowFilter_Experimental{CelExpression: []string{"true"}}}, "experimental"},
		{&f{Protocol: []string{"icmp"}}, `protocol: "icmp" is not tcp, udp, sctp, http or dns`},
		{&f{SourceIp: []string{"10.0.0.0/33"}}, `source_ip: "10.0.0.0/33" is not an IP address`},
		{&f{SourcePort: []string{"0"}}, `source_port: "0" is not a port`},
		{&f{SourceLabel: []string{"a in b"}}, "source_label: "},
		{&f{SourcePod: []string{""}}, "source_pod: a name is empty"},
		{&f{NodeName: []string{"[", "x"}}, "node_name: "},
		{&f{NodeName: []string{"elsewhere/*"}}, "node_name: "},
		{&f{HttpUrl: []string{"a", "(?:.{1000}){1000}"}}, "http_url: "},
		{&f{HttpPath: []string{"(?:a|bc){900}"}}, "http_path: \"(?:a|bc){900}\" compiles to more than 1000 instructions"},
		{&f{HttpPath: []string{strings.Repeat("a", maxExpression+1)}}, "http_path: a regular expression has 1001 bytes"},
		{&f{DnsQuery: []string{strings.Repeat(`\pL`, 200)}}, "dns_query: "},
		{&f{HttpUrl: slices.Repeat([]string{".{900}"}, 6), DnsQuery: slices.Repeat([]string{".{900}"}, 6)},
			"[0]: the regular expressions of the filters compile to more than 10000 instructions"},
		{unknown, "[0]: it has a field that this server does not know"},
		{many, "more than 1000 values"},
	} {
		if _, err := NewFilter([]*f{c.f}, nil); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %s", c.f, err, c.want)
		}
		if _, err := NewFilter(nil, []*f{c.f}); err == nil || !strings.HasPrefix(err.Error(), "blacklist[0]") {
			t.Errorf("%v as a deny list: %v", c.f, err)
		}
	}
}

// No expression compiles to more than what is counted for it, and what people write is let through.
func TestPrograms(t *testing.T) {
	for _, text := range []string{
		"", "a", "^http://web/", "/cart/[0-9]+$", `^/api/v[12]/(users|orders)/\d{1,9}(/.*)?$`, `(?i)^[\pL\pN.-]+\.svc\.cluster\.local\.$`,
		"a*?b+|c{3,}", "(?:a{2,5}){3}", "x{0}", "x{0,}", "(|a|)", `[^a]\b.(?s:.)`, "(?:(?:a?b){7}|c){7}", strings.Repeat("a?", 90),
	} {
		got, err := programOf(text)
		tree, wrong := syntax.Parse(text, syntax.Perl)
		if err != nil || wrong != nil {
			t.Errorf("%q: %v, %v", text, err, wrong)
			continue
		}
		if p, err := syntax.Compile(tree.Simplify()); err != nil || len(p.Inst) > got {
			t.Errorf("%q: %d instructions, %v; counted %d", text, len(p.Inst), err, got)
		}
	}
}
