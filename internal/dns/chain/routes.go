package chain

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/netip"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/dns/plugin"
)

const (
	// questionTime bounds the work on one question.
	questionTime = 10 * time.Second
	// maxQuestions bounds the questions in work at one listener; further ones are SERVFAIL.
	maxQuestions = 10000
	// maxDepth bounds the questions to the server itself that lead to another.
	maxDepth = 8
)

// routes are the zones of one listener.
type routes struct {
	server  string // such as dns://:53
	sites   map[string]*site
	tls     *tls.Config
	sockets int
	chaos   bool // class CH is answered
	metrics *metrics
	log     *slog.Logger
	inWork  atomic.Int64
}

// site is a zone with its chain.
type site struct {
	zone    string
	head    plugin.Handler
	counted bool // it has the plugin prometheus
	names   []string
}

// site returns the site of the most specific zone that name is in. DS records belong to the
// zone above.
func (r *routes) site(name string, typ uint16) *site {
	var found *site
	for at, end := 0, false; !end; at, end = mdns.NextLabel(name, at) {
		if s := r.sites[name[at:]]; s != nil {
			if typ != mdns.TypeDS {
				return s
			}
			if found == nil || at > 0 {
				found = s
			}
		}
	}
	if found != nil {
		return found
	}
	return r.sites["."]
}

// ServeDNS answers a request.
func (r *routes) serve(ctx context.Context, w mdns.ResponseWriter, req *mdns.Msg) {
	start := time.Now()
	if len(req.Question) != 1 {
		_ = w.WriteMsg(new(mdns.Msg).SetRcode(req, mdns.RcodeFormatError))
		return
	}
	q := &plugin.Query{
		Msg: req, Client: clientOf(w.RemoteAddr()), Network: w.RemoteAddr().Network(), Server: r.server, Self: r, Size: req.Len(),
	}
	asked := req.Copy()
	reply, s := r.guarded(ctx, q)
	if reply.Drop {
		return
	}
	m := finish(asked, reply, q.Network, sizeOf(q))
	packed, err := m.Pack()
	if err != nil {
		r.log.Warn("cannot pack an answer", "name", q.Name(), "err", err)
		if packed, err = new(mdns.Msg).SetRcode(asked, mdns.RcodeServerFailure).Pack(); err != nil {
			return
		}
	}
	if s == nil || s.counted {
		r.metrics.count(r.server, s, q.With(asked), m.Rcode, reply.Plugin, len(packed), time.Since(start))
	}
	// An error concerns one client, which asks again.
	_, _ = w.Write(packed)
}

// guarded answers a question, and survives a panic of a plugin.
func (r *routes) guarded(ctx context.Context, q *plugin.Query) (reply plugin.Reply, s *site) {
	defer r.inWork.Add(-1)
	if r.inWork.Add(1) > maxQuestions {
		return plugin.Fail("", mdns.RcodeServerFailure, nil), nil
	}
	defer func() {
		if p := recover(); p != nil {
			r.metrics.panics.Inc()
			r.log.Error("a plugin panicked", "server", r.server, "name", q.Name(), "panic", p, "stack", string(debug.Stack()))
			reply = plugin.Fail("", mdns.RcodeServerFailure, nil)
		}
	}()
	if rcode, ok := r.acceptable(q.Msg); !ok {
		return plugin.Fail("", rcode, nil), nil
	}
	if s = r.site(q.Name(), q.Type()); s == nil {
		return plugin.Fail("", mdns.RcodeRefused, nil), nil
	}
	q.Zone = s.zone
	ctx, cancel := context.WithTimeout(ctx, questionTime)
	defer cancel()
	return s.head.Answer(ctx, q), s
}

// acceptable returns the code of a request that no plugin gets.
func (r *routes) acceptable(m *mdns.Msg) (int, bool) {
	switch o := m.IsEdns0(); {
	case m.Opcode != mdns.OpcodeQuery:
		return mdns.RcodeNotImplemented, false
	case m.Question[0].Qclass != mdns.ClassINET && !r.chaos:
		return mdns.RcodeRefused, false
	case o != nil && o.Version() != 0:
		return mdns.RcodeBadVers, false
	}
	return 0, true
}

// Ask asks this listener's own chains.
func (r *routes) Ask(ctx context.Context, q *plugin.Query, name string, typ uint16) *mdns.Msg {
	if q.Depth >= maxDepth {
		return nil
	}
	inner := q.With(q.Msg.Copy())
	inner.Depth++
	*inner.Question() = mdns.Question{Name: mdns.Fqdn(name), Qtype: typ, Qclass: mdns.ClassINET}
	s := r.site(inner.Name(), typ)
	if s == nil {
		return nil
	}
	inner.Zone = s.zone
	return s.head.Answer(ctx, inner).Msg
}

// sizeOf returns how long an answer may be; a plugin may have lowered it.
func sizeOf(q *plugin.Query) int {
	if q.Network == "tcp" {
		return mdns.MaxMsgSize
	}
	if o := q.Msg.IsEdns0(); o != nil {
		return max(int(o.UDPSize()), mdns.MinMsgSize)
	}
	return mdns.MinMsgSize
}

// finish makes a reply the answer to req: its EDNS record, and cut to the size.
func finish(req *mdns.Msg, reply plugin.Reply, network string, size int) *mdns.Msg {
	m := reply.Msg
	if m == nil {
		m = new(mdns.Msg).SetRcode(req, reply.Rcode)
	}
	m.Id, m.Response = req.Id, true
	asked, has := req.IsEdns0(), m.IsEdns0()
	extra := m.Extra[:0:0]
	for _, rr := range m.Extra {
		if rr.Header().Rrtype != mdns.TypeOPT {
			extra = append(extra, rr)
		}
	}
	m.Extra = extra
	if asked != nil {
		o := &mdns.OPT{Hdr: mdns.RR_Header{Name: ".", Rrtype: mdns.TypeOPT}}
		o.SetUDPSize(min(asked.UDPSize(), uint16(size)))
		if network == "tcp" {
			o.SetUDPSize(asked.UDPSize())
		}
		if asked.Do() {
			o.SetDo()
		}
		if has != nil {
			o.Option = has.Option
		}
		m.Extra = append(m.Extra, o)
	}
	m.Compress = true
	m.Truncate(size)
	return m
}

// clientOf returns the address and port of a client.
func clientOf(a net.Addr) netip.AddrPort {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort()
	case *net.TCPAddr:
		return a.AddrPort()
	}
	p, _ := netip.ParseAddrPort(strings.TrimSpace(a.String()))
	return p
}
