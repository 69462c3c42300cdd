package cache

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// A failure is kept, but not one that ends as soon as the cluster is listed.
func TestNotReadyIsNotKept(t *testing.T) {
	for err, want := range map[error]int{fmt.Errorf("kubernetes: %w", plugin.ErrNotReady): 2, errors.New("other"): 1} {
		asked := 0
		limits := corefile.CacheLimits{Capacity: 256, MaxTTL: time.Hour}
		c := New(&corefile.Cache{Zones: []string{"."}, Success: limits, Denial: limits, ServFail: 5 * time.Second},
			plugin.Func(func(context.Context, *plugin.Query) plugin.Reply {
				asked++
				return plugin.Fail("kubernetes", mdns.RcodeServerFailure, err)
			}))
		for range 2 {
			r := c.Answer(t.Context(), &plugin.Query{Msg: new(mdns.Msg).SetQuestion("a.example.", mdns.TypeA)})
			if r.Code() != mdns.RcodeServerFailure {
				t.Fatalf("the code is %d", r.Code())
			}
		}
		if asked != want {
			t.Errorf("%v: asked %d times, want %d", err, asked, want)
		}
	}
}
