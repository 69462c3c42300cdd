package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// Difference is one part of an answer that two servers give differently.
type Difference struct {
	Line           int
	Verb, Target   string
	Where          string // "code", "warnings", or a path such as .spec.type
	Fairlead, Peer string
	// Why is the reason that the case gives for it; empty while it is
	// unexplained.
	Why string
}

// String returns the difference as one line.
func (d Difference) String() string {
	s := fmt.Sprintf("%d: %s %s: %s: fairlead %s, kube-apiserver %s", d.Line, d.Verb, d.Target, d.Where, d.Fairlead, d.Peer)
	if d.Why != "" {
		s += " (" + d.Why + ")"
	}
	return s
}

// Compare makes the requests of c to two servers and returns in what their
// whole answers differ: code, warnings and every field. Values that each server
// chooses itself (UIDs, times, addresses and node ports that it allocates) need
// only stand for one another in the whole case. A reason given in the case for
// a difference that is not there is an error.
func Compare(ctx context.Context, fairlead, peer *Runner, c Case) ([]Difference, error) {
	mine, err := fairlead.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer mine.cleanUp(context.WithoutCancel(ctx))
	theirs, err := peer.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer theirs.cleanUp(context.WithoutCancel(ctx))
	var out []Difference
	pairs := pairing{to: map[string]string{}, from: map[string]string{}}
	for i := range c.Steps {
		s := &c.Steps[i]
		a, err := mine.do(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("line %d: fairlead: %w", s.Line, err)
		}
		b, err := theirs.do(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("line %d: kube-apiserver: %w", s.Line, err)
		}
		mine.compare(s, a) // for what the step saves
		theirs.compare(s, b)
		found := explain(s, slices.DeleteFunc(pairs.answers(a, b), ofGeneration(s)))
		for _, e := range s.Explained {
			if !e.Sometimes && !slices.ContainsFunc(found, func(d Difference) bool { return e.Where.MatchString(d.Where) }) {
				return nil, fmt.Errorf("line %d: the servers do not differ in %s", e.Line, e.Where)
			}
		}
		out = append(out, found...)
	}
	return out, nil
}

// ofGeneration returns what reports whether a difference is that the Services of only fairlead have a
// metadata.generation, which is so in each answer to s that has one (docs/compatibility.md).
func ofGeneration(s *Step) func(Difference) bool {
	return func(d Difference) bool {
		return strings.Contains(s.Target, "services") && strings.HasSuffix(d.Where, ".metadata.generation") && d.Peer == text(nil)
	}
}

// explain completes the differences found in the answers to a step.
func explain(s *Step, found []Difference) []Difference {
	for i := range found {
		d := &found[i]
		d.Line, d.Verb, d.Target = s.Line, s.Verb, s.Target
		for _, e := range s.Explained {
			if d.Why == "" && e.Where.MatchString(d.Where) {
				d.Why = e.Why
			}
		}
	}
	return found
}

// pairing is which value of fairlead stands for which of the peer.
type pairing struct{ to, from map[string]string }

func (p pairing) answers(a, b answer) (out []Difference) {
	note := func(where string, x, y any) {
		out = append(out, Difference{Where: where, Fairlead: text(x), Peer: text(y)})
	}
	if a.code != b.code {
		note("code", fmt.Sprint(a.code, " ", message(a)), fmt.Sprint(b.code, " ", message(b)))
		return out
	}
	slices.Sort(a.warnings)
	slices.Sort(b.warnings)
	if !p.same(strings.Join(a.warnings, "; "), strings.Join(b.warnings, "; ")) {
		note("warnings", a.warnings, b.warnings)
	}
	if a.object == nil && b.object == nil {
		if !p.same(string(a.body), string(b.body)) {
			note("body", string(a.body), string(b.body))
		}
		return out
	}
	if a.code == http.StatusUnprocessableEntity {
		sortCauses(a.object)
		sortCauses(b.object)
	}
	p.values("", withoutLevel(a.object), b.object, note)
	return out
}

// podLevel is the annotation that the server writes into each Pod.
const podLevel = "fairlead.dev/pod-security"

// withoutLevel takes podLevel out of a value of JSON, with the maps that hold nothing
// else: it stands in every Pod and in its managed fields.
func withoutLevel(v any) any {
	stripLevel(v)
	return v
}

// stripLevel reports whether v is a map from which something was taken and that is
// empty now.
func stripLevel(v any) bool {
	switch x := v.(type) {
	case map[string]any:
		before := len(x)
		delete(x, podLevel)
		delete(x, "f:"+podLevel)
		for k, inner := range x {
			if stripLevel(inner) {
				delete(x, k)
			}
		}
		_, dot := x["."] // of a map in managed fields
		return len(x) < before && (len(x) == 0 || dot && len(x) == 1)
	case []any:
		for _, inner := range x {
			stripLevel(inner)
		}
	}
	return false
}

// sortCauses makes the order of causes, which comes from maps in places,
// irrelevant. The message repeats them.
func sortCauses(status any) {
	if list, ok := lookup(status, ".details.causes"); ok {
		slices.SortFunc(list.([]any), func(a, b any) int { return strings.Compare(text(a), text(b)) })
	}
}

// sortManagers puts the entries of managedFields, which stand in the order of
// whole seconds, into that of their managers.
func sortManagers(entries []any) {
	key := func(e any) string {
		m, _ := e.(map[string]any)
		return fmt.Sprint(m["manager"], m["operation"], m["subresource"])
	}
	slices.SortFunc(entries, func(a, b any) int { return strings.Compare(key(a), key(b)) })
}

// values compares two values of JSON.
func (p pairing) values(path string, a, b any, note func(string, any, any)) {
	if chosenAnew.MatchString(path) {
		if (a == nil) != (b == nil) {
			note(path, a, b)
		}
		return
	}
	switch x := a.(type) {
	case map[string]any:
		y, ok := b.(map[string]any)
		if !ok {
			break
		}
		for _, k := range keys(x, y) {
			p.values(path+"."+k, x[k], y[k], note)
		}
		return
	case []any:
		y, ok := b.([]any)
		if !ok || len(x) != len(y) {
			break
		}
		if strings.HasSuffix(path, ".managedFields") {
			sortManagers(x)
			sortManagers(y)
		}
		for i := range x {
			p.values(fmt.Sprintf("%s[%d]", path, i), x[i], y[i], note)
		}
		return
	case nil:
		if b == nil {
			return
		}
	default:
		if b != nil && p.same(fmt.Sprint(a), fmt.Sprint(b)) {
			return
		}
	}
	note(path, a, b)
}

// keys are those of both maps, in order.
func keys(a, b map[string]any) []string {
	var out []string
	for k := range a {
		out = append(out, k)
	}
	for k := range b {
		if _, ok := a[k]; !ok {
			out = append(out, k)
		}
	}
	slices.Sort(out)
	return out
}

// chosenAnew are the fields whose values say nothing.
var chosenAnew = regexp.MustCompile(`\.resourceVersion$|\.metadata\.continue$|\.managedFields\[\d+\]\.time$|Timestamp$`)

// chosen are values that a server chooses: UIDs, times, addresses of the
// service ranges, node ports, ends of generated names, ages, resource versions.
var chosen = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}` +
	`|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z|\b10\.96\.\d+\.\d+\b|\bfd00:10:96:[0-9a-f:]+` +
	`|\b3[0-2]\d{3}\b|^\d+s$|-[bcdfghjklmnpqrstvwxz2456789]{5}\b` +
	`|record \(\d+\)|resourceVersion\\*":\\*"\d+`)

// same reports whether two texts are alike but for chosen values, and these stand
// for one another.
func (p pairing) same(a, b string) bool {
	if a == b {
		return true
	}
	if chosen.ReplaceAllString(a, "?") != chosen.ReplaceAllString(b, "?") {
		return false
	}
	x, y := chosen.FindAllString(a, -1), chosen.FindAllString(b, -1)
	for i := range x {
		if strings.HasSuffix(x[i], "s") || strings.HasSuffix(x[i], "Z") {
			continue // an age or a time
		}
		if to, ok := p.to[x[i]]; ok && to != y[i] {
			return false
		}
		if from, ok := p.from[y[i]]; ok && from != x[i] {
			return false
		}
		p.to[x[i]], p.from[y[i]] = y[i], x[i]
	}
	return true
}

// maxText bounds a value in a difference.
const maxText = 1000

func text(v any) string {
	if s, ok := v.(string); ok {
		return clip(fmt.Sprintf("%q", s))
	}
	if v == nil {
		return "nothing"
	}
	data, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return clip(string(data))
}

func clip(s string) string {
	if len(s) > maxText {
		return s[:maxText] + "…"
	}
	return s
}
