package parts

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/proxy"
)

// A start waits for the kernel, but not for ever for one rejected Service.
func TestStartContinuesThoughAServiceIsRejected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := slog.New(slog.DiscardHandler)
		begin := time.Now()
		if err := Programmed(t.Context(), log, func() proxy.Status { return proxy.Status{Programmed: true, Applies: 1} }); err != nil ||
			time.Since(begin) > 0 {
			t.Errorf("programmed at once: %v after %s", err, time.Since(begin))
		}
		if err := Programmed(t.Context(), log, func() proxy.Status { return proxy.Status{Applies: 3} }); err != nil ||
			time.Since(begin) < programmedTimeout {
			t.Errorf("rejected: %v after %s", err, time.Since(begin))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := Programmed(ctx, log, func() proxy.Status { return proxy.Status{Message: "waiting for the first list"} })
		if err == nil || !strings.Contains(err.Error(), "waiting for the first list") {
			t.Errorf("never tried: %v", err)
		}
	})
}
