package filter

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// CORS lists which web pages of other origins may use a rule (https://fetch.spec.whatwg.org/#http-cors-protocol).
type CORS struct {
	origins     []origin
	credentials bool
	methods     []string
	headers     []string
	expose      string
	maxAge      string
}

// origin is a pattern of origins.
type origin struct {
	scheme string // "" for every origin
	host   string // in lower case; one that begins with "*" is for every name with what follows
	port   string
}

// Preflight returns the status and the fields of the answer to the question whether a page of an origin may send a request of
// a method with some header fields.
func (c *CORS) Preflight(from, method, headers string) (status int, fields []Field) {
	fields = []Field{{"Vary", "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"}}
	allowed := c.allows(from)
	if allowed == "" {
		return 403, fields
	}
	add := func(name, value string) {
		if value != "" {
			fields = append(fields, Field{name, value})
		}
	}
	add("Access-Control-Allow-Origin", allowed)
	if c.credentials {
		add("Access-Control-Allow-Credentials", "true")
	}
	add("Access-Control-Allow-Methods", echoes(c.methods, method))
	add("Access-Control-Allow-Headers", echoes(c.headers, headers))
	add("Access-Control-Expose-Headers", c.expose)
	add("Access-Control-Max-Age", c.maxAge)
	return 200, fields
}

// Answer returns what an answer to a request of an origin, "" without one, tells the browser. It replaces what the backend
// says: a browser takes no answer with two opinions.
func (c *CORS) Answer(from string) Modifier {
	m := Modifier{Add: []Field{{"Vary", "Origin"}}, Remove: corsFields}
	allowed := ""
	if from != "" {
		allowed = c.allows(from)
	}
	if allowed == "" {
		return m
	}
	m.Add = append(m.Add, Field{"Access-Control-Allow-Origin", allowed})
	if c.credentials {
		m.Add = append(m.Add, Field{"Access-Control-Allow-Credentials", "true"})
	}
	if c.expose != "" {
		m.Add = append(m.Add, Field{"Access-Control-Expose-Headers", c.expose})
	}
	return m
}

var corsFields = []string{
	"Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Access-Control-Allow-Methods", "Access-Control-Allow-Headers",
	"Access-Control-Expose-Headers", "Access-Control-Max-Age",
}

// echoes returns a list for a browser; instead of "*", which means nothing with credentials, it has what was asked for.
func echoes(list []string, asked string) string {
	if !slices.Contains(list, "*") {
		return strings.Join(list, ", ")
	}
	if len(asked) > MaxInput || !ValidField("x", asked) {
		return ""
	}
	return asked
}

// allows returns the value of Access-Control-Allow-Origin for an origin, "" if it is not allowed. The origin null is that of
// every page in a sandbox, so it never gets credentials.
func (c *CORS) allows(from string) string {
	o, err := parseOrigin(from)
	for i := range c.origins {
		switch p := &c.origins[i]; {
		case p.scheme == "" && !c.credentials:
			return "*"
		case err == nil && p.takes(&o):
			return from
		}
	}
	return ""
}

func (p *origin) takes(o *origin) bool {
	if p.scheme == "" {
		return true
	}
	if p.scheme != o.scheme || p.port != o.port {
		return false
	}
	if rest, is := strings.CutPrefix(p.host, "*"); is {
		return strings.HasSuffix(o.host, rest) && len(o.host) > len(rest)
	}
	return p.host == o.host
}

// parseOrigin reads scheme://host or scheme://host:port. A port that a scheme has anyway is left out.
func parseOrigin(text string) (o origin, err error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return o, err
	case u.Scheme == "" || u.Host == "" || u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" || u.Opaque != "":
		return o, fmt.Errorf("%.100q is no origin", text)
	}
	o = origin{scheme: u.Scheme, host: strings.ToLower(u.Hostname()), port: u.Port()}
	if n := wellKnownPort(o.scheme); n != 0 && o.port == strconv.Itoa(int(n)) {
		o.port = ""
	}
	return o, nil
}

// ReadCORS reads a filter of type CORS. wrong names the first invalid field.
func ReadCORS(spec *gwv1.HTTPCORSFilter) (c *CORS, wrong string) {
	fail := func(format string, args ...any) {
		if wrong == "" {
			wrong = fmt.Sprintf(format, args...)
		}
	}
	c = &CORS{credentials: spec.AllowCredentials != nil && *spec.AllowCredentials, maxAge: "5"}
	if spec.MaxAge > 0 {
		c.maxAge = strconv.Itoa(int(spec.MaxAge))
	}
	for i, text := range spec.AllowOrigins {
		if text == "*" {
			c.origins = append(c.origins, origin{})
			continue
		}
		o, err := parseOrigin(string(text))
		rest := strings.TrimPrefix(o.host, "*")
		if err != nil || strings.Contains(rest, "*") || rest != o.host && rest != "" && rest[0] != '.' {
			fail("allowOrigins[%d]: want *, or a scheme and a host, which may begin with *., as https://*.example.com", i)
		}
		c.origins = append(c.origins, o)
	}
	for i, m := range spec.AllowMethods {
		if !ValidField(string(m), "x") {
			fail("allowMethods[%d]: want the name of a method", i)
		}
		c.methods = append(c.methods, string(m))
	}
	names := func(field string, list []gwv1.HTTPHeaderName) (out []string) {
		for i, h := range list {
			if !ValidField("x-"+string(h), "x") {
				fail("%s[%d]: want the name of a field", field, i)
			}
			out = append(out, string(h))
		}
		return out
	}
	c.headers = names("allowHeaders", spec.AllowHeaders)
	c.expose = strings.Join(names("exposeHeaders", spec.ExposeHeaders), ", ")
	if c.credentials && c.expose == "*" {
		fail("exposeHeaders: with allowCredentials, * is the name of a field for browsers; want the names")
	}
	return c, wrong
}
