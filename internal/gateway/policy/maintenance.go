package policy

import (
	"fmt"
	"strings"
)

// MaxPage is how long the page of a Maintenance may be, in bytes. An object has 256 KiB for all of its annotations.
const MaxPage = 64 << 10

// Maintenance is the answer to all requests of a route whose owner works at what is behind it. It does not change.
type Maintenance struct {
	// Page is nil for the text of the status, without a ContentType.
	Page        []byte
	ContentType string
}

// maxWord is how long a page of one word is, in bytes, that could be a slip of the pen.
const maxWord = 10

// want is what is written in place of a value that is none.
const want = "write true or a page to have requests answered with 503, and remove the annotation, or write false, to have them served"

// words are values that mean something in other annotations, and no page: whether requests are answered with 503.
//
//nolint:gochecknoglobals // constant
var words = map[string]bool{
	"0": false, "f": false, "n": false, "no": false, "none": false, "null": false, "nil": false, "never": false,
	"disable": false, "disabled": false,
	"1": true, "t": true, "y": true, "yes": true, "enable": true, "enabled": true,
}

// ReadMaintenance reads the value of the annotation fairlead.dev/maintenance: "true" or a page; nil is for "", "false" and "off". wrong is
// what is wrong with it, "" if nothing is. Other words that usually mean yes or no count as that, and are wrong. For a page that
// cannot be used the text of the status takes its place, for no backend expects requests.
func ReadMaintenance(value string) (m *Maintenance, wrong string) {
	text := strings.TrimSpace(value)
	word := strings.ToLower(text)
	switch word {
	case "", "false", "off":
		return nil, ""
	case "true", "on":
		return &Maintenance{}, ""
	}
	if on, means := words[word]; means && on {
		return &Maintenance{}, "it counts as true, and all requests are answered with 503; " + want
	} else if means {
		return nil, "it counts as false, and requests are served; " + want
	}
	if len(value) > MaxPage {
		return &Maintenance{}, fmt.Sprintf("the page has %d bytes, and may have %d; clients get 503 in plain text", len(value), MaxPage)
	}
	if isWord(text) {
		wrong = fmt.Sprintf("all requests are answered with 503, and the page %q; %s", text, want)
	}
	m = &Maintenance{Page: []byte(value), ContentType: "text/plain; charset=utf-8"}
	switch text[0] {
	case '<':
		m.ContentType = "text/html; charset=utf-8"
	case '{', '[':
		m.ContentType = "application/json"
	}
	return m, wrong
}

// isWord reports whether a page is so short that it is more likely a misspelled true or false.
func isWord(text string) bool {
	return len(text) <= maxWord && !strings.ContainsFunc(text, func(c rune) bool {
		return c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z')
	})
}

// ReadMaintenanceOf reads the value of an Ingress, or of its canary, whose requests are answered as the paths are that it shares.
func ReadMaintenanceOf(value string, canary bool) (m *Maintenance, wrong string) {
	if m, wrong = ReadMaintenance(value); m == nil || !canary {
		return m, wrong
	}
	return nil, "it has no effect on a canary, and requests are served; write it to the Ingress that has the same host and path without " +
		"the annotation canary"
}
