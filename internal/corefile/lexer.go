package corefile

import (
	"fmt"
	"os"
	"strings"
	"unicode"
)

// Pos is a place in a file.
type Pos struct {
	File string
	Line int
}

// String returns "FILE:LINE".
func (p Pos) String() string { return fmt.Sprintf("%s:%d", p.File, p.Line) }

// errorf returns an error that begins with the place.
func (p Pos) errorf(format string, args ...any) error {
	return fmt.Errorf("%s: %w", p, fmt.Errorf(format, args...))
}

// token is one word of a file.
type token struct {
	text  string
	pos   Pos
	first bool // on its line
}

// lex splits a file into words as Caddy v1 does: white space separates them, a word
// that begins with a quote ends with the next one that has no backslash, and # begins
// a comment wherever it stands outside of quotes.
func lex(file, text string) ([]token, error) {
	l := lexer{file: file, line: 1, lastLine: 0, rest: []rune(strings.TrimPrefix(text, "\ufeff"))}
	for {
		ok, err := l.next()
		if err != nil || !ok {
			return l.out, err
		}
	}
}

type lexer struct {
	file           string
	rest           []rune
	line, lastLine int
	out            []token
}

// next appends the next word, and reports whether there was one.
func (l *lexer) next() (bool, error) {
	l.skip()
	if len(l.rest) == 0 {
		return false, nil
	}
	pos := Pos{l.file, l.line}
	if l.rest[0] == '"' {
		word, ok := l.quoted()
		if !ok {
			return false, pos.errorf("a quote that begins here is never closed")
		}
		l.add(word, pos)
		return true, nil
	}
	var word []rune
	for len(l.rest) > 0 && !unicode.IsSpace(l.rest[0]) && l.rest[0] != '#' {
		word = append(word, l.rest[0])
		l.rest = l.rest[1:]
	}
	l.add(string(word), pos)
	return true, nil
}

// add appends a word, with the environment variables in it replaced.
func (l *lexer) add(word string, pos Pos) {
	l.out = append(l.out, token{text: replaceVariables(word), pos: pos, first: pos.Line != l.lastLine})
	l.lastLine = l.line
}

// skip skips white space and comments.
func (l *lexer) skip() {
	comment := false
	for len(l.rest) > 0 {
		switch c := l.rest[0]; {
		case c == '\n':
			l.line++
			comment = false
		case c == '#':
			comment = true
		case !comment && !unicode.IsSpace(c):
			return
		}
		l.rest = l.rest[1:]
	}
}

// quoted reads a quoted word; only quotes can be escaped.
func (l *lexer) quoted() (string, bool) {
	var word []rune
	for l.rest = l.rest[1:]; len(l.rest) > 0; l.rest = l.rest[1:] {
		switch c := l.rest[0]; {
		case c == '"':
			l.rest = l.rest[1:]
			return string(word), true
		case c == '\\' && len(l.rest) > 1 && l.rest[1] == '"':
			l.rest = l.rest[1:]
			word = append(word, '"')
		default:
			if c == '\n' {
				l.line++
			}
			word = append(word, c)
		}
	}
	return "", false
}

// replaceVariables replaces {$NAME} and {%NAME%} by the environment's value, which is
// empty for a variable that is not set. The value is not searched again.
func replaceVariables(word string) string {
	for _, mark := range [][2]string{{"{%", "%}"}, {"{$", "}"}} {
		var out strings.Builder
		for {
			before, rest, found := strings.Cut(word, mark[0])
			name, after, closed := strings.Cut(rest, mark[1])
			if !found || !closed || name == "" {
				break
			}
			out.WriteString(before)
			out.WriteString(os.Getenv(name))
			word = after
		}
		word = out.String() + word
	}
	return word
}
