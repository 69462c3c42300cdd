package policy

import (
	"strings"
	"testing"
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"
)

func retryOf(t *testing.T, text string) (*Retry, string) {
	t.Helper()
	spec := &gwv1.HTTPRouteRetry{}
	if err := yaml.UnmarshalStrict([]byte(text), spec); err != nil {
		t.Fatal(err)
	}
	return ReadRetry(spec, time.Minute)
}

// A retry has the codes that it names, and a bound of attempts and of time in any case.
func TestRetry(t *testing.T) {
	for text, want := range map[string]struct {
		attempts int
		backoff  time.Duration
		codes    []int
	}{
		"{}":                                    {2, 25 * time.Millisecond, nil},
		"{attempts: 0}":                         {0, 25 * time.Millisecond, nil},
		"{attempts: 5, backoff: 1s500ms}":       {5, 1500 * time.Millisecond, nil},
		"{backoff: 0s, codes: [400, 503, 599]}": {2, 0, []int{400, 503, 599}},
	} {
		r, wrong := retryOf(t, text)
		if wrong != "" {
			t.Fatalf("%s: %s", text, wrong)
		}
		if r.Attempts != want.attempts || r.Backoff != want.backoff || r.Within != time.Minute || r.Never() != (want.attempts == 0) {
			t.Errorf("%s: %+v", text, r)
		}
		n := 0
		for status := range 1000 {
			if r.Has(status) {
				n++
			}
		}
		for _, code := range want.codes {
			if !r.Has(code) {
				t.Errorf("%s: not %d", text, code)
			}
		}
		if n != len(want.codes) {
			t.Errorf("%s: %d codes", text, n)
		}
	}
}

// What is invalid is refused by its field.
func TestRetryRefused(t *testing.T) {
	for text, want := range map[string]string{
		"{attempts: -1}": "attempts: ", "{backoff: soon}": "backoff: ", "{backoff: -1s}": "backoff: ",
		"{codes: [500, 200]}": "codes[1]: ", "{codes: [600]}": "codes[0]: ", "{codes: [-1]}": "codes[0]: ",
	} {
		if _, wrong := retryOf(t, text); !strings.HasPrefix(wrong, want) {
			t.Errorf("%s: %q", text, wrong)
		}
	}
}

// The wait is never shorter than the backoff, grows up to eightfold, and differs between requests. The longest backoff that can be
// written does not overflow.
func TestRetryWait(t *testing.T) {
	r := &Retry{Backoff: time.Second}
	for n, least := range map[int]time.Duration{0: time.Second, 1: 2 * time.Second, 3: 8 * time.Second, 100: 8 * time.Second} {
		for _, random := range []uint64{0, 1, 1 << 63, ^uint64(0)} {
			if got := r.Wait(n, random); got < least || got > least*3/2 {
				t.Errorf("%d: %v", n, got)
			}
		}
	}
	if r.Wait(0, 0) == r.Wait(0, 12345) {
		t.Error("all wait for the same time")
	}
	long, wrong := retryOf(t, "{backoff: 99999h99999h99999h99999h}")
	if wrong != "" || long.Wait(9, ^uint64(0)) < long.Backoff {
		t.Errorf("%v, %s", long, wrong)
	}
	if got := (&Retry{}).Wait(5, 7); got != 0 {
		t.Error(got)
	}
}
