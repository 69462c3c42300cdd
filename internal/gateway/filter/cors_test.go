package filter

import (
	"strings"
	"testing"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"
)

func corsOf(t *testing.T, spec string) *CORS {
	t.Helper()
	read := &gwv1.HTTPCORSFilter{}
	if err := yaml.UnmarshalStrict([]byte("{"+spec+"}"), read); err != nil {
		t.Fatal(err)
	}
	c, wrong := ReadCORS(read)
	if wrong != "" {
		t.Fatal(wrong)
	}
	return c
}

// An origin is allowed if it has the scheme, the host and the port of a pattern; one that only looks like it is not.
func TestCORSOrigins(t *testing.T) {
	some := "allowOrigins: ['https://www.foo.com', 'https://*.bar.com', 'http://a.com:8080', 'http://b.com:80']"
	for _, c := range []struct{ spec, origin, want string }{
		{some, "https://www.foo.com", "https://www.foo.com"},
		{some, "https://WWW.foo.com:443", "https://WWW.foo.com:443"},
		{some, "https://x.y.bar.com", "https://x.y.bar.com"},
		{some, "http://a.com:8080", "http://a.com:8080"},
		{some, "http://b.com", "http://b.com"},
		{some, "http://a.com", ""},
		{some, "https://bar.com", ""},
		{some, "https://.bar.com.evil", ""},
		{some, "https://evilbar.com", ""},
		{some, "https://evil.com/.bar.com", ""},
		{some, "https://evil.com#.bar.com", ""},
		{some, "https://evil.com?.bar.com", ""},
		{some, "https://x@y.bar.com", ""},
		{some, "http://www.foo.com", ""},
		{some, "https://www.foo.com:8443", ""},
		{some, "null", ""},
		{"allowOrigins: ['*']", "https://x", "*"},
		{"allowOrigins: ['*']", "null", "*"},
		{"allowOrigins: ['*'], allowCredentials: true", "https://x:1", "https://x:1"},
		{"allowOrigins: ['*'], allowCredentials: true", "null", ""}, // every page in a sandbox
		{"allowOrigins: ['https://*']", "https://x.y", "https://x.y"},
		{"allowMethods: [GET]", "https://x", ""},
	} {
		cors := corsOf(t, c.spec)
		if got := cors.allows(c.origin); got != c.want {
			t.Errorf("%s: %s gets %q, want %q", c.spec, c.origin, got, c.want)
		}
	}
}

func textOfFields(list []Field) string {
	var out []string
	for _, f := range list {
		out = append(out, strings.TrimPrefix(f.Name, "Access-Control-")+"="+f.Value)
	}
	return strings.Join(out, "; ")
}

// A browser gets the lists of the filter, and instead of "*" what it has asked for. Other origins get nothing.
func TestCORSAnswers(t *testing.T) {
	const vary = "Vary=Origin, Access-Control-Request-Method, Access-Control-Request-Headers"
	for _, c := range []struct {
		spec, headers string
		status        int
		want          string
	}{
		{
			"allowOrigins: ['https://a'], allowMethods: [GET, PUT], allowHeaders: [x-a, x-b], exposeHeaders: [x-c], " +
				"allowCredentials: true, maxAge: 60", "x-z", 200,
			"Allow-Origin=https://a; Allow-Credentials=true; Allow-Methods=GET, PUT; Allow-Headers=x-a, x-b; " +
				"Expose-Headers=x-c; Max-Age=60",
		},
		{
			"allowOrigins: ['*'], allowMethods: ['*'], allowHeaders: ['*']", "x-z",
			200, "Allow-Origin=*; Allow-Methods=PUT; Allow-Headers=x-z; Max-Age=5",
		},
		{"allowOrigins: ['*'], allowHeaders: ['*']", "x\r\nevil: 1", 200, "Allow-Origin=*; Max-Age=5"},
		{"allowOrigins: ['*'], allowHeaders: ['*']", strings.Repeat("x", MaxInput+1), 200, "Allow-Origin=*; Max-Age=5"},
		{"allowOrigins: ['https://b']", "", 403, ""},
	} {
		cors := corsOf(t, c.spec)
		status, fields := cors.Preflight("https://a", "PUT", c.headers)
		want := strings.TrimSuffix(vary+"; "+c.want, "; ")
		if got := textOfFields(fields); status != c.status || got != want {
			t.Errorf("%s: %d %s, want %d %s", c.spec, status, got, c.status, want)
		}
	}
	cors := corsOf(t, "allowOrigins: ['https://a'], exposeHeaders: [x-c], allowCredentials: true")
	for origin, want := range map[string]string{
		"https://a": "Vary=Origin; Allow-Origin=https://a; Allow-Credentials=true; Expose-Headers=x-c",
		"https://b": "Vary=Origin", "": "Vary=Origin",
	} {
		if m := cors.Answer(origin); textOfFields(m.Add) != want || len(m.Remove) != len(corsFields) {
			t.Errorf("%q: %+v, want %s", origin, m, want)
		}
	}
}
