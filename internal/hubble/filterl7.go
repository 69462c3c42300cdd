package hubble

import (
	"fmt"
	"net/url"
	"regexp"
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

// maxExpression bounds a regular expression of a filter, in bytes: each is compared with every flow.
const maxExpression = 1000

// expressions matches flows whose text, which is not empty, has a part that matches one of the regular expressions of the filter.
func expressions(want func(*flow.FlowFilter) []string, of func(*flow.Flow) string) matcher {
	return func(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
		var all []*regexp.Regexp
		for _, text := range want(f) {
			if len(text) > maxExpression {
				return nil, fmt.Errorf("a regular expression has %d bytes; want %d at most", len(text), maxExpression)
			}
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
