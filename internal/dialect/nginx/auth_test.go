package nginx

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/gateway/policy"
)

// The annotations for external authorization lead to a Service.
func TestAuthorization(t *testing.T) {
	defaults := policy.NginxAuth{RedirectParam: "rd", Redirect: "$request_uri"}
	for text, want := range map[string]Auth{
		"auth-url: http://auth": {Service: "auth", Port: 80, Host: "auth", Target: "/", NginxAuth: defaults},
		"auth-url: https://Auth.Other.svc/a/b?c=d": {
			Service: "auth", Namespace: "other", Port: 443, TLS: true, Host: "Auth.Other.svc", Target: "/a/b?c=d", NginxAuth: defaults,
		},
		"auth-url: http://auth.other.svc.cluster.local.:8080/a\nauth-method: HEAD\nauth-response-headers: X-User, x-group": {
			Service: "auth", Namespace: "other", Port: 8080, Host: "auth.other.svc.cluster.local.:8080", Target: "/a", Method: "HEAD",
			Fields: []string{"x-user", "x-group"}, NginxAuth: defaults,
		},
		"auth-url: https://$host/a/../oauth2/auth?x=y": {Own: true, Target: "/oauth2/auth?x=y", NginxAuth: defaults},
		"auth-url: http://$http_host":                  {Own: true, Target: "/", NginxAuth: defaults},
		"auth-url: http://auth\nauth-signin: https://$host/oauth2/start?rd=$escaped_request_uri\nauth-signin-redirect-param: back\n" +
			"auth-request-redirect: $scheme://$http_host/x\nauth-always-set-cookie: true": {
			Service: "auth", Port: 80, Host: "auth", Target: "/", NginxAuth: policy.NginxAuth{
				SignIn: "https://$host/oauth2/start?rd=$escaped_request_uri", RedirectParam: "back", Redirect: "$scheme://$http_host/x",
				AlwaysCookie: true,
			},
		},
	} {
		got := read(text)
		if got.Auth == nil || !reflect.DeepEqual(*got.Auth, want) || got.Closed != "" || len(got.Ignored) > 0 || !got.Protects() {
			t.Errorf("%s: %+v, %s, %v; want %+v", text, got.Auth, got.Closed, got.Ignored, want)
		}
	}
	if got := read("auth-url: \nauth-signin: https://x"); got.Auth != nil || got.Closed != "" || len(got.Ignored) != 1 {
		t.Errorf("without an address: %+v", got)
	}
}

// No request passes by an address outside of the cluster, of whatever form: an authorization server is a Service.
func TestAuthorizationClosed(t *testing.T) {
	for _, to := range []string{
		"http://127.0.0.1/", "http://127.1/", "http://[::1]:80/", "http://[fe80::1%25eth0]/", "http://169.254.169.254/latest/meta-data/",
		"http://[::ffff:169.254.169.254]/", "http://192.0.2.1:10250/", "http://metadata.google.internal/", "https://auth.example.com/check",
		"http://auth.other.svc@169.254.169.254/", "http://169.254.169.254#auth.other.svc", "http://auth.other.svc:0/",
		"http://auth.other.svc:65536/",
		"http://auth.other.svc\\@x/", "http://$host:80/x", "http://$hostx/", "http://$host@evil/", "http://x$host/", "http://$host/a/..;/b",
		"http://$host/$x", "http://$host/#x", "http://$host.evil/", "http://$scheme/", "http://$host/a b", "http://$hosts/",
		"http://auth.other.pod/", "http://a_b.c.svc/", "http://.other.svc/",
		"http://a..svc/",
		"ftp://auth/", "file:///etc/passwd", "/auth", "auth", "//auth/", "http:///x", "gopher://auth/", "unix:/run/x.sock", "http://auth/ x",
	} {
		if r := read("auth-url: " + to); !strings.Contains(r.Closed, "auth-url") || r.Closed == "" {
			t.Errorf("%s: %+v", to, r.Auth)
		}
	}
	for _, more := range []string{
		"auth-method: CONNECT", "auth-method: get", "auth-signin: javascript:alert(1)", "auth-signin: https://${host}/",
		"auth-signin: https://$hostx/", "auth-signin: /$request_uri",
		"auth-signin: //evil/", "auth-signin: $request_uri", "auth-signin-redirect-param: a&b", "auth-request-redirect: $arg_x",
		"auth-response-headers: a b", "auth-response-headers: a:b", "auth-response-headers: " + strings.Repeat("x,", maxNames+1),
		"auth-snippet: x", "auth-signin: ",
	} {
		if r := read("auth-url: http://auth\n" + more); r.Closed == "" {
			t.Errorf("%s: %s", more, fmt.Sprintf("%+v", r.Auth))
		}
	}
}

// The annotations for names and passwords lead to a Secret, and without one no request passes.
func TestBasic(t *testing.T) {
	for text, want := range map[string]Basic{
		"auth-type: basic\nauth-secret: staff":      {Secret: "staff", Realm: "Authentication Required"},
		"auth-type: basic\nauth-secret: team/staff": {Secret: "staff", Namespace: "team", Realm: "Authentication Required"},
		"auth-type: basic\nauth-secret: staff\nauth-secret-type: auth-map\nauth-realm: Authentication Required - foo": {
			Secret: "staff", Map: true, Realm: "Authentication Required - foo",
		},
		"auth-type: basic\nauth-secret: staff\nauth-secret-type: auth-file": {Secret: "staff", Realm: "Authentication Required"},
	} {
		got := read(text)
		if got.Basic == nil || *got.Basic != want || got.Closed != "" || len(got.Ignored) > 0 || !got.Protects() {
			t.Errorf("%s: %+v, %s, %v; want %+v", text, got.Basic, got.Closed, got.Ignored, want)
		}
	}
	for _, text := range []string{
		"auth-type: basic", "auth-secret: s", "auth-type: digest\nauth-secret: s", "auth-type: Basic\nauth-secret: s",
		"auth-type: basic\nauth-secret: ",
		"auth-type: basic\nauth-secret: a/b/c", "auth-type: basic\nauth-secret: a_b", "auth-type: basic\nauth-secret: /s",
		"auth-type: basic\nauth-secret: s\nauth-secret-type: file", "auth-type: basic\nauth-secret: s\nauth-realm: a\"b",
		"auth-type: basic\nauth-secret: s\nauth-realm: a\\b", "auth-type: basic\nauth-secret: s\nauth-realm: " + strings.Repeat("x", 201),
		"auth-type: basic\nauth-secret: s\nsatisfy: some",
	} {
		if r := read(text); r.Closed == "" {
			t.Errorf("%s: %+v", text, r.Basic)
		}
	}
	if r := read("auth-type: \nauth-secret: "); r.Basic != nil || r.Closed != "" {
		t.Errorf("%+v", r)
	}
}
