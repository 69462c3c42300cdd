package policy

import (
	"strings"
	"testing"
)

// The page says by its beginning what it is. One that is too long has the status in plain text in its place, and never lets requests
// pass. A word for yes or no is no page, and one that could be misspelled is told of.
func TestReadMaintenance(t *testing.T) {
	for value, want := range map[string]string{
		"": "none", "false": "none", " Off ": "none", "true": "plain", "ON": "plain",
		" <h1>Soon</h1>": "text/html; charset=utf-8", `{"error": "soon"}`: "application/json", "[]": "application/json",
		"Back at 10.": "text/plain; charset=utf-8", strings.Repeat("x", MaxPage): "text/plain; charset=utf-8",
		strings.Repeat("x", MaxPage+1): "plain, wrong",
		"no":                           "none, wrong", " 0 ": "none, wrong", "Disabled": "none, wrong",
		"yes": "plain, wrong", "1": "plain, wrong", "y\n": "plain, wrong",
		"flase": "text/plain; charset=utf-8, wrong", "In_work-1": "text/plain; charset=utf-8, wrong",
		"Soon back": "text/plain; charset=utf-8", "Soon.": "text/plain; charset=utf-8", "Wartungsarbeiten": "text/plain; charset=utf-8",
		"準備中": "text/plain; charset=utf-8",
	} {
		m, wrong := ReadMaintenance(value)
		got := "none"
		switch {
		case m != nil && m.Page == nil:
			got = "plain"
		case m != nil:
			if got = m.ContentType; string(m.Page) != value {
				t.Errorf("%.50q: %.50q", value, m.Page)
			}
		}
		if wrong != "" {
			got += ", wrong"
			if !strings.Contains(wrong, "the page has") && !strings.Contains(wrong, "write true or a page") {
				t.Errorf("%.50q: %s", value, wrong)
			}
		}
		if got != want {
			t.Errorf("%.50q: %s, want %s", value, got, want)
		}
	}
}
