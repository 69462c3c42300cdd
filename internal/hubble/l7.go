package hubble

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
)

// L7 is a request and its answer. The flows of both share it; it does not change.
type L7 struct {
	// Latency is the time until the answer.
	Latency time.Duration
	// Refused reports that the proxy has given the request to no endpoint.
	Refused bool
	// HTTP or DNS is set.
	HTTP *HTTP
	DNS  *DNS
}

// HTTP is a request of HTTP and its answer. Its texts are printable ASCII.
type HTTP struct {
	Method, URL, Protocol string
	Code                  int
}

// DNS is a question of DNS and its answer. Its texts are printable ASCII.
type DNS struct {
	Query, Type, Rcode string
	Code               int
	IPs                []netip.Addr
	CNAMEs             []string
	Types              []string // of the answer's records
	TTL                uint32   // the least
}

// eventL7 is the kind of event of requests, in Cilium's numbers.
const eventL7 = 129

// dnsProxy is what Hubble calls a server that answers questions itself.
const dnsProxy = "proxy"

// layer7 makes a message one of a request, or of its answer.
func (f *Flow) layer7(out *flow.Flow) {
	l := f.L7
	out.Type, out.EventType, out.TraceObservationPoint = flow.FlowType_L7, &flow.CiliumEventType{Type: eventL7}, 0
	out.L7 = &flow.Layer7{Type: flow.L7FlowType_REQUEST}
	if f.Answer {
		out.IsReply.Value = true
		out.L7.Type, out.L7.LatencyNs = flow.L7FlowType_RESPONSE, uint64(max(l.Latency, 0))
		out.SourceService, out.DestinationService = out.GetDestinationService(), nil
	} else if l.Refused {
		out.Verdict = flow.Verdict_DROPPED
	}
	summary := ""
	switch {
	case l.HTTP != nil:
		m := &flow.HTTP{Method: l.HTTP.Method, Url: l.HTTP.URL, Protocol: l.HTTP.Protocol}
		summary = fmt.Sprintf("%s %s %s", m.GetProtocol(), m.GetMethod(), m.GetUrl())
		if f.Answer {
			m.Code = uint32(l.HTTP.Code)
			summary = fmt.Sprintf("%s %d %dms (%s %s)", m.GetProtocol(), m.GetCode(), l.Latency.Milliseconds(), m.GetMethod(), m.GetUrl())
		}
		out.L7.Record = &flow.Layer7_Http{Http: m}
	case l.DNS != nil:
		out.L7.Record = &flow.Layer7_Dns{Dns: l.DNS.message(f.Answer)}
		summary = l.DNS.summary(f.Answer)
	}
	out.Summary = summary //nolint:staticcheck // what the hubble command prints
}

func (d *DNS) message(answer bool) *flow.DNS {
	out := &flow.DNS{Query: d.Query, ObservationSource: dnsProxy, Qtypes: []string{d.Type}}
	if !answer {
		return out
	}
	for _, a := range d.IPs {
		out.Ips = append(out.Ips, a.String())
	}
	out.Cnames, out.Rrtypes, out.Ttl, out.Rcode = d.CNAMEs, d.Types, d.TTL, uint32(d.Code)
	return out
}

// summary is in Hubble's words.
func (d *DNS) summary(answer bool) string {
	if !answer {
		return fmt.Sprintf("DNS Query %s %s", d.Query, d.Type)
	}
	var parts []string
	if d.Code != 0 {
		parts = append(parts, "RCode: "+d.Rcode)
	}
	if len(d.IPs) > 0 {
		ips := make([]string, len(d.IPs))
		for i, a := range d.IPs {
			ips[i] = a.String()
		}
		parts = append(parts, fmt.Sprintf("%q", strings.Join(ips, ",")))
	}
	if len(d.CNAMEs) > 0 {
		parts = append(parts, fmt.Sprintf("CNAMEs: %q", strings.Join(d.CNAMEs, ",")))
	}
	return fmt.Sprintf("DNS Answer %s TTL: %d (Proxy %s %s)", strings.Join(parts, " "), d.TTL, d.Query, d.Type)
}
