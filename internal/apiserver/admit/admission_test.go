package admit

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/admission"
)

// A plugin that could not be made is tried again, not at each request, and the error is
// logged once.
func TestPluginIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		h := &Hooks{log: slog.New(slog.NewTextHandler(&out, nil))}
		tries := 0
		get := h.untilMade(func() (admission.Interface, error) {
			if tries++; tries < 3 {
				return nil, errors.New("no memory")
			}
			return admission.NewHandler(admission.Create), nil
		})
		for want := 1; want <= 2; want++ {
			for range 3 {
				if p, err := get(); p != nil || err == nil || tries != want {
					t.Errorf("%v, %v after %d tries, want %d", p, err, tries, want)
				}
			}
			time.Sleep(pluginRetry) // of the bubble
		}
		for range 3 {
			if p, err := get(); p == nil || err != nil || tries != 3 {
				t.Errorf("%v, %v after %d tries", p, err, tries)
			}
		}
		if n := strings.Count(out.String(), "no memory"); n != 1 {
			t.Errorf("logged %d times: %s", n, &out)
		}
	})
}
