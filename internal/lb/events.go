package lb

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dialect"
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
)

// recordReading records what became of the annotations of a Service, when that has changed:
// Events of the same reason are combined. Services beyond the quota wait for the next period.
func (c *controller) recordReading(s *corev1.Service, r *dialect.Reading) {
	name := nameOf(s)
	texts := map[string][]string{}
	for _, kind := range annotationEvents {
		for _, f := range r.Findings {
			if kind.state == "" || f.State != kind.state || r.AddressErr != nil && f.Text == r.AddressErr.Error() {
				continue // the latter is a problem with the address, see recordProblems
			}
			text := plain(f.Text)
			if f.Annotation != "" && !strings.Contains(text, f.Annotation) {
				text = f.Annotation + ": " + text
			}
			texts[kind.reason] = append(texts[kind.reason], text)
		}
	}
	before, known := c.findings[name]
	if r.Way == dialect.Proxied {
		texts[wayReason] = []string{"proxied: nodes accept its connections and make others to Pods, because of " + strings.Join(r.Because, ", ")}
	} else if len(before[wayReason]) > 0 {
		texts[wayReason] = []string{"direct: nodes forward its connections to Pods"}
	}
	// What an earlier leader has seen needs no Event again; a Warning has one while the API server does not
	// have it any longer.
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
	if len(warnings)+len(others) > 0 && !c.readings.take(time.Now()) {
		switch {
		case repeated:
			c.findings[name] = texts
			return
		case !known:
			c.findings[name] = map[string][]string{}
		}
		c.loop.Queue.AddAfter(name, quotaPeriod)
		return
	}
	for _, f := range warnings {
		c.events.Once(s, corev1.EventTypeWarning, f.reason, f.message)
	}
	for _, f := range others {
		c.events.Event(s, corev1.EventTypeNormal, f.reason, f.message)
	}
	c.findings[name] = texts
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
