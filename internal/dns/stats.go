package dns

import (
	"math/bits"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Each socket has its own counters, which are added up when metrics are read, so
// that counting causes no traffic between processors.

// histogram counts durations in the buckets of CoreDNS: 0.25 ms, doubled 15
// times.
type histogram struct {
	buckets [17]atomic.Uint64 // the last one is for the rest
	sum     atomic.Int64      // nanoseconds
}

const firstBucket = 250 * time.Microsecond

func (h *histogram) observe(d time.Duration) {
	i := 0
	if d > firstBucket {
		i = min(bits.Len64(uint64((d-1)/firstBucket)), len(h.buckets)-1)
	}
	h.buckets[i].Add(1)
	h.sum.Add(int64(d))
}

// add adds o to h.
func (h *histogram) add(o *histogram) {
	for i := range h.buckets {
		h.buckets[i].Add(o.buckets[i].Load())
	}
	h.sum.Add(o.sum.Load())
}

// sizes counts sizes of messages in the buckets of CoreDNS.
type sizes struct {
	buckets [len(sizeBounds) + 1]atomic.Uint64
	sum     atomic.Uint64
}

var sizeBounds = [...]int{0, 100, 200, 300, 400, 511, 1023, 2047, 4095, 8291, 16000, 32000, 48000, 64000}

func (s *sizes) observe(n int) {
	i := 0
	for i < len(sizeBounds) && n > sizeBounds[i] {
		i++
	}
	s.buckets[i].Add(1)
	s.sum.Add(uint64(n))
}

func (s *sizes) add(o *sizes) {
	for i := range s.buckets {
		s.buckets[i].Add(o.buckets[i].Load())
	}
	s.sum.Add(o.sum.Load())
}

// typeNames are the values of the label "type"; the last is for all others.
var typeNames = [...]string{"A", "AAAA", "MX", "SOA", "CNAME", "PTR", "TXT", "NS", "SRV", "DS", "DNSKEY", "RRSIG", "NSEC", "NSEC3", "HTTPS",
	"IXFR", "AXFR", "ANY", "SVCB", "other"}

// typeSlot returns the index of a type in typeNames.
func typeSlot(t uint16) int {
	switch t {
	case 1:
		return 0
	case 28:
		return 1
	case 15:
		return 2
	case 6:
		return 3
	case 5:
		return 4
	case 12:
		return 5
	case 16:
		return 6
	case 2:
		return 7
	case 33:
		return 8
	case 43:
		return 9
	case 48:
		return 10
	case 46:
		return 11
	case 47:
		return 12
	case 50:
		return 13
	case 65:
		return 14
	case typeIXFR:
		return 15
	case typeAXFR:
		return 16
	case 255:
		return 17
	case 64:
		return 18
	}
	return 19
}

// rcodeNames are the values of the label "rcode".
var rcodeNames = [...]string{"NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "YXDOMAIN", "YXRRSET", "NXRRSET", "NOTAUTH",
	"NOTZONE", "11", "12", "13", "14", "15", "BADVERS"}

// originNames are the values of the label "plugin".
var originNames = [...]string{"", "kubernetes", "cache", "forward"}

// The values of the label "zone": the cluster's names and all others.
const (
	zoneCluster = iota
	zoneRoot
	zoneCount
)

// workerStats are the counters of one socket.
type workerStats struct {
	server, proto string

	requests  [zoneCount][len(familyNames)][len(typeNames)]atomic.Uint64
	do        [zoneCount]atomic.Uint64
	responses [zoneCount][len(rcodeNames)][len(originNames)]atomic.Uint64
	duration  [zoneCount]histogram
	reqSize   [zoneCount]sizes
	respSize  [zoneCount]sizes
	dropped   atomic.Uint64
	autopath  atomic.Uint64
}

// familyNames are the values of the label "family", as CoreDNS names them.
var familyNames = [...]string{"1", "2"}

// family returns the index of an address's family in familyNames.
func family(a netip.Addr) int {
	if a.Is6() && !a.Is4In6() {
		return 1
	}
	return 0
}

// finished counts, logs and shows the request that w has answered.
func (w *worker) finished(reqSize int, took time.Duration) {
	w.count(reqSize, took)
	if w.s.options.LogQueries {
		w.log(took)
	}
	if to := w.s.options.Questions; to != nil && to.Wants() {
		w.show(to, took)
	}
}

// count counts the request that w has answered.
func (w *worker) count(reqSize int, took time.Duration) {
	z := zoneRoot
	if w.origin == fromZone {
		z = zoneCluster
	}
	s := w.stats
	s.requests[z][w.family][typeSlot(w.q.Type)].Add(1)
	if w.q.do {
		s.do[z].Add(1)
	}
	s.responses[z][min(w.rcode, len(rcodeNames)-1)][w.origin].Add(1)
	s.duration[z].observe(took)
	s.reqSize[z].observe(reqSize)
	s.respSize[z].observe(len(w.out))
	if w.searched {
		s.autopath.Add(1)
	}
}

// statsTable has the counters of all sockets.
type statsTable struct {
	mu  sync.Mutex
	all []*workerStats
}

func (t *statsTable) add(addr netip.AddrPort, proto string) *workerStats {
	s := &workerStats{server: "dns://" + addr.String(), proto: proto}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = append(t.all, s)
	return s
}

// sums adds up the sockets of each address, byProto the sockets of UDP and of TCP
// apart.
func (t *statsTable) sums(byProto bool) []*workerStats {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []*workerStats
next:
	for _, s := range t.all {
		for _, sum := range out {
			if sum.server == s.server && (sum.proto == s.proto || !byProto) {
				sum.add(s)
				continue next
			}
		}
		sum := &workerStats{server: s.server, proto: s.proto}
		sum.add(s)
		out = append(out, sum)
	}
	return out
}

// add adds o to s.
func (s *workerStats) add(o *workerStats) {
	for z := range zoneCount {
		for f := range s.requests[z] {
			for t := range s.requests[z][f] {
				s.requests[z][f][t].Add(o.requests[z][f][t].Load())
			}
		}
		for r := range s.responses[z] {
			for p := range s.responses[z][r] {
				s.responses[z][r][p].Add(o.responses[z][r][p].Load())
			}
		}
		s.do[z].Add(o.do[z].Load())
		s.duration[z].add(&o.duration[z])
		s.reqSize[z].add(&o.reqSize[z])
		s.respSize[z].add(&o.respSize[z])
	}
	s.dropped.Add(o.dropped.Load())
	s.autopath.Add(o.autopath.Load())
}

// upstreamStats are the counters of one upstream.
type upstreamStats struct {
	duration [16]histogram // by rcode
	failures atomic.Uint64
	probing  atomic.Bool
	// Sockets and connections opened, and connections reused.
	udp, tcp, reused atomic.Uint64
}

func (s *upstreamStats) observe(rcode int, d time.Duration) { s.duration[rcode&15].observe(d) }

// forwardStats are the counters of forwarding as a whole.
type forwardStats struct {
	rejects, clientRejects, broken, stale, prefetch, requests, malformed atomic.Uint64
}
