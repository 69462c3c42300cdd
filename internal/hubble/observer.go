package hubble

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
	"github.com/fairlead/fairlead/internal/hubble/api/peer"
	"github.com/fairlead/fairlead/internal/hubble/api/relay"
)

// RingSize is how many flows a node keeps: about 2 MB.
const RingSize = 8192

// maxStreams bounds the questions for flows that a node or a relay answers at a time.
const maxStreams = 16

// Cluster is the name of the cluster in Hubble's answers.
const Cluster = "default"

// Observer answers Hubble's API for one node.
type Observer struct {
	observer.UnimplementedObserverServer
	peer.UnimplementedPeerServer

	node, release string
	ring          *Ring
	boot          uint64
	start         time.Time
	streams       *Places
	// Address is where the node answers its own users. It is set before the Observer is used.
	Address string
}

// NewObserver returns an Observer of a node for what ring has. release is the version that it reports.
func NewObserver(node, release string, ring *Ring) *Observer {
	return &Observer{
		node: node, release: release, ring: ring, boot: rand.Uint64(), start: time.Now(),
		streams: NewPlaces(maxStreams, "questions for flows are being answered"),
	}
}

// Query is a valid question for flows.
type Query struct {
	filter       *Filter
	mask         *mask
	number       uint64 // 0: all
	first        bool
	follow       bool
	since, until time.Time
}

// NewQuery checks a request. Its error is a status for the client.
func NewQuery(r *observer.GetFlowsRequest) (*Query, error) {
	q := &Query{number: r.GetNumber(), first: r.GetFirst(), follow: r.GetFollow()}
	if q.first && q.follow {
		return nil, status.Error(codes.InvalidArgument, "first and follow exclude each other")
	}
	var err error
	if q.filter, err = NewFilter(r.GetWhitelist(), r.GetBlacklist()); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if q.mask, err = newMask(r.GetFieldMask()); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	for _, t := range []struct {
		name string
		from *timestamppb.Timestamp
		to   *time.Time
	}{{"since", r.GetSince(), &q.since}, {"until", r.GetUntil(), &q.until}} {
		if t.from == nil {
			continue
		}
		if err := t.from.CheckValid(); err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "%s: %v", t.name, err)
		}
		*t.to = t.from.AsTime()
	}
	return q, nil
}

// Has reports whether a flow is asked for.
func (q *Query) Has(m *flow.Flow) bool { return q.within(m.GetTime().AsTime()) && q.filter.Has(m) }

func (q *Query) within(at time.Time) bool {
	return (q.since.IsZero() || !at.Before(q.since)) && (q.until.IsZero() || !at.After(q.until))
}

// Mask clears the fields of a flow that are not asked for.
func (q *Query) Mask(m *flow.Flow) { q.mask.apply(m) }

// last reports whether only the youngest flows are asked for. A client that follows gets so many of before, and all that come.
func (q *Query) last() bool { return q.number > 0 && !q.first && (q.since.IsZero() || q.follow) }

// GetFlows is part of observer.ObserverServer.
func (o *Observer) GetFlows(r *observer.GetFlowsRequest, to observer.Observer_GetFlowsServer) error {
	return o.Flows(to.Context(), r, to.Send)
}

// Flows sends the flows that r asks for. Its errors are statuses.
func (o *Observer) Flows(ctx context.Context, r *observer.GetFlowsRequest, send func(*observer.GetFlowsResponse) error) error {
	done, err := o.streams.Take() // before anything is compiled
	if err != nil {
		return err
	}
	defer done()
	q, err := NewQuery(r)
	if err != nil {
		return err
	}
	oldest, end := o.ring.Bounds()
	from := oldest
	switch {
	case q.follow && q.number == 0 && q.since.IsZero():
		from = end
	case q.last():
		from = o.beginOfLast(q, oldest, end)
	}
	s := &stream{observer: o, query: q, send: send, left: q.number}
	if q.number == 0 || q.last() {
		s.left = ^uint64(0)
	}
	if from, err = s.copy(from, end); err != nil || !q.follow {
		return err
	}
	for {
		if err := o.ring.Wait(ctx, from); err != nil {
			return status.FromContextError(err).Err()
		}
		if _, end = o.ring.Bounds(); end > from {
			if from, err = s.copy(from, end); err != nil {
				return err
			}
		}
	}
}

// beginOfLast returns the number of the flow with which the last q.number of them begin.
func (o *Observer) beginOfLast(q *Query, oldest, end uint64) uint64 {
	var one [1]Flow
	left := q.number
	for at := end; at > oldest; at-- {
		if n, next, _ := o.ring.Read(at-1, one[:]); n != 1 || next != at {
			return at // it was overwritten in the meantime
		}
		if one[0].Missed == 0 && q.Has(one[0].message(o.node, o.boot)) {
			if left--; left == 0 {
				return at - 1
			}
		}
	}
	return oldest
}

// stream sends flows of a Ring.
type stream struct {
	observer *Observer
	query    *Query
	send     func(*observer.GetFlowsResponse) error
	left     uint64 // how many more are sent
	buffer   [64]Flow
}

// copy sends the flows with numbers from from on and before end, and returns the number to go on with.
func (s *stream) copy(from, end uint64) (uint64, error) {
	for from < end && s.left > 0 {
		n, next, lost := s.observer.ring.Read(from, s.buffer[:min(uint64(len(s.buffer)), end-from)])
		if lost > 0 {
			if err := s.sendLost(flow.LostEventSource_HUBBLE_RING_BUFFER, lost, time.Now()); err != nil {
				return next, err
			}
		}
		for i := range s.buffer[:n] {
			if err := s.sendFlow(&s.buffer[i]); err != nil || s.left == 0 {
				return next, err
			}
		}
		from = next
	}
	return from, nil
}

func (s *stream) sendFlow(f *Flow) error {
	if f.Missed > 0 {
		if !s.query.within(f.Time) {
			return nil
		}
		return s.sendLost(flow.LostEventSource_OBSERVER_EVENTS_QUEUE, f.Missed, f.Time)
	}
	m := f.message(s.observer.node, s.observer.boot)
	if !s.query.Has(m) {
		return nil
	}
	s.left--
	at := m.GetTime()
	s.query.Mask(m)
	return s.send(&observer.GetFlowsResponse{
		NodeName: s.observer.node, Time: at, ResponseTypes: &observer.GetFlowsResponse_Flow{Flow: m},
	})
}

func (s *stream) sendLost(source flow.LostEventSource, n uint64, at time.Time) error {
	return s.send(&observer.GetFlowsResponse{
		NodeName: s.observer.node, Time: timestamppb.New(at),
		ResponseTypes: &observer.GetFlowsResponse_LostEvents{LostEvents: &flow.LostEvent{Source: source, NumEventsLost: n}},
	})
}

// GetNodes is part of observer.ObserverServer: it answers with the node itself.
func (o *Observer) GetNodes(context.Context, *observer.GetNodesRequest) (*observer.GetNodesResponse, error) {
	s := o.status()
	return &observer.GetNodesResponse{Nodes: []*observer.Node{{
		Name: o.node, Version: s.GetVersion(), State: relay.NodeState_NODE_CONNECTED, UptimeNs: s.GetUptimeNs(),
		NumFlows: s.GetNumFlows(), MaxFlows: s.GetMaxFlows(), SeenFlows: s.GetSeenFlows(),
	}}}, nil
}

// Notify is part of peer.PeerServer: it names the node itself, which is all that it answers for, and waits for the client's end.
func (o *Observer) Notify(_ *peer.NotifyRequest, to peer.Peer_NotifyServer) error {
	done, err := o.streams.Take()
	if err != nil {
		return err
	}
	defer done()
	if err := to.Send(&peer.ChangeNotification{
		Name: o.node, Address: o.Address, Type: peer.ChangeNotificationType_PEER_ADDED,
	}); err != nil {
		return err
	}
	<-to.Context().Done()
	return status.FromContextError(to.Context().Err()).Err()
}

// GetNamespaces is part of observer.ObserverServer.
func (o *Observer) GetNamespaces(context.Context, *observer.GetNamespacesRequest) (*observer.GetNamespacesResponse, error) {
	seen := map[string]bool{}
	since := time.Now().Add(-time.Hour)
	o.each(func(f *Flow) {
		if f.Missed > 0 || f.Time.Before(since) {
			return
		}
		seen[f.From.Namespace], seen[f.To.Namespace], seen[f.Service.Namespace] = true, true, true
	})
	return Namespaces(seen), nil
}

// Namespaces are the names in seen, sorted.
func Namespaces(seen map[string]bool) *observer.GetNamespacesResponse {
	out := &observer.GetNamespacesResponse{}
	for name := range seen {
		if name != "" {
			out.Namespaces = append(out.Namespaces, &observer.Namespace{Cluster: Cluster, Namespace: name})
		}
	}
	slices.SortFunc(out.GetNamespaces(), func(a, b *observer.Namespace) int { return strings.Compare(a.GetNamespace(), b.GetNamespace()) })
	return out
}

// each calls f with the flows of the Ring.
func (o *Observer) each(f func(*Flow)) {
	var buffer [64]Flow
	for from, end := o.ring.Bounds(); from < end; {
		n, next, _ := o.ring.Read(from, buffer[:])
		for i := range buffer[:n] {
			f(&buffer[i])
		}
		from = next
	}
}

// ServerStatus is part of observer.ObserverServer.
func (o *Observer) ServerStatus(context.Context, *observer.ServerStatusRequest) (*observer.ServerStatusResponse, error) {
	return o.status(), nil
}

func (o *Observer) status() *observer.ServerStatusResponse {
	oldest, next := o.ring.Bounds()
	minute := time.Now().Add(-time.Minute)
	recent := 0
	o.each(func(f *Flow) {
		if f.Missed == 0 && f.Time.After(minute) {
			recent++
		}
	})
	return &observer.ServerStatusResponse{
		NumFlows: next - oldest, MaxFlows: uint64(o.ring.Size()), SeenFlows: next, UptimeNs: uint64(time.Since(o.start)),
		NumConnectedNodes: wrapperspb.UInt32(1), NumUnavailableNodes: wrapperspb.UInt32(0), Version: o.release,
		FlowsRate: float64(recent) / 60,
	}
}

// Limit returns the flows of a node that are asked for by their number, the oldest first, and the others. Of a question that does not
// follow.
func (q *Query) Limit(flows []*observer.GetFlowsResponse) (asked, others []*observer.GetFlowsResponse) {
	if q.number == 0 || uint64(len(flows)) <= q.number {
		return flows, nil
	}
	if q.last() {
		at := uint64(len(flows)) - q.number
		return flows[at:], flows[:at]
	}
	return flows[:q.number], flows[q.number:]
}

// StripPodFilters removes what the filters of a request say about the labels and workloads of Pods, and whole filters that would
// exclude too much then. It reports whether it has removed anything.
func StripPodFilters(r *observer.GetFlowsRequest) (stripped bool) {
	strip := func(f *flow.FlowFilter) bool {
		had := len(f.GetSourceLabel())+len(f.GetDestinationLabel())+len(f.GetSourceWorkload())+len(f.GetDestinationWorkload()) > 0
		f.SourceLabel, f.DestinationLabel, f.SourceWorkload, f.DestinationWorkload = nil, nil, nil, nil
		return had
	}
	for _, f := range r.GetWhitelist() {
		stripped = strip(f) || stripped
	}
	r.Blacklist = slices.DeleteFunc(r.GetBlacklist(), func(f *flow.FlowFilter) bool {
		had := strip(f)
		stripped = had || stripped
		return had
	})
	return stripped
}
