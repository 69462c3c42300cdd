package filter

import (
	"regexp"
	"regexp/syntax"
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
