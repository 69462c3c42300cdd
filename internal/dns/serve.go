package dns

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/zone"
)

// worker is what one goroutine needs to answer requests. It is not shared.
type worker struct {
	s     *Server
	q     query
	out   []byte
	key   []byte
	turn  uint32 // of the order of addresses
	udp   bool
	stats *workerStats
	// client is the source of the request: over TCP, and over UDP if an upstream is
	// asked, or questions are logged or shown. server is the address of the socket.
	client, server netip.AddrPort
	// family of the client, as an index of familyNames.
	family int

	// The outcome of the last request, for forward, follow and the metrics.
	zoneReply zone.Reply
	origin    origin
	rcode     int
	searched  bool // answered with the end of a search path
}

// origin is the source of an answer; the label "plugin" of CoreDNS's metrics.
type origin uint8

const (
	fromServer origin = iota
	fromZone
	fromCache
	fromForward
)

func (s *Server) newWorker(udp bool, stats *workerStats) *worker {
	// Over TCP it grows with the answers.
	return &worker{s: s, udp: udp, stats: stats, out: make([]byte, 0, 2048), turn: rand.Uint32()}
}

// answer makes the answer to req, or as much of it as is known without asking an
// upstream. The answer is in w.out until the next call.
func (w *worker) answer(req []byte) fate {
	q := &w.q
	w.origin, w.searched = fromServer, false
	rcode, ok := q.parse(req)
	if !ok {
		return drop
	}
	if rcode != rcodeSuccess {
		return w.fail(req, rcode)
	}
	w.turn++
	q.Rotate, q.Search = w.turn, w.s.options.Autopath
	w.out = q.begin(w.out, req)
	var r zone.Reply
	w.out, r = w.s.zone.Answer(w.out, &q.Question, q.limit(w.udp))
	if r.Kind == zone.NotOurs {
		if w.answerHosts() {
			return reply
		}
		return w.answerCached(req)
	}
	if !w.s.follow.Synced() {
		return w.fail(req, rcodeServFail)
	}
	w.zoneReply = r
	if r.Kind != zone.Answered {
		return follow
	}
	w.finishZone()
	return reply
}

// finishZone completes an answer of the zone.
func (w *worker) finishZone() {
	r := &w.zoneReply
	flags := w.s.available() | flagAA
	if r.Truncated {
		flags |= flagTC
	}
	w.origin, w.rcode, w.searched = fromZone, int(r.Rcode), r.BySearch
	w.out = w.q.finish(w.out, flags, int(r.Rcode), r.Answers, r.Authority, r.Additional)
}

// fail answers with only an rcode.
func (w *worker) fail(req []byte, rcode int) fate {
	w.rcode = rcode
	w.out = w.q.errorReply(w.out, req, w.s.available(), rcode)
	return reply
}

// answerCached answers from the cache.
func (w *worker) answerCached(req []byte) fate {
	q := &w.q
	f := w.s.forward
	f.metrics.requests.Add(1)
	w.key = appendKey(w.key[:0], q.Name.Wire(), q.Type, q.keyFlags())
	now := time.Now().Unix()
	e, age, stale := f.cache.get(w.key, now)
	if e == nil {
		return forward
	}
	if stale && now >= e.retry.Load() {
		return forward
	}
	if stale {
		f.metrics.stale.Add(1)
	} else {
		w.prefetch(e, age)
	}
	w.origin = fromCache
	w.appendEntry(req, result{e, age, stale})
	return reply
}

// Prefetching: an answer that was used this often is fetched again when a tenth
// of its TTL, or a second, remains.
const (
	prefetchHits = 10
	prefetchPart = 10
)

func (w *worker) prefetch(e *entry, age uint32) {
	if w.s.options.NoPrefetch {
		return
	}
	hits := e.hits.Add(1)
	if hits < prefetchHits || e.ttl-age > max(1, e.ttl/prefetchPart) || e.negative {
		return
	}
	// Once, by the worker that resets the count.
	if !e.hits.CompareAndSwap(hits, -1<<30) {
		return
	}
	if w.s.forward.lookup(w.ask(), netip.Addr{}, w.s.forward.upstreams(&w.q.Name), func(result) {}) {
		w.s.forward.metrics.prefetch.Add(1)
	}
}

// ask returns the current question as one for an upstream.
func (w *worker) ask() ask {
	return ask{name: append([]byte(nil), w.q.Name.Wire()...), typ: w.q.Type, flags: w.q.keyFlags()}
}

// appendEntry makes the answer from that of an upstream.
func (w *worker) appendEntry(req []byte, r result) {
	q := &w.q
	w.out = q.begin(w.out, req)
	out, an, ns, ar, truncated := r.e.appendTo(w.out, r.age, r.stale, q.limit(w.udp))
	flags := w.s.available()
	if q.do || q.flags&flagAD != 0 {
		flags |= r.e.flags & flagAD
	}
	if truncated {
		flags |= flagTC
	}
	w.rcode = int(r.e.rcode)
	w.out = q.finish(out, flags, w.rcode, an, ns, ar)
}

// available returns the RA flag if names other than the cluster's are answered.
func (s *Server) available() uint16 {
	if len(*s.forward.main.Load()) > 0 || len(s.forward.groups) > 0 {
		return flagRA
	}
	return 0
}

// handOver has another goroutine finish the request, which waits for the answer
// of an upstream and calls send with the whole answer. If that is not possible it
// returns false, with an error reply in w.out.
func (w *worker) handOver(req []byte, what fate, send func([]byte)) bool {
	s := w.s
	if what == forward && s.loops.isProbe(&w.q.Name) {
		w.fail(req, rcodeRefused)
		return false
	}
	j := &job{
		s: s, req: append([]byte(nil), req...), udp: w.udp, stats: w.stats,
		client: w.client, server: w.server, family: w.family, send: send, start: time.Now(),
	}
	a, name := w.ask(), &w.q.Name
	if what == follow {
		name = w.zoneReply.Target
		a.name = append([]byte(nil), name.Wire()...)
		j.prefix = append([]byte(nil), w.out...)
		j.reply = w.zoneReply
		j.reply.Target = nil
		now := time.Now().Unix()
		if e, age, stale := s.forward.cache.get([]byte(a.key()), now); e != nil && !stale {
			return s.forward.spawn(func() { j.finishChain(a, result{e, age, false}) })
		}
	}
	us := s.forward.upstreams(name)
	if len(us) == 0 {
		return w.cannot(req, what)
	}
	done := j.finish
	if what == follow {
		done = func(r result) { j.finishChain(a, r) }
	}
	if !s.forward.lookup(a, w.client.Addr(), us, done) {
		return w.cannot(req, what)
	}
	return true
}

// cannot answers when no upstream can be asked.
func (w *worker) cannot(req []byte, what fate) bool {
	if what == follow && w.zoneReply.Kind == zone.Searched {
		// Without autopath the name itself is answered.
		w.q.Search = false
		w.out = w.q.begin(w.out, req)
		w.out, w.zoneReply = w.s.zone.Answer(w.out, &w.q.Question, w.q.limit(w.udp))
		w.finishZone()
		return false
	}
	w.fail(req, rcodeRefused)
	return false
}

// job is a request that waits for an upstream.
type job struct {
	s      *Server
	req    []byte
	udp    bool
	stats  *workerStats
	client netip.AddrPort
	server netip.AddrPort
	family int
	send   func([]byte)
	start  time.Time
	// prefix and reply are the beginning of an answer that ends in a CNAME.
	prefix []byte
	reply  zone.Reply
}

// finish sends an upstream's answer on.
func (j *job) finish(r result) {
	w := j.worker()
	w.origin = fromForward
	if r.e == nil {
		w.fail(j.req, rcodeServFail)
	} else {
		w.appendEntry(j.req, r)
	}
	j.deliver(w)
}

// worker makes a worker that stands where the first one stood.
func (j *job) worker() *worker {
	w := &worker{s: j.s, udp: j.udp, stats: j.stats, client: j.client, server: j.server, family: j.family, out: make([]byte, 0, udpSize)}
	w.q.parse(j.req)
	return w
}

func (j *job) deliver(w *worker) {
	j.send(w.out)
	w.finished(w.q.end, time.Since(j.start))
}

// finishChain sends the CNAMEs the zone gave, followed by the upstream's
// answer for the last target.
func (j *job) finishChain(a ask, r result) {
	w := j.worker()
	defer j.deliver(w)
	w.origin = fromZone
	if r.e == nil || r.e.rcode != rcodeSuccess && r.e.rcode != rcodeNXDomain {
		w.fail(j.req, rcodeServFail)
		return
	}
	if j.reply.Kind == zone.Searched && r.e.rcode == rcodeNXDomain {
		w.out = w.q.begin(w.out, j.req)
		w.out, w.zoneReply = j.s.zone.Answer(w.out, &w.q.Question, w.q.limit(j.udp))
		w.finishZone()
		return
	}
	target := r.e.message(a.name, a.typ, r.age)
	head := append([]byte(nil), j.prefix...)
	binary.BigEndian.PutUint16(head[2:], flagQR)
	binary.BigEndian.PutUint16(head[6:], j.reply.Answers)
	binary.BigEndian.PutUint32(head[8:], 0)
	m := new(mdns.Msg)
	if target == nil || m.Unpack(head) != nil {
		w.fail(j.req, rcodeServFail)
		return
	}
	m.Answer = append(m.Answer, target.Answer...)
	m.Ns = target.Ns
	m.Compress = true
	m.Truncate(w.q.limit(j.udp))
	packed, err := m.PackBuffer(make([]byte, maxMessage))
	if err != nil {
		w.fail(j.req, rcodeServFail)
		return
	}
	flags := j.s.available() | flagAA
	if m.Truncated {
		flags |= flagTC
	}
	w.rcode, w.searched = int(r.e.rcode), j.reply.BySearch
	w.out = w.q.finish(packed, flags, w.rcode, uint16(len(m.Answer)), uint16(len(m.Ns)), 0)
}

// show shows the request to whoever records flows.
func (w *worker) show(to seen.Questions, took time.Duration) {
	q := seen.Question{Client: w.client, Server: clientOf(w.server), Protocol: svc.TCP, Answer: w.out, Answered: time.Now(), Latency: took}
	if w.udp {
		q.Protocol = svc.UDP
	}
	to.Question(&q)
}

// log writes the request to the query log.
func (w *worker) log(took time.Duration) {
	name := "" // of a question that was not understood
	if w.q.end > headerSize {
		name = w.q.Name.String()
	}
	proto := "tcp"
	if w.udp {
		proto = "udp"
	}
	w.s.log.Info("query", "client", w.client.String(), "name", name, "type", mdns.Type(w.q.Type).String(), "proto", proto, "do", w.q.do,
		"rcode", rcodeNames[min(w.rcode, len(rcodeNames)-1)], "size", len(w.out), "duration", took)
}
