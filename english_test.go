package fairlead_test

import (
	"cmp"
	"fmt"
	"go/scanner"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// mostPerThousand is how often each construction may occur in a thousand lines. Well-known Go projects have at most 0.7.
const mostPerThousand = 1.5

// constructions read like a translation. What to write in their place: name the things, "only", "must be" or "will be", "its", the
// noun, "another client" or "again", "reports".
var constructions = []struct {
	name string
	re   *regexp.Regexp
}{
	{"those that", regexp.MustCompile(`\bthose (?:that|of|which|who|with|on|in|for|from|to|by|not|whose)\b`)},
	{"alone for only", regexp.MustCompile(`\balone\b`)},
	{"is to be", regexp.MustCompile(`\b(?:is|are|was|were) to (?:be|have)\b`)},
	{"of its own", regexp.MustCompile(`\bof (?:its|their|his|her|our|my|your) own\b|\bof (?:ours|yours|theirs)\b`)},
	{"what is there", regexp.MustCompile(`\bwhat (?:is|are|was|were) ` +
		`(?:there|known|wanted|meant|left|asked|awaited|needed|found|written|done|missing|said|read|sent|served|stored)\b|` +
		`[Ww]hat is (?:no|not)\b`)},
	{"somebody, anew", regexp.MustCompile(`\b(?:somebody|anew|in vain|nevertheless|meanwhile|for ever|nobody)\b`)},
	{"says how", regexp.MustCompile(`\b(?:says?|tells?|said|told) (?:that|how|what|whether|which|why|of)\b`)},
}

// prose is text of one kind, and the constructions found in it.
type prose struct {
	lines int
	found map[string][]string // by construction
	worst map[string]int      // constructions in a line, by "file:line: text"
}

// add counts the constructions of a line.
func (p *prose) add(path string, n int, line string) {
	p.lines++
	for _, c := range constructions {
		k := len(c.re.FindAllString(line, -1))
		if k == 0 {
			continue
		}
		at := fmt.Sprintf("%s:%d: %.150s", path, n, strings.TrimSpace(line))
		for range k {
			p.found[c.name] = append(p.found[c.name], at)
		}
		p.worst[at] += k
	}
}

// addGo counts the comments and the strings of a Go file.
func addGo(t *testing.T, path string, text []byte, comments, strs *prose) {
	t.Helper()
	var s scanner.Scanner
	fset := token.NewFileSet()
	file := fset.AddFile(path, -1, len(text))
	s.Init(file, text, func(at token.Position, msg string) { t.Errorf("%s: %s", at, msg) }, scanner.ScanComments)
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return
		}
		to := strs
		switch {
		case tok == token.COMMENT && !strings.HasPrefix(lit, "//go:"):
			to = comments
		case tok != token.STRING:
			continue
		}
		for i, line := range strings.Split(lit, "\n") {
			to.add(path, file.Line(pos)+i, line)
		}
	}
}

// Comments, messages and documents are plain English: each construction occurs at most mostPerThousand times in a thousand lines.
func TestPlainEnglish(t *testing.T) {
	kinds := map[string]*prose{}
	for _, kind := range []string{"comments", "strings", "documents"} {
		kinds[kind] = &prose{found: map[string][]string{}, worst: map[string]int{}}
	}
	eachText(t, func(path string, text []byte) {
		switch {
		case strings.HasSuffix(path, ".md"):
			for i, line := range strings.Split(string(text), "\n") {
				kinds["documents"].add(path, i+1, line)
			}
		case strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") && !isGenerated(text):
			addGo(t, path, text, kinds["comments"], kinds["strings"])
		}
	})
	for kind, least := range map[string]int{"comments": 8000, "strings": 10000, "documents": 4000} {
		p := kinds[kind]
		if p.lines < least {
			t.Errorf("only %d lines of %s seen: the test does not look where they are", p.lines, kind)
		}
		bad := false
		for _, c := range constructions {
			found := p.found[c.name]
			rate := 1000 * float64(len(found)) / float64(max(p.lines, 1))
			if rate <= mostPerThousand {
				continue
			}
			bad = true
			t.Errorf("%s: %q %d times in %d lines, %.2f in a thousand; want at most %.1f. The first:\n\t%s",
				kind, c.name, len(found), p.lines, rate, mostPerThousand, strings.Join(found[:min(len(found), 5)], "\n\t"))
		}
		if bad {
			t.Logf("the worst lines of %s:\n\t%s", kind, strings.Join(p.worstLines(15), "\n\t"))
		}
	}
}

// worstLines returns the n lines with most constructions.
func (p *prose) worstLines(n int) []string {
	lines := slices.SortedFunc(maps.Keys(p.worst), func(a, b string) int {
		return cmp.Or(p.worst[b]-p.worst[a], strings.Compare(a, b))
	})
	return lines[:min(len(lines), n)]
}

// The test above counts what it shall count, and only that.
func TestConstructions(t *testing.T) {
	count := func(text string) (comments, strs int) {
		c := &prose{found: map[string][]string{}, worst: map[string]int{}}
		s := &prose{found: map[string][]string{}, worst: map[string]int{}}
		addGo(t, "x.go", []byte(text), c, s)
		for _, construction := range constructions {
			comments += len(c.found[construction.name])
			strs += len(s.found[construction.name])
		}
		return comments, strs
	}
	for text, want := range map[string][2]int{
		"// It reports those that are known, its own alone.\n":        {2, 0},
		"//go:embed those that\nvar x = 1 // nobody says how\n":       {2, 0},
		"var x = \"nobody\"\nvar y = `it is to be\nof its own`\n":     {0, 3},
		"/* what is there\nwhat is no number */\nvar meanwhile = 1\n": {2, 0},
		"// A node may only write its own Lease.\nvar x = \"y\"\n":    {0, 0},
	} {
		comments, strs := count(text)
		if got := [2]int{comments, strs}; got != want {
			t.Errorf("%q: %v in comments and strings, want %v", text, got, want)
		}
	}
}

// docColumns is the longest line of a document.
const docColumns = 120

// Documents wrap, except for tables, links, blocks of code and single words, which have no place to break, and generated documents.
func TestDocsWrap(t *testing.T) {
	seen := 0
	eachText(t, func(path string, text []byte) {
		room, _, below := strings.Cut(path, "/")
		if !strings.HasSuffix(path, ".md") || below && room != "docs" && room != "examples" || strings.Contains(string(text), "DO NOT EDIT") {
			return
		}
		seen++
		for _, bad := range tooWide(string(text)) {
			t.Errorf("%s:%s", path, bad)
		}
	})
	if seen < 35 {
		t.Errorf("only %d documents seen", seen)
	}
	for text, want := range map[string]int{
		strings.Repeat("x ", 61):                                1,
		strings.Repeat("é ", 60):                                0,
		"| " + strings.Repeat("x ", 61) + "|":                   0,
		"```\n" + strings.Repeat("x ", 61) + "\n```":            0,
		strings.Repeat("x ", 50) + "[a](https://example.com/a)": 0,
	} {
		if got := tooWide(text); len(got) != want {
			t.Errorf("%q: %v, want %d lines", text, got, want)
		}
	}
}

// tooWide returns the lines of a document that are too long.
func tooWide(text string) (bad []string) {
	code := false
	for i, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
		}
		free := code || strings.HasPrefix(line, "|") || strings.HasPrefix(line, "    ") || strings.Contains(line, "](http") ||
			!strings.Contains(strings.TrimSpace(line), " ")
		if n := utf8.RuneCountInString(line); !free && n > docColumns {
			bad = append(bad, fmt.Sprintf("%d: %d columns; want at most %d", i+1, n, docColumns))
		}
	}
	return bad
}

// Links between documents lead to files and headings that exist.
func TestDocLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)\s]*))?\)`)
	headings := map[string][]string{}
	links := 0
	eachText(t, func(path string, text []byte) {
		if strings.HasSuffix(path, ".md") {
			headings[path] = anchors(string(text))
		}
	})
	eachText(t, func(path string, text []byte) {
		if !strings.HasSuffix(path, ".md") {
			return
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			target, anchor := m[1], m[2]
			if strings.Contains(target, "://") || target == "" && anchor == "" {
				continue
			}
			links++
			file := path
			if target != "" {
				file = filepath.Join(filepath.Dir(path), target)
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s: the link %s leads to no file", path, m[0])
			} else if anchor != "" && !slices.Contains(headings[file], anchor) {
				t.Errorf("%s: the link %s leads to no heading of %s", path, m[0], file)
			}
		}
	})
	if links < 50 {
		t.Errorf("only %d links seen", links)
	}
}

// anchors returns the names by which the headings of a document are linked.
func anchors(text string) (out []string) {
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(text, -1) {
		name := strings.ReplaceAll(strings.ToLower(m[1]), " ", "-")
		out = append(out, regexp.MustCompile(`[^\p{L}\p{N}_-]`).ReplaceAllString(name, ""))
	}
	return out
}
