package dns

import "net/netip"

// shares divides places among clients so that none can take them all: a client may
// take one more while it holds fewer than are free. So one greedy client gets half,
// and n of them 1/(n+1) each, which leaves as much for all others. (Dynamic queue
// length thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2),
// 1998.) The caller synchronizes.
type shares struct {
	limit, used int
	by          map[netip.Addr]int
}

func newShares(limit int) shares { return shares{limit: limit, by: map[netip.Addr]int{}} }

// full reports whether all places are taken.
func (s *shares) full() bool { return s.used >= s.limit }

// take takes a place for the client and reports whether it may have one.
func (s *shares) take(client netip.Addr) bool {
	if s.by[client] >= s.limit-s.used {
		return false
	}
	s.add(client)
	return true
}

func (s *shares) add(client netip.Addr) {
	s.used++
	s.by[client]++
}

// release gives a place of the client back.
func (s *shares) release(client netip.Addr) {
	s.used--
	if s.by[client]--; s.by[client] <= 0 {
		delete(s.by, client)
	}
}

// largest returns the client that holds the most places.
func (s *shares) largest() (client netip.Addr) {
	most := 0
	for c, n := range s.by {
		if n > most {
			client, most = c, n
		}
	}
	return client
}
