// Package api holds requests to a Kubernetes API server in text files, each
// with the answer that Kubernetes v1.37 gives, and runs them against any
// server. testdata/README.md describes the format.
package api

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Case is requests that belong together. Each case runs in a namespace of its
// own.
type Case struct {
	Name  string
	Line  int
	Steps []Step
}

// Step is one request and its answer.
type Step struct {
	Line               int
	Verb, Target, Body string
	// Code is the status code of the answer.
	Code int
	// Causes are all causes that the answer names, in any order, each as
	// "Reason field". MoreCauses allows further ones.
	Causes     []string
	MoreCauses bool
	// Warnings are regular expressions, one for each warning.
	Warnings []string
	Checks   []Check
	// Explained are the parts of the answer in which kube-apiserver differs
	// from fairlead on purpose.
	Explained []Explanation
}

// Explanation says why a part of an answer differs between the servers.
type Explanation struct {
	Line int
	// Where is found in the path of the part, as Difference has it.
	Where *regexp.Regexp
	Why   string
	// Sometimes says that the difference is not always there.
	Sometimes bool
}

// Check is what must be true of one field of the answer.
type Check struct {
	Line int
	// Path is the field, for example ".spec.ports[0].port".
	Path string
	// Op is "=", "~", "absent", "present" or "save".
	Op   string
	Want string
}

// verbs are the requests that a step can make.
var verbs = map[string]bool{
	"GET": true, "POST": true, "PUT": true, "DELETE": true, "EDIT": true, "RAW": true,
	"TABLE": true, "MERGE": true, "STRATEGIC": true, "JSONPATCH": true, "APPLY": true,
}

// reasons are the short names of the causes.
var reasons = map[string]string{
	"Required": "FieldValueRequired", "Invalid": "FieldValueInvalid", "Duplicate": "FieldValueDuplicate",
	"NotSupported": "FieldValueNotSupported", "Forbidden": "FieldValueForbidden", "NotFound": "FieldValueNotFound",
	"TooLong": "FieldValueTooLong", "TooMany": "FieldValueTooMany", "TypeInvalid": "FieldValueTypeInvalid", "Internal": "InternalError",
}

var codeLine = regexp.MustCompile(`^[1-5][0-9][0-9]$`)

// Parse reads the cases of one file.
func Parse(file, text string) ([]Case, error) {
	p := &parser{file: file}
	for i, line := range strings.Split(text, "\n") {
		if err := p.line(i+1, line); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", file, i+1, err)
		}
	}
	if p.inBody {
		return nil, fmt.Errorf("%s: the last request has no status code", file)
	}
	return p.cases, nil
}

type parser struct {
	file   string
	cases  []Case
	inBody bool
}

func (p *parser) line(n int, line string) error {
	trimmed := strings.TrimSpace(line)
	if p.inBody {
		return p.bodyLine(trimmed, line)
	}
	switch {
	case trimmed == "" || strings.HasPrefix(trimmed, "#"):
		return nil
	case strings.HasPrefix(line, "case "):
		p.cases = append(p.cases, Case{Name: strings.TrimSpace(line[len("case "):]), Line: n})
		return nil
	case len(p.cases) == 0:
		return fmt.Errorf("want a line %q first", "case NAME")
	}
	steps := &p.cases[len(p.cases)-1].Steps
	if line != trimmed && strings.HasPrefix(line, " ") {
		if len(*steps) == 0 {
			return fmt.Errorf("an expectation without a request")
		}
		return (*steps)[len(*steps)-1].expect(n, trimmed)
	}
	verb, rest, _ := strings.Cut(trimmed, " ")
	target, body, _ := strings.Cut(rest, " ")
	if !verbs[verb] || target == "" {
		return fmt.Errorf("%q is neither a request nor an indented expectation", trimmed)
	}
	*steps = append(*steps, Step{Line: n, Verb: verb, Target: target, Body: body})
	p.inBody = true
	return nil
}

func (p *parser) bodyLine(trimmed, line string) error {
	steps := p.cases[len(p.cases)-1].Steps
	s := &steps[len(steps)-1]
	if codeLine.MatchString(trimmed) {
		s.Code, _ = strconv.Atoi(trimmed)
		p.inBody = false
		return nil
	}
	if strings.HasPrefix(line, "case ") {
		return fmt.Errorf("the request before has no status code")
	}
	s.Body += "\n" + line
	return nil
}

// expect reads one indented line below a request.
func (s *Step) expect(n int, line string) error {
	if line == "..." {
		s.MoreCauses = true
		return nil
	}
	word, rest, _ := strings.Cut(line, " ")
	rest = strings.TrimSpace(rest)
	switch {
	case reasons[word] != "":
		s.Causes = append(s.Causes, word+" "+rest)
		return nil
	case word == "warning":
		s.Warnings = append(s.Warnings, rest)
		return nil
	case word == "save":
		name, path, ok := strings.Cut(rest, " ")
		if !ok {
			return fmt.Errorf("want: save NAME .PATH")
		}
		s.Checks = append(s.Checks, Check{n, path, "save", name})
		return nil
	case word == "differs" || word == "differs?":
		where, why, ok := strings.Cut(rest, " ")
		re, err := regexp.Compile(where)
		if err != nil || !ok {
			return fmt.Errorf("want: differs REGEXP REASON")
		}
		s.Explained = append(s.Explained, Explanation{n, re, strings.TrimSpace(why), word == "differs?"})
		return nil
	case !strings.HasPrefix(word, "."):
		return fmt.Errorf("%q is no expectation", line)
	}
	op, want, _ := strings.Cut(rest, " ")
	switch op {
	case "=", "~", "absent", "present":
		s.Checks = append(s.Checks, Check{n, word, op, strings.TrimSpace(want)})
		return nil
	}
	return fmt.Errorf("%q is no comparison: use = ~ absent present", op)
}
