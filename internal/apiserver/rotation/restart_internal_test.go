package rotation

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// An etcd is restarted when all members run and report, those with earlier names first.
func TestTurnsOfRestarts(t *testing.T) {
	t.Parallel()
	done := pki.Report{Trusts: []string{"new"}, Peers: []string{"new"}}
	behind := pki.Report{Trusts: []string{"new"}, Peers: []string{"old"}}
	for what, c := range map[string]struct {
		others map[string]pki.Report
		// first is what Restart is told, nil if it is not called, and err is in the error.
		first []string
		err   string
	}{
		"all are behind, another is first": {others: map[string]pki.Report{"server a": behind, "server c": behind}},
		"the first is done":                {others: map[string]pki.Report{"server a": done, "server c": behind}, first: []string{"server a"}},
		"all others are done": {
			others: map[string]pki.Report{"server a": done, "server c": done}, first: []string{"server a", "server c"},
		},
		"one is down": {others: map[string]pki.Report{"server a": done}, err: "server c is down"},
		"one is of an earlier version": {
			others: map[string]pki.Report{"server a": done, "server c": {Trusts: []string{"new"}}}, err: "server c does not report",
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var first []string
			r := &Rotation{o: Options{
				Self: "server b", Report: func() pki.Report { return behind }, Log: slog.New(slog.DiscardHandler),
				Servers: func(context.Context) (map[string]pki.Report, error) { return c.others, nil },
				Members: func() []string { return []string{"server a", "server b", "server c"} },
				Restart: func(_ context.Context, done []string) error { first = done; return nil },
			}}
			err := r.restart(t.Context())
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, want %q", err, c.err)
			}
			if slices.Sort(first); !slices.Equal(first, c.first) {
				t.Errorf("restarted with %v, want %v", first, c.first)
			}
		})
	}
}
