package relay

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
)

const (
	// maxFlows and maxBytes bound one answer that does not follow: it is sorted by time. A flow has about 1 kB. maxKept bounds the
	// bytes of all answers at a time.
	maxFlows = 50_000
	maxBytes = 64 << 20
	maxKept  = 128 << 20
	// retryPeriod is how long a node that a client follows is not asked again after it did not answer.
	retryPeriod = 5 * time.Second
	// longest is how much older than others a flow may be when it is recorded: a request is recorded when it ends, with the time at
	// which it began.
	longest = 10 * time.Minute
	// nodesPeriod is how often a client that follows gets the flows of new nodes.
	nodesPeriod = 30 * time.Second
)

// GetFlows is part of observer.ObserverServer. Nodes that do not answer are named in the answer; it is an error if none does.
func (r *Relay) GetFlows(q *observer.GetFlowsRequest, to observer.Observer_GetFlowsServer) error {
	for _, p := range []*hubble.Places{r.questions, r.follows} {
		if p == r.follows && !q.GetFollow() {
			continue
		}
		done, err := p.Take()
		if err != nil {
			return err
		}
		defer done()
	}
	query, err := hubble.NewQuery(q) // with a place: it compiles
	if err != nil {
		return err
	}
	s := &session{relay: r, query: query, asked: forNodes(q), to: to, pods: newPods(r.client)}
	defer s.release()
	if q.GetFollow() {
		return s.follow(to.Context())
	}
	return s.collect(to.Context())
}

// session answers one question for flows.
type session struct {
	relay *Relay
	query *hubble.Query
	asked *observer.GetFlowsRequest // what nodes are asked
	pods  *pods

	mu      sync.Mutex // guards what follows
	to      observer.Observer_GetFlowsServer
	answers []*observer.GetFlowsResponse
	failed  int
	kept    int // how many messages of all nodes are in memory, and their bytes
	bytes   int
	full    error // why nothing more is kept
}

// keep counts a message, and returns an error if there are too many.
func (s *session) keep(m *observer.GetFlowsResponse) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := proto.Size(m)
	s.kept++
	s.bytes += n
	switch all := s.relay.kept.Add(int64(n)); {
	case s.full != nil:
	case s.kept > maxFlows || s.bytes > maxBytes:
		s.full = errTooMany()
	case all > maxKept:
		s.full = status.Errorf(codes.ResourceExhausted, "the answers to all clients have more than %d MiB; try again later", maxKept>>20)
	}
	return s.full
}

// release gives back the memory that is left when the session ends.
func (s *session) release() { s.relay.kept.Add(-int64(s.bytes)) }

// forget takes messages from what is kept.
func (s *session) forget(all []*observer.GetFlowsResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range all {
		s.kept--
		n := proto.Size(m)
		s.bytes -= n
		s.relay.kept.Add(-int64(n))
	}
	clear(all)
}

// forNodes is the question for nodes: they answer with all fields, and do not know the labels and workloads of other nodes' Pods. So
// they are not asked to select by them; the relay does. Of the last or first flows it then needs all to select from. A client that
// follows gets of the last ones what it has asked for.
func forNodes(q *observer.GetFlowsRequest) *observer.GetFlowsRequest {
	out := proto.CloneOf(q)
	out.FieldMask = nil
	if hubble.StripPodFilters(out) && out.GetNumber() > 0 && !out.GetFollow() {
		out.Number = ^uint64(0)
	}
	return out
}

// collect answers with the flows that the nodes have now, sorted by time.
func (s *session) collect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, flowsTimeout)
	defer cancel()
	nodes, err := s.relay.names(ctx)
	if err != nil {
		return err
	}
	var first error
	each(nodes, func(_ int, node string) {
		got, err := s.of(ctx, node)
		if err != nil {
			m := unavailable(node, err)
			got = append(got, m)
			_ = s.keep(m) // it has set full
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if err != nil {
			s.failed++
			if first == nil {
				first = err
			}
		}
		s.answers = append(s.answers, got...)
		if s.full != nil {
			cancel()
		}
	})
	switch {
	case s.full != nil:
		return s.full
	case len(nodes) > 0 && s.failed == len(nodes):
		return first
	}
	slices.SortStableFunc(s.answers, func(a, b *observer.GetFlowsResponse) int {
		return a.GetTime().AsTime().Compare(b.GetTime().AsTime())
	})
	for _, m := range s.answers {
		if err := s.to.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// of returns the flows of a node, and one message about all that it has lost.
func (s *session) of(ctx context.Context, node string) (flows []*observer.GetFlowsResponse, err error) {
	var lost *observer.GetFlowsResponse
	err = s.relay.ask(ctx, node, flowsMethod, s.asked, func(text []byte) error {
		m, err := s.complete(ctx, node, text)
		if err != nil || m == nil {
			return err
		}
		if m.GetFlow() == nil {
			lost = addLost(lost, m)
			return nil
		}
		err = s.keep(m)
		var others []*observer.GetFlowsResponse
		flows, others = s.query.Limit(append(flows, m))
		s.forget(others)
		return err
	})
	if lost != nil {
		flows = append(flows, lost)
		if full := s.keep(lost); err == nil {
			err = full
		}
	}
	return flows, err
}

// addLost adds the lost flows of m to sum, which may be nil.
func addLost(sum, m *observer.GetFlowsResponse) *observer.GetFlowsResponse {
	e := m.GetLostEvents()
	return &observer.GetFlowsResponse{
		NodeName: m.GetNodeName(), Time: m.GetTime(), ResponseTypes: &observer.GetFlowsResponse_LostEvents{LostEvents: &flow.LostEvent{
			Source: e.GetSource(), NumEventsLost: e.GetNumEventsLost() + sum.GetLostEvents().GetNumEventsLost(),
		}},
	}
}

// complete reads an answer of a node and completes it. It returns nil if the flow is not asked for, or the answer is of another kind
// than a flow and lost ones.
func (s *session) complete(ctx context.Context, node string, text []byte) (*observer.GetFlowsResponse, error) {
	m, err := read(node, text)
	if err != nil || m == nil || !s.wants(ctx, m) {
		return nil, err
	}
	return m, nil
}

// read reads an answer of a node. It returns nil if it is of another kind than a flow and lost ones.
func read(node string, text []byte) (*observer.GetFlowsResponse, error) {
	m := &observer.GetFlowsResponse{}
	if err := proto.Unmarshal(text, m); err != nil {
		return nil, status.Errorf(codes.Internal, "cannot read a flow of node %s: %v", node, err)
	}
	m.NodeName = node // a node speaks only for itself
	f := m.GetFlow()
	switch {
	case m.GetLostEvents() != nil:
		return m, nil
	case f == nil:
		return nil, nil
	}
	f.NodeName = node
	return m, nil
}

// wants completes a flow, and reports whether it is asked for. Lost ones always are.
func (s *session) wants(ctx context.Context, m *observer.GetFlowsResponse) bool {
	f := m.GetFlow()
	if f == nil {
		return true
	}
	s.pods.complete(ctx, f)
	if !s.query.Has(f) {
		return false
	}
	s.query.Mask(f)
	return true
}

// follow answers with flows as they come until ctx ends.
func (s *session) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	known := map[string]context.CancelFunc{} // what ends the question to a node
	for {
		nodes, err := s.relay.names(ctx)
		if err != nil && len(known) == 0 {
			return err
		}
		for node, end := range known {
			if err == nil && !slices.Contains(nodes, node) { // it was deleted; one of its name may come
				end()
				delete(known, node)
			}
		}
		for _, node := range nodes {
			if known[node] == nil {
				ofNode, end := context.WithCancel(ctx)
				known[node] = end
				wg.Go(func() {
					defer end()
					s.followNode(ofNode, cancel, node)
				})
			}
		}
		if !sleep(ctx, s.relay.again) {
			return status.FromContextError(context.Cause(ctx)).Err()
		}
	}
}

// followNode sends the flows of a node until ctx or the node's answer ends. What it cannot send ends ctx.
func (s *session) followNode(ctx context.Context, cancel context.CancelCauseFunc, node string) {
	send := func(m *observer.GetFlowsResponse) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		err := s.to.Send(m)
		if err != nil {
			cancel(err)
		}
		return err
	}
	asked, told := s.asked, false
	var got position
	for {
		err := s.relay.ask(ctx, node, flowsMethod, asked, func(text []byte) error {
			told = false
			m, err := read(node, text)
			if err != nil || m == nil || !got.goOn(m) || !s.wants(ctx, m) {
				return err
			}
			return send(m)
		})
		if err == nil || ctx.Err() != nil {
			return
		}
		if !told {
			told = true
			if send(unavailable(node, err)) != nil {
				return
			}
		}
		asked = got.rest(s.asked)
		if !sleep(ctx, s.relay.retry) {
			return
		}
	}
}

// position is how far the answers of a node have come. The node answers in the order in which it has recorded, which is not that of the
// flows' times.
type position struct {
	uuid   string    // of the last flow
	latest time.Time // the greatest time of flows and lost ones, by the node's clock
	before time.Time // latest when the present answer began
}

// goOn reports whether a message is new, and moves on to it.
func (p *position) goOn(m *observer.GetFlowsResponse) bool {
	at := m.GetTime().AsTime()
	if f := m.GetFlow(); f != nil {
		if p.uuid != "" && hubble.UpTo(f.GetUuid(), p.uuid) {
			return false
		}
		p.uuid = f.GetUuid()
	} else if m.GetLostEvents().GetSource() == flow.LostEventSource_HUBBLE_RING_BUFFER {
		return true // of now, and not of a time at which it was recorded
	} else if !at.After(p.before) {
		return false
	}
	if at.After(p.latest) {
		p.latest = at
	}
	return true
}

// rest is the question for what comes after an answer that broke off. The node still has it, unless it has ended.
func (p *position) rest(asked *observer.GetFlowsRequest) *observer.GetFlowsRequest {
	if p.before = p.latest; p.latest.IsZero() {
		return asked
	}
	out := proto.CloneOf(asked)
	out.Number, out.Since = 0, timestamppb.New(p.latest.Add(-longest))
	return out
}

// sleep returns false if ctx ends before.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
