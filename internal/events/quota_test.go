package events

import (
	"testing"
	"time"
)

func TestQuota(t *testing.T) {
	var q Quota
	begin, taken := time.Now(), 0
	for i := range 10 * QuotaSize {
		if q.Take(begin.Add(time.Duration(i) * time.Millisecond)) {
			taken++
		}
	}
	if taken != QuotaSize {
		t.Errorf("%d are taken, want %d", taken, QuotaSize)
	}
	if !q.Take(begin.Add(QuotaPeriod)) {
		t.Error("nothing is taken in the next period")
	}
}
