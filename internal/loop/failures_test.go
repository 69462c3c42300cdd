package loop

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The first failure is a warning at once, and again when it does not end. A race is none, and an outage of all keys is few.
func TestFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text strings.Builder
		log := slog.New(slog.NewTextHandler(&text, nil))
		warned := func() int {
			defer text.Reset()
			return strings.Count(text.String(), "level=WARN")
		}
		var f Failures
		race, down := apierrors.NewConflict(schema.GroupResource{}, "a", nil), errors.New("connection refused")
		if f.Log(log, 0, race, "cannot sync"); warned() != 0 {
			t.Error("a race is a warning")
		}
		if f.Log(log, 0, down, "cannot sync", "object", "a"); !strings.Contains(text.String(), "object=a") || warned() != 1 {
			t.Error("the first failure is no warning")
		}
		for range 100 {
			f.Log(log, 0, down, "cannot sync")
		}
		if n := warned(); n != 0 {
			t.Errorf("%d warnings of other keys at the same time", n)
		}
		for i := range 20 {
			f.Log(log, i+1, race, "cannot sync")
		}
		if n := warned(); n != 1 {
			t.Errorf("%d warnings of a race that does not end", n)
		}
		time.Sleep(warnPeriod)
		if f.Log(log, 0, down, "cannot sync"); warned() != 1 {
			t.Error("the next failure is no warning")
		}
	})
}
