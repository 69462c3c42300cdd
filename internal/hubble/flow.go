// Package hubble shows the flows of a node by Hubble's API: connections, packets that reached no endpoint, and requests of HTTP and
// DNS, with the Pods and the Service that they belong to.
package hubble

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/svc"
)

// Flow is a new connection, a packet that reached no endpoint, or a request or its answer, as a node saw it.
type Flow struct {
	Time     time.Time
	Protocol svc.Protocol
	// Source is the client. SourceXlated is its address behind masquerading, invalid without.
	Source       netip.AddrPort
	SourceXlated netip.Addr
	// Destination is the endpoint of a connection, the destination of a packet that reached none.
	Destination netip.AddrPort
	// Service is the one that the client has asked for, empty if it was none.
	Service svc.Name
	// From and To are not nil. Several flows share them.
	From, To  *Peer
	Direction flow.TrafficDirection
	// Reason is why the packet reached no endpoint, 0 for a connection, and Summary the reason in words.
	Reason  flow.DropReason
	Summary string
	// L7 is a request of an application; nil for a connection or packet. Answer reports that the flow is the answer to it: from the
	// endpoint to the client, and Service is of the endpoint.
	L7     *L7
	Answer bool
	// SYN reports that the packet has the flags of a first TCP segment.
	SYN bool
	// Missed is about how many flows were not recorded. A Flow with it is no connection.
	Missed uint64

	number uint64 // in its Ring
}

// MissedFlow stands for about n flows that were not recorded.
func MissedFlow(at time.Time, n uint64) Flow {
	return Flow{Time: at, From: World, To: World, Missed: n}
}

// The kinds of events in Cilium's numbers (pkg/monitor/api of Cilium), and of where a connection was seen.
const (
	eventDrop  = 1
	eventTrace = 4

	toEndpoint = 0
	toNetwork  = 11
)

// message returns the flow in Hubble's form, as node saw it. boot is a number of this process.
func (f *Flow) message(node string, boot uint64) *flow.Flow {
	out := &flow.Flow{
		Time: timestamppb.New(f.Time), Uuid: uuid(boot, f.number), NodeName: node, Type: flow.FlowType_L3_L4,
		Verdict: flow.Verdict_FORWARDED,
		IP: &flow.IP{
			Source: f.Source.Addr().String(), Destination: f.Destination.Addr().String(), IpVersion: version(f.Source.Addr()),
		},
		L4:               f.layer4(),
		Source:           f.From.message(),
		Destination:      f.To.message(),
		TrafficDirection: f.Direction,
		IsReply:          wrapperspb.Bool(false),
		EventType:        &flow.CiliumEventType{Type: eventTrace, SubType: toNetwork},
		Summary:          f.summary(), //nolint:staticcheck // what the hubble command prints
		Emitter:          &flow.Emitter{Name: "fairlead"},
	}
	out.TraceObservationPoint = flow.TraceObservationPoint_TO_NETWORK
	if f.Direction == flow.TrafficDirection_INGRESS {
		out.EventType.SubType, out.TraceObservationPoint = toEndpoint, flow.TraceObservationPoint_TO_ENDPOINT
	}
	if f.SourceXlated.IsValid() {
		out.IP.SourceXlated = f.SourceXlated.String()
	}
	if f.Service != (svc.Name{}) {
		out.DestinationService = &flow.Service{Namespace: f.Service.Namespace, Name: f.Service.Name}
	}
	if f.Reason != 0 {
		out.Verdict, out.DropReasonDesc, out.TraceObservationPoint = flow.Verdict_DROPPED, f.Reason, 0
		out.DropReason = uint32(f.Reason) //nolint:staticcheck // older clients read it
		out.EventType = &flow.CiliumEventType{Type: eventDrop, SubType: int32(f.Reason)}
	}
	if f.L7 != nil {
		f.layer7(out)
	}
	return out
}

// summary is what the hubble command prints behind the verdict.
func (f *Flow) summary() string {
	if f.Summary == "" && f.Protocol == svc.TCP && f.SYN {
		return "TCP Flags: SYN"
	}
	return f.Summary
}

func (f *Flow) layer4() *flow.Layer4 {
	from, to := uint32(f.Source.Port()), uint32(f.Destination.Port())
	switch f.Protocol {
	case svc.TCP:
		tcp := &flow.TCP{SourcePort: from, DestinationPort: to}
		if f.SYN {
			tcp.Flags = &flow.TCPFlags{SYN: true}
		}
		return &flow.Layer4{Protocol: &flow.Layer4_TCP{TCP: tcp}}
	case svc.UDP:
		return &flow.Layer4{Protocol: &flow.Layer4_UDP{UDP: &flow.UDP{SourcePort: from, DestinationPort: to}}}
	case svc.SCTP:
		return &flow.Layer4{Protocol: &flow.Layer4_SCTP{SCTP: &flow.SCTP{SourcePort: from, DestinationPort: to}}}
	default:
		return nil
	}
}

func version(a netip.Addr) flow.IPVersion {
	if svc.FamilyOf(a) == svc.IPv6 {
		return flow.IPVersion_IPv6
	}
	return flow.IPVersion_IPv4
}

// UpTo reports whether the flow with the UUID a was recorded by the same process as the one with b, and not after it.
func UpTo(a, b string) bool {
	const boot = len("00000000-0000-8000-")
	return len(a) == len(b) && len(a) > boot && a[:boot] == b[:boot] && a <= b
}

// uuid returns a UUID of version 8 (RFC 9562), which is what its maker wants.
func uuid(boot, number uint64) string {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:], boot)
	binary.BigEndian.PutUint64(b[8:], number)
	b[6], b[8] = b[6]&0x0f|0x80, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return fmt.Sprintf("%s-%s-%s-%s-%s", h[:8], h[8:12], h[12:16], h[16:20], h[20:])
}
