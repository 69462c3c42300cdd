package nginx

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/policy"
)

// read reads annotations "name: value", one a line.
func read(text string) *Options {
	all := map[string]string{"other.example.com/auth-url": "x"}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(line, ": "); ok {
			all[Prefix+strings.TrimSpace(name)] = strings.TrimSuffix(value, "\n")
		}
	}
	return Read(all)
}

// The examples of the documentation
// (https://kubernetes.github.io/ingress-nginx/user-guide/nginx-configuration/annotations/) are read as they are.
func TestDocumentedExamples(t *testing.T) {
	yes := true
	for text, want := range map[string]Options{
		"":                                     {},
		"rewrite-target: /$2\nuse-regex: true": {RewriteTarget: "/$2", UseRegex: true},
		"app-root: /app1":                      {AppRoot: "/app1"},
		"default-backend: sorry-page":          {DefaultBackend: "sorry-page"},
		"default-backend: errors\ncustom-http-errors: 404,503": {
			DefaultBackend: "errors", Errors: &policy.Errors{Codes: []int{404, 503}}},
		"default-backend: errors\ncustom-http-errors: 502, 502,\ndisable-proxy-intercept-errors: true": {
			DefaultBackend: "errors", Errors: &policy.Errors{Codes: []int{502}, Own: true}},
		"ssl-redirect: true\nforce-ssl-redirect: 1":                           {SSLRedirect: &yes, ForceSSL: true},
		"permanent-redirect: https://www.google.com":                          {Redirect: &Redirect{"https://www.google.com", 301}},
		"temporal-redirect: https://www.google.com":                           {Redirect: &Redirect{"https://www.google.com", 302}},
		"temporal-redirect: /x\npermanent-redirect: /":                        {Redirect: &Redirect{"/x", 302}},
		"permanent-redirect: https://a.b/c?d=e\npermanent-redirect-code: 308": {Redirect: &Redirect{"https://a.b/c?d=e", 308}},
		"from-to-www-redirect: true":                                          {WWW: true},
		"server-alias: a.example.com, *.B.example.com":                        {Aliases: []string{"a.example.com", "*.b.example.com"}},
		"backend-protocol: GRPCS":                                             {Backend: Backend{TLS: true, GRPC: true}},
		"proxy-body-size: 8m":                                                 {Body: 8 << 20},
		"proxy-body-size: 0":                                                  {},
		"proxy-body-size: 512K":                                               {Body: 512 << 10},
		"proxy-read-timeout: 3600\nproxy-send-timeout: 60":                    {Timeout: time.Hour},
		"upstream-vhost: In.example.com":                                      {BackendHost: "in.example.com"},
		"rewrite-target: /\nx-forwarded-prefix: /path":                        {RewriteTarget: "/", ForwardedPrefix: "/path"},
		"proxy-next-upstream: error timeout http_502\nproxy-next-upstream-tries: 2\nproxy-next-upstream-timeout: 5": {
			Retry: &gwv1.HTTPRouteRetry{Codes: []gwv1.HTTPRouteRetryStatusCode{502}, Attempts: new(1)}, RetryWithin: 5 * time.Second},
		"proxy-next-upstream: off\nproxy-next-upstream-tries: 5": {Retry: &gwv1.HTTPRouteRetry{Attempts: new(0)}},
		"proxy-next-upstream-timeout: 5":                         {Retry: &gwv1.HTTPRouteRetry{Attempts: new(2)}, RetryWithin: 5 * time.Second},
		"proxy-next-upstream-tries: 0":                           {Retry: &gwv1.HTTPRouteRetry{Attempts: new(9)}},
		"canary: true\ncanary-by-header: X-Canary\ncanary-by-cookie: c\ncanary-weight: 30": {
			Canary: &Canary{Header: "x-canary", Cookie: "c", Weight: 30, Total: 100}},
		"canary: true\ncanary-weight: 500\ncanary-weight-total: 300": {Canary: &Canary{Weight: 300, Total: 300}},
		"limit-rps: 5\nlimit-rpm: 300":                               {PerSecond: 5, PerMinute: 300, Burst: 5},
		"limit-connections: 5":                                       {AtATime: 5},
		"limit-rpm: 30\nlimit-burst-multiplier: 2":                   {PerMinute: 30, Burst: 2},
		"affinity: cookie":                                           {Session: &policy.Session{Name: "INGRESSCOOKIE"}},
		"affinity: cookie\nsession-cookie-name: route\nsession-cookie-expires: 172800\nsession-cookie-max-age: 172800\n" +
			"session-cookie-samesite: none\nsession-cookie-path: /a\nsession-cookie-domain: .example.com": {
			Session: &policy.Session{
				Name: "route", Path: "/a", Domain: "example.com", SameSite: "None", Secure: true, Absolute: 48 * time.Hour, Permanent: true,
			}},
		"enable-cors: true\ncors-allow-origin: https://origin-site.com:4443, http://*.origin-site.com\n" +
			"cors-allow-methods: PUT, GET\ncors-allow-headers: X-app123-XPTO\ncors-expose-headers: *, X-A\ncors-max-age: 600": {
			CORS: &gwv1.HTTPCORSFilter{
				AllowOrigins: []gwv1.CORSOrigin{"https://origin-site.com:4443", "http://*.origin-site.com"},
				AllowMethods: []gwv1.HTTPMethodWithWildcard{"PUT", "GET"}, AllowHeaders: []gwv1.HTTPHeaderName{"X-app123-XPTO"},
				ExposeHeaders: []gwv1.HTTPHeaderName{"X-A"}, AllowCredentials: new(true), MaxAge: 600,
			}},
	} {
		got := read(text)
		if want.Aliases == nil && len(got.Ignored) > 0 || !reflect.DeepEqual(*got, want) {
			t.Errorf("%s: %+v, want %+v", text, *got, want)
		}
	}
	r := read("whitelist-source-range: 10.0.0.0/24,172.10.0.1\ndenylist-source-range: 2001:db8::/32")
	if len(r.Allow) != 2 || r.Allow[1].String() != "172.10.0.1/32" || len(r.Deny) != 1 || r.Closed != "" {
		t.Errorf("%+v", r)
	}
	// Every origin and credentials: ingress-nginx sends what browsers refuse, so no page may use sessions here either.
	if c := read("enable-cors: true").CORS; *c.AllowCredentials || c.AllowOrigins[0] != "*" || c.MaxAge != 1728000 ||
		len(c.AllowMethods) != 6 {
		t.Errorf("%+v", c)
	}
	for _, origins := range []string{
		"null, x y", strings.Repeat("https://a.b,", maxNames+1), "https://" + strings.Repeat("a", maxList), "https://a.b\x00", "",
	} {
		c := Read(map[string]string{Prefix + "enable-cors": "true", Prefix + "cors-allow-origin": origins}).CORS
		if len(c.AllowOrigins) != 0 {
			t.Errorf("without a valid origin: %+v", c)
		}
	}
	long := "https://" + strings.Repeat("a", maxValue) + ".example.com"
	lines := Read(map[string]string{Prefix + "enable-cors": "true", Prefix + "cors-allow-origin": "https://a.b,\n" + long}).CORS
	if len(lines.AllowOrigins) != 2 {
		t.Errorf("with two lines: %+v", lines)
	}
	r = read("allowlist-source-range: 10.0.0.0/8\nwhitelist-source-range: 0.0.0.0/0")
	if len(r.Allow) != 1 || r.Allow[0].String() != "10.0.0.0/8" || len(r.Ignored) != 1 {
		t.Errorf("%+v", r)
	}
}

// Who asks for protection is not served without it: by an annotation that is not served, by one with a typing error, and by one
// whose value cannot be done. What asks for nothing closes nothing.
func TestProtectionClosed(t *testing.T) {
	for _, text := range []string{
		"auth-url: http://x.example.com", "auth-type: basic", "auth-secret: s", "auth-tls-secret: default/ca", "enable-modsecurity: true",
		"limit-rate: 5",
		"limit-connections: many", "limit-connections: -1",
		"configuration-snippet: deny all;", "server-snippet: x", "satisfy: some", "ssl-passthrough: true",
		"proxy-ssl-verify: on", "whitelist-source-ranges: 10.0.0.0/8", "auth-urls: x", "limit-rbs: 1", "denylist: 10.0.0.0/8",
		"Auth-URL: x", "enable-waf: true", "auth-url: all", "auth-type: off", "auth-secret: false", "auth-tls-secret: 0",
		"whitelist-source-range: ", "whitelist-source-range: 10.0.0.0/33", "whitelist-source-range: 10.0.0.1, x", "denylist-source-range: x",
		"whitelist-source-range: ::ffff:10.0.0.0/104", "denylist-source-range: fe80::1%eth0",
		"whitelist-source-range: " + strings.Repeat("10.0.0.1,", maxRanges+1), "denylist-source-range: " + strings.Repeat("1", maxList+1),
		"ssl-redirect: yes", "force-ssl-redirect: on", "use-regex: x", "backend-protocol: FCGI", "upstream-vhost: $host",
		"limit-rps: many", "limit-rps: 5\nlimit-whitelist: x", "canary: maybe", "canary: true\ncanary-weight: -1",
	} {
		if r := read(text); !strings.HasPrefix(r.Closed, "annotation "+Prefix) || len(r.Closed) > 400 {
			t.Errorf("%.80s: %.500q", text, r.Closed)
		}
	}
	for _, text := range []string{
		"auth-realm: x", "auth-secret-type: auth-map", "auth-signin: https://x",
		"enable-modsecurity: false", "limit-rate: 0", "proxy-ssl-verify: off", "auth-tls-verify-client: off",
		"proxy-buffering: on", "load-balance: ewma", "custom-http-errors: 404", "proxy-read-timeout: 60s", "app-root: x", "some-new-one: 1",
		"canary-weight: 10", "cors-allow-origin: https://x", "session-cookie-name: x",
	} {
		r := read(text)
		if r.Closed != "" {
			t.Errorf("%s: %s", text, r.Closed)
		}
		off := strings.HasSuffix(text, "false") || strings.HasSuffix(text, "0") || strings.HasSuffix(text, ": off")
		if len(r.Ignored) != 1 && !off {
			t.Errorf("%s: %q", text, r.Ignored)
		}
	}
	for text, any := range map[string]bool{"satisfy: any": true, "satisfy: all": false, "satisfy: ": false} {
		if r := read(text); r.Any != any || r.Closed != "" || len(r.Ignored) > 0 {
			t.Errorf("%s: %+v", text, r)
		}
	}
	if r := read("proxy-body-size: much"); r.Body != 1<<20 || len(r.Ignored) != 1 {
		t.Errorf("%+v", r)
	}
}

// The flags are read as ingress-nginx reads them.
func TestFlags(t *testing.T) {
	flags := map[string]func(*Options) bool{
		"use-regex": func(o *Options) bool { return o.UseRegex }, "force-ssl-redirect": func(o *Options) bool { return o.ForceSSL },
		"ssl-redirect":         func(o *Options) bool { return o.SSLRedirect != nil && *o.SSLRedirect },
		"from-to-www-redirect": func(o *Options) bool { return o.WWW },
		"enable-cors":          func(o *Options) bool { return o.CORS != nil },
		"canary":               func(o *Options) bool { return o.Canary != nil },
		"affinity: cookie\nsession-cookie-secure":                              func(o *Options) bool { return o.Session.Secure },
		"enable-cors: 1\ncors-allow-origin: https://a\ncors-allow-credentials": func(o *Options) bool { return *o.CORS.AllowCredentials },
		"enable-global-auth": func(o *Options) bool { return o.Closed != "" },
		"enable-modsecurity": func(o *Options) bool { return o.Closed != "" },
		"ssl-passthrough":    func(o *Options) bool { return o.ClosedHost },
	}
	if c := read("enable-cors: 1\ncors-allow-origin: https://a\ncors-allow-credentials: no").CORS; *c.AllowCredentials {
		t.Error("credentials without a valid flag")
	}
	for name, is := range flags {
		for _, value := range []string{"1", "true", "True", "t", "0", "false", "False", "f"} {
			if got, want := is(read(name+": "+value)), strings.ContainsAny(value[:1], "1tT"); got != want {
				t.Errorf("%s: %s: %v", name, value, got)
			}
		}
	}
	for text, want := range map[string]bool{
		"auth-tls-secrets: a/b": true, "auth-tsl-secret: a/b": true, "Auth-TLS-Secret: x": true, "server-snipet: x": true,
		"ssl-passtrough: 1": true,
		"stream_snippet: x": true, "auth-tls-secre: false": true, "auth-urls: x": false, "auth-tls-verify-dept: 1": false,
		"auth-tls-secret: a/b": true, "server-snippet: x": true, "stream-snippet: x": true, "auth-url: x": false, "auth-tls-secret: ": false,
	} {
		if got := read(text).ClosedHost; got != want {
			t.Errorf("%s: the host is closed: %v", text, got)
		}
	}
}

// No value ends a line, names a variable of nginx, or goes on without a bound.
func TestHostileValues(t *testing.T) {
	for name := range annotations {
		for _, value := range []string{
			"/a\r\nSet-Cookie: x=y", "https://a/\r\nX: y", "a\x00b", "/\x7f", strings.Repeat("a", 200<<10), "https://a/$request_uri", "/a b",
		} {
			all := map[string]string{
				Prefix + "enable-cors": "true", Prefix + "affinity": "cookie", Prefix + "canary": "true", Prefix + "rewrite-target": "/x",
				Prefix + "auth-url": "http://auth", Prefix + "permanent-redirect": "/p", Prefix + "temporal-redirect": "/t", Prefix + name: value,
			}
			r := Read(all)
			for _, text := range []string{
				r.RewriteTarget, r.AppRoot, r.ForwardedPrefix, r.BackendHost, strings.Join(r.Aliases, ""), strings.Join(r.Ignored, ""), r.Closed,
			} {
				if strings.ContainsAny(text, "\r\n\x00\x7f") || len(text) > 2000 {
					t.Errorf("%s: %.300q", name, text)
				}
			}
			if d := r.Redirect; d != nil && strings.ContainsAny(d.URL, "\r\n\x00 $") {
				t.Errorf("%s: %q", name, d.URL)
			}
			if s := r.Session; s != nil && strings.ContainsAny(s.Name+s.Path+s.Domain+s.SameSite, "\r\n\x00; $") {
				t.Errorf("%s: %+v", name, s)
			}
			if c := r.CORS; c != nil {
				if lists := fmt.Sprint(c.AllowOrigins, c.AllowMethods, c.AllowHeaders, c.ExposeHeaders); strings.ContainsAny(lists, "\r\n\x00;$") {
					t.Errorf("%s: %+v", name, c)
				}
			}
			if a := r.Auth; a != nil && strings.ContainsAny(fmt.Sprintf("%+v", *a), "\r\n\x00") {
				t.Errorf("%s: %+v", name, a)
			}
			if c := r.Canary; c != nil && strings.ContainsAny(c.Header+c.Value+c.Cookie, "\r\n\x00") {
				t.Errorf("%s: %+v", name, c)
			}
		}
	}
	for _, to := range []string{"//evil.example.com", "javascript:alert(1)", "ftp://x", "https://", "https://u:p@x", "x", ""} {
		if r := read("permanent-redirect: " + to); r.Redirect != nil || r.Closed == "" {
			t.Errorf("%q: %+v", to, r)
		}
	}
}

// Codes that cannot be done replace nothing, and so does a list without a default backend: Ignored tells why.
func TestErrorsWithoutEffect(t *testing.T) {
	many := "custom-http-errors: " + strings.Repeat("404,", 10_000)
	for _, text := range []string{
		"custom-http-errors: 404", "default-backend: other/errors\ncustom-http-errors: 404", "default-backend: e\ncustom-http-errors: 200",
		"default-backend: e\ncustom-http-errors: 404,600", "default-backend: e\ncustom-http-errors: 404,399",
		"default-backend: e\ncustom-http-errors: 4xx", "default-backend: e\ncustom-http-errors: ,",
		"default-backend: e\ncustom-http-errors: -404",
		"default-backend: e\ncustom-http-errors: 99999999999999999999", "default-backend: e\n" + many,
		"default-backend: e\ndisable-proxy-intercept-errors: true",
	} {
		if r := read(text); r.Errors != nil || r.Closed != "" || len(r.Ignored) != 1 || len(r.Ignored[0]) > 400 {
			t.Errorf("%.80s: %+v, %q", text, r.Errors, r.Ignored)
		}
	}
	if r := read("default-backend: e\ncustom-http-errors: 404,600"); !strings.Contains(r.Ignored[0], `"600" is not a status from 400 to 599`) {
		t.Error(r.Ignored)
	}
}

// The document has every annotation.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile("../../../docs/ingress.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range Names() {
		if !strings.Contains(string(text), "`"+name+"`") {
			t.Errorf("docs/ingress.md does not have %s", name)
		}
	}
}

// Annotations that may send clients to another place are known, with a value that asks for it.
func TestRedirectsOf(t *testing.T) {
	for text, want := range map[string]bool{
		"permanent-redirect=https://a.example": true, "temporal-redirect=/x": true, "app-root=/app": true, "from-to-www-redirect=true": true,
		"from-to-www-redirect=false": false, "app-root=": false, "permanent-redirect-code=308": false, "force-ssl-redirect=true": false,
	} {
		name, value, _ := strings.Cut(text, "=")
		if got := Redirects(map[string]string{"app-root": "/of-another-prefix", Prefix + name: value}); got != want {
			t.Errorf("%s: %t", text, got)
		}
	}
}
