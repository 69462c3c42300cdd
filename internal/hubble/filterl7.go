package hubble

import (
	"fmt"
	"net/url"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
)

// l7Fields are the makers of filters by the fields of FlowFilter that only requests and answers have.
func l7Fields() map[string]matcher {
	type ff = *flow.FlowFilter
	type mf = *flow.Flow
	address := func(m mf) string { return m.GetL7().GetHttp().GetUrl() }
	return map[string]matcher{
		"http_status_code": statusCodes,
		"http_method":      methods,
		"http_url":         expressions(ff.GetHttpUrl, address),
		"http_path":        expressions(ff.GetHttpPath, func(m mf) string { return pathOf(address(m)) }),
		"dns_query":        expressions(ff.GetDnsQuery, func(m mf) string { return m.GetL7().GetDns().GetQuery() }),
	}
}

func pathOf(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return ""
	}
	return u.Path
}

var wantedStatus = regexp.MustCompile(`^([1-5][0-9]{2}|[1-5][0-9]?\+)$`) //nolint:gochecknoglobals // constant

// statusCodes matches answers by codes such as 404, and by their beginnings such as 5+.
func statusCodes(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
	for _, text := range f.GetHttpStatusCode() {
		if !wantedStatus.MatchString(text) {
			return nil, fmt.Errorf("%q is not a status such as 404, or the beginning of one such as 4+ or 50+", text)
		}
	}
	return func(m *flow.Flow) bool {
		code := m.GetL7().GetHttp().GetCode()
		return code > 0 && slices.ContainsFunc(f.GetHttpStatusCode(), func(want string) bool {
			begin, isBegin := strings.CutSuffix(want, "+")
			have := strconv.Itoa(int(code))
			return have == want || isBegin && strings.HasPrefix(have, begin)
		})
	}, nil
}

func methods(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
	return func(m *flow.Flow) bool {
		have := m.GetL7().GetHttp().GetMethod()
		return have != "" && slices.ContainsFunc(f.GetHttpMethod(), func(want string) bool { return strings.EqualFold(want, have) })
	}, nil
}

const (
	// maxExpression bounds a regular expression of a filter, in bytes: each is compared with every flow.
	maxExpression = 1000
	// maxProgram bounds what an expression is compiled to, in instructions, and maxPrograms all expressions of a request together.
	// 20 bytes can ask for a million of them: "(?:.{1000}){1000}".
	maxProgram  = 1000
	maxPrograms = 10 * maxProgram
)

// programs returns about how many instructions the regular expressions of a filter compile to. It compiles none of them. The error
// goes on the name of the filter.
func programs(f *flow.FlowFilter) (int, error) {
	all := 0
	for _, field := range []struct {
		name  string
		texts []string
	}{{"http_url", f.GetHttpUrl()}, {"http_path", f.GetHttpPath()}, {"dns_query", f.GetDnsQuery()}} {
		for _, text := range field.texts {
			n, err := programOf(text)
			if err != nil {
				return 0, fmt.Errorf(".%s: %w", field.name, err)
			}
			all += n
		}
	}
	return all, nil
}

func programOf(text string) (int, error) {
	if len(text) > maxExpression {
		return 0, fmt.Errorf("a regular expression has %d bytes; want %d at most", len(text), maxExpression)
	}
	tree, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return 0, fmt.Errorf("%q is not a regular expression: %w", text, err)
	}
	n := 2 + instructions(tree) // the first one, and the match
	if n > maxProgram {
		return 0, fmt.Errorf("%q compiles to more than %d instructions; write a simpler regular expression", text, maxProgram)
	}
	return n, nil
}

// instructions returns at least as many instructions as package regexp/syntax compiles an expression to. The parser bounds repetitions
// of repetitions, so it does not overflow.
func instructions(e *syntax.Regexp) int {
	n := 0
	for _, sub := range e.Sub {
		n += instructions(sub)
	}
	switch e.Op {
	case syntax.OpRepeat: // x{2,4} is xx(?:x(?:x)?)?, and x{2,} is xx+
		n = n*max(e.Min, e.Max, 1) + max(e.Max-e.Min, 1)
	case syntax.OpLiteral:
		n = len(e.Rune)
	case syntax.OpCharClass:
		n = 1 + len(e.Rune)/10 // its runes are beside the instruction, which is as large as ten of them
	case syntax.OpAlternate:
		n += len(e.Sub)
	case syntax.OpCapture, syntax.OpStar: // (x*)* is (?:(x*)+)?
		n += 2
	case syntax.OpPlus, syntax.OpQuest:
		n++
	default:
	}
	return max(n, 1)
}

// expressions matches flows whose text, which is not empty, has a part that matches one of the regular expressions of the filter.
func expressions(want func(*flow.FlowFilter) []string, of func(*flow.Flow) string) matcher {
	return func(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
		var all []*regexp.Regexp
		for _, text := range want(f) {
			e, err := regexp.Compile(text)
			if err != nil {
				return nil, fmt.Errorf("%q is not a regular expression: %w", text, err)
			}
			all = append(all, e)
		}
		return func(m *flow.Flow) bool {
			have := of(m)
			return have != "" && slices.ContainsFunc(all, func(e *regexp.Regexp) bool { return e.MatchString(have) })
		}, nil
	}
}
