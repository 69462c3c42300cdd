package explaincmd

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/svc"
)

// unknownThen is what an answer about an earlier time leaves out.
const unknownThen = "as nodes had programmed it at that time; not known of it: why, whether endpoints answered, and what other " +
	"programs had changed in the kernel"

// parseTime reads --at: a time of RFC 3339, or HH:MM or HH:MM:SS of today in the local time of now. It must not be later than now, or
// earlier than nodes remember.
func parseTime(text string, now time.Time) (time.Time, error) {
	at, err := time.Parse(time.RFC3339Nano, text)
	for _, layout := range []string{"15:04", time.TimeOnly} {
		if err == nil {
			break
		}
		var of time.Time
		if of, err = time.Parse(layout, text); err == nil {
			at = time.Date(now.Year(), now.Month(), now.Day(), of.Hour(), of.Minute(), of.Second(), 0, now.Location())
		}
	}
	switch {
	case err != nil:
		return at, base.Usagef("--at is %q; want a time such as 15:04 (today) or %s", text, now.Format(time.RFC3339))
	case at.After(now):
		return at, base.Usagef("--at is %s, which is later than now", at.Format(time.RFC3339))
	case now.Sub(at) > MaxSince:
		return at, base.Usagef("--at is %s; nodes remember at most %s", at.Format(time.RFC3339), MaxSince)
	}
	return at, nil
}

// then asks a node for what it had at an earlier time, after facts has the present state. What the node cannot tell is a problem, and
// the verdict then has no frontend.
func then(ctx context.Context, from *asking.Nodes, service svc.Name, facts *explain.Facts, at time.Time) *explain.Facts {
	if facts.Problem != "" {
		return withoutPast(facts, facts.Problem)
	}
	text, err := from.Get(ctx, facts.Node, "history", url.Values{"service": {service.String()}, "at": {at.UTC().Format(time.RFC3339Nano)}})
	if err != nil {
		return withoutPast(facts, asking.WhyNot(err))
	}
	var past proxy.Then
	if err := json.Unmarshal(text, &past); err != nil {
		return withoutPast(facts, "cannot use its answer: "+base.OneLine(err))
	}
	if past.From.IsZero() || past.From.After(at) {
		return withoutPast(facts, fmt.Sprintf("it remembers nothing before %s", past.From.Local().Format(time.RFC3339)))
	}
	return pastFacts(facts, &past)
}

// withoutPast are the Facts of a node whose past is not known.
func withoutPast(f *explain.Facts, problem string) *explain.Facts {
	return &explain.Facts{Node: f.Node, Mode: f.Mode, Problem: problem}
}

// pastFacts puts earlier ports in the place of the present ones, without the present state of the kernel and the probes.
func pastFacts(f *explain.Facts, past *proxy.Then) *explain.Facts {
	out := *f
	out.Ports, out.Probes, out.Problems, out.Unreached = nil, nil, nil, nil
	for _, p := range f.Ports {
		if !slices.ContainsFunc(past.Changed, func(c proxy.ThenPort) bool { return c.Key == p.Key() }) {
			out.Ports = append(out.Ports, explain.Port{ServicePort: p.ServicePort})
		}
	}
	for _, c := range past.Changed {
		if c.Port != nil {
			out.Ports = append(out.Ports, explain.Port{ServicePort: c.Port})
		}
	}
	checked, err := checkFacts(&out, f.Node)
	if err != nil {
		return withoutPast(f, err.Error())
	}
	return checked
}
