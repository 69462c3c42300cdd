// Package plugin has the steps of which the chains of a Corefile are made. A step is
// a Handler: it answers a question, or passes it on to the next step and may change
// the answer that comes back. Package chain puts them together and has the sockets.
//
// A step owns the Query that it gets and the message of the Reply that comes back. It
// may change both.
package plugin

import (
	"context"
	"errors"
	"net/netip"
	"strings"

	mdns "github.com/miekg/dns"
)

// Handler is a step of a chain.
type Handler interface {
	Answer(ctx context.Context, q *Query) Reply
}

// Query is a question on its way down a chain.
type Query struct {
	// Msg has one question.
	Msg     *mdns.Msg
	Client  netip.AddrPort
	Network string // udp or tcp
	// Server is the listener, such as "dns://:53", Zone the zone of the server block.
	Server, Zone string
	// Size of the request in bytes.
	Size int
	// Self asks this server, from the first step of the chain of the name's zone.
	Self Asker
	// Depth is how many questions to the server itself have led to this one.
	Depth int
}

// Asker asks the server itself on behalf of a client. It returns nil where there is no answer.
type Asker interface {
	Ask(ctx context.Context, q *Query, name string, typ uint16) *mdns.Msg
}

// Question returns the question.
func (q *Query) Question() *mdns.Question { return &q.Msg.Question[0] }

// Name returns the name that is asked for, in lower case.
func (q *Query) Name() string { return strings.ToLower(q.Msg.Question[0].Name) }

// Type returns the type that is asked for.
func (q *Query) Type() uint16 { return q.Msg.Question[0].Qtype }

// DO reports whether the client wants DNSSEC records.
func (q *Query) DO() bool {
	o := q.Msg.IsEdns0()
	return o != nil && o.Do()
}

// Family returns 1 for a client with an IPv4 address, otherwise 2, as CoreDNS's metrics count them.
func (q *Query) Family() int {
	if q.Client.Addr().Unmap().Is4() {
		return 1
	}
	return 2
}

// Ask asks the server itself for another name; see Asker.
func (q *Query) Ask(ctx context.Context, name string, typ uint16) *mdns.Msg {
	if q.Self == nil {
		return nil
	}
	return q.Self.Ask(ctx, q, name, typ)
}

// With returns q with another message.
func (q *Query) With(m *mdns.Msg) *Query {
	out := *q
	out.Msg = m
	return &out
}

// Reply is what a chain answers.
type Reply struct {
	// Msg is the answer; nil for one that has only Rcode.
	Msg   *mdns.Msg
	Rcode int
	// Err is why there is no better answer, for the log.
	Err error
	// Plugin made the answer; the label of CoreDNS's metric.
	Plugin string
	// Drop sends nothing at all.
	Drop bool
}

// Code returns the response code.
func (r Reply) Code() int {
	if r.Msg != nil {
		return r.Msg.Rcode
	}
	return r.Rcode
}

// Fail is a reply without records.
func Fail(plugin string, rcode int, err error) Reply {
	return Reply{Rcode: rcode, Err: err, Plugin: plugin}
}

// NewReply returns an answer to q without records, with the flag AA.
func (q *Query) NewReply() *mdns.Msg {
	m := new(mdns.Msg).SetReply(q.Msg)
	m.Authoritative = true
	return m
}

// ErrNotReady is why a step has no answer that it will have soon. It is never kept.
var ErrNotReady = errors.New("the names of the cluster are not listed yet")

// errEnd is why a question that no step has answered fails.
var errEnd = errors.New("no plugin of the server block answers this name")

// End is behind the last step of every chain.
type End struct{}

// Answer returns SERVFAIL, as CoreDNS does.
func (End) Answer(context.Context, *Query) Reply { return Fail("", mdns.RcodeServerFailure, errEnd) }

// Func is a Handler made of a function.
type Func func(context.Context, *Query) Reply

// Answer calls f.
func (f Func) Answer(ctx context.Context, q *Query) Reply { return f(ctx, q) }
