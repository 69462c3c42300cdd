package filter

import "regexp"

// Match is a match of a header field, a parameter or a cookie.
type Match struct {
	Name, Value string
	Regex       *regexp.Regexp // instead of Value
}

// Takes reports whether a value is one that the match is for. ok is false if there is none.
func (m *Match) Takes(value string, ok bool) bool {
	switch {
	case !ok:
		return false
	case m.Regex != nil:
		return len(value) <= MaxInput && m.Regex.MatchString(value)
	}
	return value == m.Value
}

// NoFields are the fields of no request.
type NoFields struct{}

// Header finds none.
func (NoFields) Header(string) (value string, ok bool) { return "", false }

// Cookie finds none.
func (NoFields) Cookie(string) (value string, ok bool) { return "", false }

// Query finds none.
func (NoFields) Query(string) (value string, ok bool) { return "", false }
