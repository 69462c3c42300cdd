package policy

import (
	"strings"
	"testing"
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"
)

func sessionOf(t *testing.T, text string) (*Session, string) {
	t.Helper()
	spec := &gwv1.SessionPersistence{}
	if err := yaml.UnmarshalStrict([]byte(text), spec); err != nil {
		t.Fatal(err)
	}
	return ReadSession(spec)
}

func TestSession(t *testing.T) {
	for text, want := range map[string]Session{
		"{}":                                   {},
		"{type: Cookie, sessionName: a-b_c.d}": {Name: "a-b_c.d"},
		"{type: Header, sessionName: X-S, absoluteTimeout: 1h30m}":                   {Header: true, Name: "X-S", Absolute: 90 * time.Minute},
		"{absoluteTimeout: 1m, cookieConfig: {lifetimeType: Permanent}}":             {Absolute: time.Minute, Permanent: true},
		"{type: Cookie, absoluteTimeout: 1m, cookieConfig: {lifetimeType: Session}}": {Absolute: time.Minute},
	} {
		if got, wrong := sessionOf(t, text); wrong != "" || *got != want {
			t.Errorf("%s: %+v, %s", text, got, wrong)
		}
	}
}

// What is invalid is refused by its field: above all names that would begin another field, or another attribute of a cookie.
func TestSessionRefused(t *testing.T) {
	for text, want := range map[string]string{
		"{type: IP}":                                            "type: ",
		`{sessionName: "a; Domain=example.com"}`:                "sessionName: ",
		`{sessionName: "a=b"}`:                                  "sessionName: ",
		`{type: Header, sessionName: "X\r\nEvil"}`:              "sessionName: ",
		"{type: Header, sessionName: Set-Cookie}":               "sessionName: ",
		"{absoluteTimeout: 10ms}":                               "absoluteTimeout: ",
		"{absoluteTimeout: 1d}":                                 "absoluteTimeout: ",
		"{cookieConfig: {lifetimeType: Permanent}}":             "absoluteTimeout: ",
		"{cookieConfig: {lifetimeType: Forever}}":               "cookieConfig.lifetimeType: ",
		"{type: Header, cookieConfig: {lifetimeType: Session}}": "cookieConfig: ",
	} {
		if _, wrong := sessionOf(t, text); !strings.HasPrefix(wrong, want) {
			t.Errorf("%s: %q", text, wrong)
		}
	}
}
