package filter

import (
	"regexp"
	"regexp/syntax"
	"strings"
	"unicode/utf8"
)

// Bounds of regular expressions. Package regexp takes a time that is linear in the input, times the size of the program.
const (
	MaxRegex = 256  // bytes
	MaxInput = 4096 // bytes of a value that a regular expression looks at; a longer one does not match
	// MaxProgram is the size of the program of an expression, in instructions. 256 bytes can ask for a program of many
	// thousands: "(?:.?){1000}".
	MaxProgram = 1000
)

// Anything matches every value.
var Anything = regexp.MustCompile("")

// RegexSize returns the size of the program of an expression, and what is wrong with it, "" if nothing is.
func RegexSize(text string) (size int, wrong string) {
	if len(text) > MaxRegex {
		return 0, "the regular expression has more than 256 bytes"
	}
	tree, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return 0, "the regular expression is invalid: " + err.Error()
	}
	prog, err := syntax.Compile(tree.Simplify())
	if err != nil {
		return 0, "the regular expression is invalid: " + err.Error()
	}
	if size = len(prog.Inst); size > MaxProgram {
		return size, "the regular expression is too complex"
	}
	return size, ""
}

// CompileRegex compiles an expression that must match a whole value.
func CompileRegex(text string) (*regexp.Regexp, string) {
	re, err := regexp.Compile(`^(?:` + text + `)$`)
	if err != nil {
		return nil, "the regular expression is invalid: " + err.Error()
	}
	return re, ""
}

// CompilePrefix compiles an expression that a value begins with, without regard to case.
func CompilePrefix(text string) (*regexp.Regexp, string) {
	re, err := regexp.Compile(`^(?i:` + text + `)`)
	if err != nil {
		return nil, "the regular expression is invalid: " + err.Error()
	}
	return re, ""
}

// CompileEither compiles an expression that a value begins with, as CompilePrefix does, or its text as it is; or the text without
// the slash at its end, for the whole value.
func CompileEither(text string) (*regexp.Regexp, string) {
	if re, wrong := CompilePrefix(text); wrong != "" {
		return re, wrong
	}
	plain := regexp.QuoteMeta(text)
	return CompilePrefix(`(?:` + text + `)|` + plain + `|` + strings.TrimSuffix(plain, "/") + `$`)
}

// Literal returns the text that every value begins with that an expression could be for, which may be invalid.
func Literal(text string) string {
	i := strings.IndexAny(text, `^$[](){}*+?|\.`)
	switch {
	case strings.ContainsRune(text, '|'): // an alternative, perhaps of the whole
		return "/"
	case i < 0:
		return text
	}
	literal := text[:i]
	if strings.IndexByte("?*{", text[i]) >= 0 { // the character before could be missing
		_, size := utf8.DecodeLastRuneInString(literal)
		literal = literal[:len(literal)-size]
	}
	return literal
}

// Beginning returns the expression of values that begin with a text, without regard to case.
func Beginning(text string) *regexp.Regexp {
	return regexp.MustCompile("^(?i:" + regexp.QuoteMeta(text) + ")")
}
