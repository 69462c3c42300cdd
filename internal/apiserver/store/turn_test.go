package store

import (
	"testing"
	"time"
)

// Members defragment one at a time, and each has its turn; one that is alone need not wait.
func TestTurns(t *testing.T) {
	t.Parallel()
	begin := time.Unix(1_800_000_000, 0)
	for _, n := range []int{1, 2, 3, 5} {
		had := make([]int, n)
		for s := range n * 60 {
			for i := range n {
				if hasTurn(begin.Add(time.Duration(s)*time.Second), i, n) {
					had[i]++
				}
			}
		}
		for i, seconds := range had {
			if seconds != 60 {
				t.Errorf("member %d of %d has %d seconds of %d", i, n, seconds, n*60)
			}
		}
	}
}
