package pod

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestBackoff(t *testing.T) {
	b := backoff{base: 10 * time.Second}
	var got []time.Duration
	for range 9 {
		got = append(got, b.next(time.Second))
	}
	got = append(got, b.next(11*time.Minute), b.next(time.Second))
	s := time.Second
	want := []time.Duration{0, 10 * s, 20 * s, 40 * s, 80 * s, 160 * s, 300 * s, 300 * s, 300 * s, 0, 10 * s}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
