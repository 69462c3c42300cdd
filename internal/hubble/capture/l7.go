package capture

import (
	"context"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/svc"
)

// RequestRate is how many requests of HTTP, and as many questions of DNS, are recorded in a second. Each makes two flows.
const RequestRate = 100

const (
	// maxURL, maxMethod and maxName bound what a flow has of a request or question, in bytes. A name has up to 1,000 when it
	// is escaped.
	maxURL    = 256
	maxMethod = 32
	maxName   = 256
	// maxRecords bounds the records that a flow has of an answer, maxCNAMEs the names among them.
	maxRecords = 16
	maxCNAMEs  = 4
)

// Applications records requests of HTTP and questions of DNS in a Ring.
type Applications struct {
	ring      *hubble.Ring
	peers     *Peers
	requests  quota
	questions quota
}

// NewApplications returns Applications that record nothing before Run.
func NewApplications(ring *hubble.Ring, peers *Peers) *Applications {
	a := &Applications{ring: ring, peers: peers}
	a.requests.taken.Store(RequestRate)
	a.questions.taken.Store(RequestRate)
	return a
}

// Run lets RequestRate requests and questions be recorded in each second until ctx ends, and records how many others there were.
func (a *Applications) Run(ctx context.Context) error {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		for _, q := range []*quota{&a.requests, &a.questions} {
			if missed := q.renew(); missed > 0 {
				a.ring.Add(hubble.MissedFlow(time.Now(), 2*missed))
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// quota is what is recorded until it is renewed. It takes neither a lock nor the time: there are many goroutines with much to do.
type quota struct{ taken, missed atomic.Uint64 }

func (q *quota) take() bool {
	if q.taken.Load() < RequestRate && q.taken.Add(1) <= RequestRate {
		return true
	}
	q.missed.Add(1)
	return false
}

// renew returns how many were not recorded since the last time.
func (q *quota) renew() uint64 {
	q.taken.Store(0)
	return q.missed.Swap(0)
}

// Requests is shown requests of HTTP.
func (a *Applications) Requests() seen.Requests { return requests{a} }

// Questions is shown questions of DNS.
func (a *Applications) Questions() seen.Questions { return questions{a} }

type (
	requests  struct{ to *Applications }
	questions struct{ to *Applications }
)

// Wants is part of seen.Requests.
func (r requests) Wants() bool { return r.to.requests.take() }

// Wants is part of seen.Questions.
func (q questions) Wants() bool { return q.to.questions.take() }

// Request is part of seen.Requests.
func (r requests) Request(m *seen.Request) {
	f := hubble.Flow{
		Time: m.Began, Protocol: svc.TCP, Source: m.Client, Destination: m.Pod, Service: m.Service,
		L7: &hubble.L7{HTTP: &hubble.HTTP{Method: printable(m.Method, maxMethod), URL: urlOf(m), Protocol: m.Protocol, Code: m.Status}},
	}
	answered := m.Answered
	if answered.IsZero() {
		answered = time.Now()
	}
	f.L7.Latency = answered.Sub(m.Began)
	if !m.Pod.IsValid() {
		f.Destination = m.At
		f.L7.Refused = m.Status >= http.StatusBadRequest
		if m.Status == http.StatusServiceUnavailable {
			f.Reason = flow.DropReason_SERVICE_BACKEND_NOT_FOUND
		}
	}
	r.to.both(&f, answered)
}

// urlOf is the URL of a request without its query, user and password, which may be secrets.
func urlOf(m *seen.Request) string {
	scheme, host, target := "http", m.Host, m.Target
	if m.Secure {
		scheme = "https"
	}
	switch s, rest, absolute := strings.Cut(target, "://"); {
	case target == "", target[0] == '/', target[0] == '*':
	case absolute && m.Method != http.MethodConnect && !strings.ContainsAny(s, "@:/?#"):
		path := strings.IndexAny(rest+"/", "/?#")
		scheme, host, target = s, rest[:path], rest[path:]
	default: // CONNECT asks for a host and port, in the words of the client
		host, target = target, ""
	}
	host = host[strings.LastIndexByte(host, '@')+1:]
	if end := strings.IndexAny(host, "/?#"); end >= 0 {
		host = host[:end]
	}
	if end := strings.IndexAny(target, "?#"); end >= 0 {
		target = target[:end]
	}
	return printable(scheme+"://"+host+target, maxURL)
}

// printable returns a text of at most n bytes, the others in the percent-encoding of URLs: flows are of UTF-8, and go to terminals.
func printable(s string, n int) string {
	const hex = "0123456789ABCDEF"
	out := make([]byte, 0, min(len(s), n))
	for i := 0; i < len(s) && len(out) < n; i++ {
		if c := s[i]; c <= ' ' || c >= 0x7f {
			out = append(out, '%', hex[c>>4], hex[c&15])
		} else {
			out = append(out, c)
		}
	}
	return string(out[:min(len(out), n)])
}

// Question is part of seen.Questions.
func (q questions) Question(m *seen.Question) {
	var answer mdns.Msg
	if answer.Unpack(m.Answer) != nil || len(answer.Question) != 1 {
		return // an answer to what is no question
	}
	f := hubble.Flow{
		Time: m.Answered.Add(-m.Latency), Protocol: m.Protocol, Source: m.Client, Destination: m.Server,
		L7: &hubble.L7{Latency: m.Latency, DNS: dnsOf(&answer)},
	}
	q.to.both(&f, m.Answered)
}

func dnsOf(m *mdns.Msg) *hubble.DNS {
	q := m.Question[0]
	out := &hubble.DNS{Query: nameOf(q.Name), Type: mdns.Type(q.Qtype).String(), Code: m.Rcode, Rcode: mdns.RcodeToString[m.Rcode]}
	for i, r := range m.Answer {
		if i == maxRecords {
			break
		}
		h := r.Header()
		if i == 0 || h.Ttl < out.TTL {
			out.TTL = h.Ttl
		}
		out.Types = append(out.Types, mdns.Type(h.Rrtype).String())
		switch r := r.(type) {
		case *mdns.A:
			if a, ok := netip.AddrFromSlice(r.A.To4()); ok {
				out.IPs = append(out.IPs, a)
			}
		case *mdns.AAAA:
			if a, ok := netip.AddrFromSlice(r.AAAA); ok {
				out.IPs = append(out.IPs, a)
			}
		case *mdns.CNAME:
			if len(out.CNAMEs) < maxCNAMEs {
				out.CNAMEs = append(out.CNAMEs, nameOf(r.Target))
			}
		}
	}
	return out
}

// nameOf returns the beginning of a name of DNS, and does not keep the rest in memory.
func nameOf(name string) string {
	if len(name) <= maxName {
		return name
	}
	return strings.Clone(name[:maxName])
}

// both records a request, and its answer.
func (a *Applications) both(f *hubble.Flow, answered time.Time) {
	var fromHere, toHere bool
	f.From, fromHere = a.peers.Of(f.Source)
	f.To, toHere = a.peers.Of(f.Destination)
	f.Direction = directionOf(fromHere, toHere)
	a.ring.Add(*f)
	f.Time, f.Answer, f.Reason = answered, true, 0
	f.Source, f.Destination, f.From, f.To = f.Destination, f.Source, f.To, f.From
	a.ring.Add(*f)
}
