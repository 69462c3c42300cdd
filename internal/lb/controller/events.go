package controller

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/pool"
	"github.com/fairlead/fairlead/internal/svc"
)

// The Events about annotations, by what became of them.
var annotationEvents = []struct {
	state  dialect.State
	reason string
}{
	{dialect.Invalid, "InvalidAnnotation"},
	{dialect.Unknown, "UnknownAnnotation"},
	{dialect.NotYet, "AnnotationNotSupported"},
	{dialect.Overridden, "AnnotationOverridden"},
	{dialect.Unused, "AnnotationUnused"},
	{dialect.Meaningless, "AnnotationIgnored"},
	{dialect.Applied, "AnnotationApplied"},
	{"", wayReason},
}

// wayReason is the reason of Events about the way of a Service, if it is or was the proxied one.
const wayReason = "LoadBalancerWay"

// Bounds of one Event's message in bytes, and of how many Events of one reason a change has.
// The API allows 1,024 bytes (events.k8s.io).
const (
	maxEventText   = 960
	maxEventsAlike = 3
	maxRecorded    = 8 // problems of a Service of which this leader remembers that it recorded them
)

// reporter records Events about Services. The caller of its methods holds the state's mu.
type reporter struct {
	events *events.Recorder
	// later has a Service synced after a time.
	later func(svc.Name, time.Duration)
	// announcing bounds the Events about addresses that no node can announce, and readings the Services in a period with
	// Events about their annotations.
	announcing, readings events.Quota
}

// reading records what became of the annotations of a Service, when that has changed:
// Events of the same reason are combined. Services beyond the quota wait for the next period.
func (e *reporter) reading(of *service, r *dialect.Reading) {
	s := of.object
	texts := map[string][]string{}
	for _, kind := range annotationEvents {
		for _, f := range r.Findings {
			if kind.state == "" || f.State != kind.state || r.AddressErr != nil && f.Text == r.AddressErr.Error() {
				continue // the latter is a problem with the address, see problems
			}
			text := plain(f.Text)
			if f.Annotation != "" && !strings.Contains(text, f.Annotation) {
				text = f.Annotation + ": " + text
			}
			texts[kind.reason] = append(texts[kind.reason], text)
		}
	}
	before, known := of.findings, of.findings != nil
	if r.Way == dialect.Proxied {
		texts[wayReason] = []string{"proxied: nodes accept its connections and make others to Pods, because of " + strings.Join(r.Because, ", ")}
	} else if len(before[wayReason]) > 0 {
		texts[wayReason] = []string{"direct: nodes forward its connections to Pods"}
	}
	// Normal Events of an earlier leader are not repeated. A Warning is, once the API server no longer has it.
	repeated := !known && len(s.Status.LoadBalancer.Ingress) > 0
	var warnings, others []finding
	for _, kind := range annotationEvents {
		fresh := slices.DeleteFunc(slices.Clone(texts[kind.reason]), func(t string) bool { return slices.Contains(before[kind.reason], t) })
		for _, message := range combine(fresh) {
			if kind.state.IsWarning() {
				warnings = append(warnings, finding{kind.reason, message})
			} else if !repeated {
				others = append(others, finding{kind.reason, message})
			}
		}
	}
	if len(warnings)+len(others) > 0 && !e.readings.Take(time.Now()) {
		switch {
		case repeated:
			of.findings = texts
			return
		case !known:
			of.findings = map[string][]string{}
		}
		e.later(svc.NameOf(s), events.QuotaPeriod)
		return
	}
	for _, f := range warnings {
		e.events.Once(s, corev1.EventTypeWarning, f.reason, f.message)
	}
	for _, f := range others {
		e.events.Event(s, corev1.EventTypeNormal, f.reason, f.message)
	}
	of.findings = texts
}

// problems records what is wrong, when it has become so. What this leader has not recorded before, the one before it
// may have.
func (e *reporter) problems(of *service, problems []*pool.Problem) {
	before := of.problems
	of.problems = nil
	for _, p := range problems {
		text := string(p.Kind) + ": " + p.Message
		if p.Kind == notAnnounceable {
			text, _, _ = strings.Cut(p.Message, ": ") // the reason may change often
		}
		of.problems = append(of.problems, text)
		if slices.Contains(before, text) || p.Kind == notAnnounceable && !e.announcing.Take(time.Now()) {
			continue
		}
		record := e.events.Once
		if slices.Contains(of.recorded, text) {
			record = e.events.Event
		} else if of.recorded = append(of.recorded, text); len(of.recorded) > maxRecorded {
			of.recorded = of.recorded[1:]
		}
		record(of.object, corev1.EventTypeWarning, string(p.Kind), p.Message)
	}
}

// finding is an Event about annotations.
type finding struct{ reason, message string }

// combine joins texts to a few messages.
func combine(texts []string) (out []string) {
	for _, t := range texts {
		switch last := len(out) - 1; {
		case last >= 0 && len(out[last])+len(t)+2 <= maxEventText:
			out[last] += "; " + t
		case len(out) == maxEventsAlike:
			out[last] += "; and more: see 'fairlead lb explain'"
			return out
		default:
			out = append(out, strings.ToValidUTF8(t[:min(len(t), maxEventText)], ""))
		}
	}
	return out
}

// plain returns a text as one line without control characters.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text)
}
