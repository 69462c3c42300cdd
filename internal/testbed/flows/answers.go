package flows

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Compare asks rows with a protocol from the node and its Pods, each twice: as it is, and with other in force. Every answer must be
// the same: who is reached, and whom that one sees as the client. The node is one client, whichever of its addresses it has
// on the way. Affinity, which remembers the first answer, is left out.
func Compare(t *testing.T, e *Env, p svc.Protocol, other func(func())) {
	asked := 0
	for _, r := range slices.Concat(Rows, APIRows, HostPortRows) {
		if !slices.Contains([]string{"node", "a", "b", "c"}, r.From) || r.Want.Same ||
			r.Protocols != nil && !slices.Contains(r.Protocols, p) {
			continue
		}
		families := r.Families
		if families == nil {
			families = []svc.Family{svc.IPv4, svc.IPv6}
		}
		for _, f := range families {
			e.Apply(t, e.Table(f, p, &r), nil)
			e.Forget(t)
			is := e.answers(t, f, p, &r)
			var want []string
			other(func() { want = e.answers(t, f, p, &r) })
			if asked++; !slices.Equal(is, want) {
				t.Errorf("%s, %s: %q, otherwise %q", r.Name, f, is, want)
			}
		}
	}
	if asked < 50 {
		t.Errorf("only %d questions were asked: this shows nothing", asked)
	}
}

// answers are the different ones that a row's question gets.
func (e *Env) answers(t testing.TB, f svc.Family, p svc.Protocol, r *Row) []string {
	t.Helper()
	first := &Service{}
	if len(r.Services) > 0 {
		first = &r.Services[0]
	}
	wait := answerTime
	if r.Want.Dropped {
		wait = silence
	}
	want := strings.Fields(r.Want.Reach)
	reached, seen := map[string]bool{}, map[string]bool{}
	for range max(1, 20*len(want)) {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		start := time.Now()
		got, err := e.Host(r.From).Ask(ctx, p, e.address(f, r.To, first))
		cancel()
		switch {
		case testbed.Refused(err):
			seen["refused"] = true
		case err != nil && testbed.Silent(err):
			seen["silent"] = true
		case err != nil:
			seen[fmt.Sprintf("%v after %s", err, time.Since(start))] = true
		default:
			client := got.Client.Addr().String()
			if a := got.Client.Addr(); a == e.Node.Addr(f) || a == e.Node.PodCIDR(f).Addr().Next() {
				client = "the node"
			}
			seen[got.Name+" saw "+client] = true
			reached[got.Name] = true
		}
		if err != nil || len(reached) == len(want) {
			break
		}
	}
	return slices.Sorted(maps.Keys(seen))
}
