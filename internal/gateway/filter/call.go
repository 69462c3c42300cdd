package filter

import (
	"fmt"
	"regexp"
	"strings"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
)

// Call is what a match of a GRPCRoute asks of the path of a request, which is /SERVICE/METHOD. An empty text is for every one.
type Call struct {
	Service, Method           string
	serviceRegex, methodRegex *regexp.Regexp // instead of the texts
}

// SplitCall returns the service and the method that a path names. ok is false if it names none.
func SplitCall(path string) (service, method string, ok bool) {
	service, method, ok = strings.Cut(path[1:], "/")
	return service, method, ok && service != "" && method != "" && !strings.Contains(method, "/")
}

// Matches returns what is asked of the service and of the method, without names.
func (c *Call) Matches() []Match {
	return []Match{{Value: c.Service, Regex: c.serviceRegex}, {Value: c.Method, Regex: c.methodRegex}}
}

// HasRegex reports whether the match has a regular expression.
func (c *Call) HasRegex() bool { return c.serviceRegex != nil || c.methodRegex != nil }

// Takes reports whether the regular expressions are for a service and a method.
func (c *Call) Takes(service, method string) bool {
	return (c.serviceRegex == nil || len(service) <= MaxInput && c.serviceRegex.MatchString(service)) &&
		(c.methodRegex == nil || len(method) <= MaxInput && c.methodRegex.MatchString(method))
}

// Read reads the method of a match. regex compiles the text of a field, and tells the user what is wrong with it if it returns nil. ok is
// false if the match is invalid: it then takes no call. wrong is what a message about it has behind the path of the field, "" if
// regex has told it.
func (c *Call) Read(spec *gwv1.GRPCMethodMatch, regex func(text, field string) *regexp.Regexp) (ok bool, wrong string) {
	if spec == nil {
		return true, ""
	}
	if spec.Service != nil {
		c.Service = *spec.Service
	}
	if spec.Method != nil {
		c.Method = *spec.Method
	}
	if c.Service == "" && c.Method == "" {
		return false, ": service and method are both missing"
	}
	kind := gwv1.GRPCMethodMatchExact
	if spec.Type != nil {
		kind = *spec.Type
	}
	switch kind {
	case gwv1.GRPCMethodMatchExact:
		for _, name := range []string{c.Service, c.Method} {
			if canonical, ok := hostpath.Path("/" + name); name != "" && (!ok || canonical != "/"+name || strings.Contains(name, "/")) {
				return false, fmt.Sprintf(": %.100q is no name of a service or of a method", name)
			}
		}
	case gwv1.GRPCMethodMatchRegularExpression:
		if c.Service != "" {
			c.serviceRegex = regex(c.Service, ".service")
		}
		if c.Method != "" {
			c.methodRegex = regex(c.Method, ".method")
		}
		return (c.Service == "" || c.serviceRegex != nil) && (c.Method == "" || c.methodRegex != nil), ""
	default:
		return false, ".type: want Exact or RegularExpression"
	}
	return true, ""
}
