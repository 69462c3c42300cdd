package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"

	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/kernel/nftrace"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/runner/api"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/trace/follow"
)

// maxTraces bounds the traces of a node that wait for the one under way, which takes a few seconds.
const maxTraces = 4

// tracing sends packets for users, one at a time.
type tracing struct {
	node  string
	proxy func() *proxy.Proxy
	log   *slog.Logger
	// slots has one for each trace that waits or is under way, turn is for that one.
	slots, turn chan struct{}
}

func newTracing(node string, p func() *proxy.Proxy, log *slog.Logger) *tracing {
	return &tracing{node: node, proxy: p, log: log, slots: make(chan struct{}, maxTraces), turn: make(chan struct{}, 1)}
}

// trace is the agent's Trace. Its query has address (IP:PORT), and may have protocol (TCP or UDP).
func (t *tracing) trace(ctx context.Context, from api.Sender, query url.Values) (any, error) {
	packet, err := t.packet(from, query)
	if err != nil {
		return nil, err
	}
	select {
	case t.slots <- struct{}{}:
		defer func() { <-t.slots }()
	default:
		return nil, api.Busy("other traces are under way on this node; try again in a few seconds")
	}
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	seen, err := parts.TracePacket(ctx, packet, t.log)
	if errors.Is(err, nftrace.ErrBusy) {
		return nil, api.Busy(err.Error())
	}
	if err != nil {
		return nil, err
	}
	status := t.proxy().Status()
	seen.Node, seen.Mode, seen.ConnectTime = t.node, status.Mode, status.ConnectTime
	if from.Guest {
		seen.Hide()
		return seen, nil
	}
	seen.Facts, err = t.facts(ctx, packet)
	return seen, err
}

func (t *tracing) packet(from api.Sender, query url.Values) (*follow.Packet, error) {
	p := &follow.Packet{}
	to, err := netip.ParseAddrPort(query.Get("address"))
	if err != nil {
		return nil, api.BadQuery(fmt.Sprintf("address: %q is not IP:PORT", query.Get("address")))
	}
	p.To = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if p.Protocol, err = svc.ParseProtocol(query.Get("protocol")); err == nil {
		err = p.Check()
	}
	if err != nil {
		return nil, api.BadQuery(err.Error())
	}
	if from.Netns != "" {
		p.Spaces = append(p.Spaces, follow.Space{Name: "Pod " + from.Pod, Path: from.Netns})
	}
	p.Spaces = append(p.Spaces, follow.Space{Name: "node " + t.node})
	return p, nil
}

// facts are what the node has for the destination.
func (t *tracing) facts(ctx context.Context, p *follow.Packet) (*explain.Facts, error) {
	facts, err := parts.Explain(t.proxy)(ctx, url.Values{
		"address": {p.To.String()}, "protocol": {p.Protocol.String()}, "probe": {"false"},
	})
	if err != nil {
		return nil, err
	}
	return facts.(*explain.Facts), nil
}
