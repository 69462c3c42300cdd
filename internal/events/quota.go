package events

import (
	"strings"
	"time"
)

// A change that concerns thousands of objects must not displace all other Events.
const (
	// QuotaSize is how many Events a Quota allows in a period.
	QuotaSize = 100
	// QuotaPeriod is the length of the period.
	QuotaPeriod = 10 * time.Second
)

// Quota bounds the Events of one kind to QuotaSize in each QuotaPeriod. The zero Quota is ready for use by one
// goroutine at a time.
type Quota struct {
	since time.Time
	used  int
}

// Take reports whether one more Event is within the quota.
func (q *Quota) Take(now time.Time) bool {
	if now.Sub(q.since) >= QuotaPeriod {
		*q = Quota{since: now}
	}
	q.used++
	return q.used <= QuotaSize
}

// MaxListed bounds how many things of a kind a message names.
const MaxListed = 5

// Abbreviate joins the first MaxListed items of a list for a message.
func Abbreviate(list []string) string {
	if len(list) > MaxListed {
		return strings.Join(list[:MaxListed], ", ") + " and more"
	}
	return strings.Join(list, ", ")
}
