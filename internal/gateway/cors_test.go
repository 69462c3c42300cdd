package gateway

import (
	"fmt"
	"strings"
	"testing"
)

const corsRoute = plainGateway + `
---
kind: HTTPRoute
metadata: {name: r}
spec:
  parentRefs: [{name: g}]
  rules: [{filters: [{type: CORS, cors: {%s}}], backendRefs: [{name: web, port: 80}]}]`

func corsOf(t *testing.T, spec string) *compiled {
	t.Helper()
	o := objects(t, fmt.Sprintf(corsRoute, spec)+service("web"))
	for _, r := range o.Routes {
		c := compileRoute(o, requests{HTTP: r}, true, false)
		return c
	}
	return nil
}

// What is invalid is refused by its field, and the requests of the rule get no backend.
func TestCORSRefused(t *testing.T) {
	for spec, want := range map[string]string{
		"allowOrigins: ['https://*bar.com']":                                        "allowOrigins[0]",
		"allowOrigins: ['https://a.*.com']":                                         "allowOrigins[0]",
		"allowOrigins: ['https://a', 'a.com']":                                      "allowOrigins[1]",
		"allowOrigins: ['https://a/x']":                                             "allowOrigins[0]",
		"allowMethods: ['A B']":                                                     "allowMethods[0]",
		"allowHeaders: [\"x\\r\\ny\"]":                                              "allowHeaders[0]",
		"exposeHeaders: ['*'], allowCredentials: true, allowOrigins: ['https://a']": "exposeHeaders",
	} {
		c := corsOf(t, spec)
		if !strings.Contains(c.invalid, "rules[0].filters[0].cors."+want) || c.matches[0].Rule.Pick(0) != nil || c.matches[0].Rule.CORS != nil {
			t.Errorf("%s: %q, want %s", spec, c.invalid, want)
		}
	}
}
