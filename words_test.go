package fairlead_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// maxColumns is the longest line of a Go file, a tab being one column.
const maxColumns = 140

// words are spellings that do not belong into this repository.
var words = []struct {
	re      *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`says ` + `whether`), "reports whether"},
	{regexp.MustCompile(`\bSEE` + `DS\b`), "behaviour N, a line of docs/behaviour.md"},
	{regexp.MustCompile(`(?i)\bissues? ` + `#?[0-9]+\b`), "behaviour N, or a link that resolves"},
	{regexp.MustCompile(`"msg"` + `,`), "another key: the message itself has this one"},
}

// A word that only this repository has costs every reader a search.
func TestWords(t *testing.T) {
	eachText(t, func(path string, text []byte) {
		goFile := strings.HasSuffix(path, ".go")
		generated := goFile && isGenerated(text)
		for i, line := range strings.Split(string(text), "\n") {
			for _, w := range words {
				if found := w.re.FindString(line); found != "" && !isLink(line, found) {
					t.Errorf("%s:%d: %q; want %s", path, i+1, found, w.instead)
				}
			}
			if n := utf8.RuneCountInString(line); goFile && !generated && n > maxColumns && !strings.HasPrefix(line, "//go:") {
				t.Errorf("%s:%d: %d columns; want at most %d", path, i+1, n, maxColumns)
			}
		}
	})
}

// isLink reports whether found is the text of a link in line.
func isLink(line, found string) bool { return strings.Contains(line, "["+found+"](https://") }

var generatedMark = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

func isGenerated(text []byte) bool {
	return generatedMark.Match(text[:min(len(text), 2000)])
}

var (
	citation = regexp.MustCompile(`\b[Bb]ehaviours? ([0-9D][0-9a-zD]*(?:(?:,? (?:and|to|or) |, )[0-9D][0-9a-zD]*)*)`)
	row      = regexp.MustCompile(`\bBehaviour: +"([^"]*)"`)
	number   = regexp.MustCompile(`[0-9D][0-9a-zD]*`)
	numbers  = regexp.MustCompile(`^[0-9D][0-9a-zD]*(, [0-9D][0-9a-zD]*)*$`)
)

// Every citation of a behaviour resolves to a line of docs/behaviour.md.
func TestBehavioursAreListed(t *testing.T) {
	listed := behaviours(t)
	rows, citations := 0, 0
	eachText(t, func(path string, text []byte) {
		check := func(cited string) {
			for _, n := range number.FindAllString(cited, -1) {
				if !slices.Contains(listed, n) {
					t.Errorf("%s: behaviour %s is no line of docs/behaviour.md", path, n)
				}
			}
		}
		// A citation may go on in the next line of a comment.
		flat := regexp.MustCompile(`\n\s*//`).ReplaceAll(text, nil)
		for _, m := range citation.FindAllSubmatch(flat, -1) {
			citations++
			check(string(m[1]))
		}
		for _, m := range row.FindAllSubmatch(text, -1) {
			rows++
			if !numbers.Match(m[1]) {
				t.Errorf("%s: Behaviour is %q; want numbers only", path, m[1])
				continue
			}
			check(string(m[1]))
		}
	})
	if rows < 150 || citations < 100 {
		t.Errorf("only %d rows and %d citations seen: the test does not look where they are", rows, citations)
	}
}

// behaviours returns the numbers that docs/behaviour.md explains, and checks
// that none is missing or there twice, and that each has a source.
func behaviours(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("docs/behaviour.md")
	if err != nil {
		t.Fatal(err)
	}
	lines := regexp.MustCompile(`(?m)^\| (D?[0-9]+[a-z]?) \| .* \|$`).FindAllSubmatch(text, -1)
	var listed []string
	for _, l := range lines {
		n := string(l[1])
		if slices.Contains(listed, n) {
			t.Errorf("docs/behaviour.md: %s is there twice", n)
		}
		if n[0] != 'D' && !bytes.Contains(l[0], []byte("](https://")) {
			t.Errorf("docs/behaviour.md: %s has no source", n)
		}
		listed = append(listed, n)
	}
	for n := range 209 {
		if !slices.Contains(listed, fmt.Sprint(n)) {
			t.Errorf("docs/behaviour.md: %d is missing", n)
		}
	}
	return listed
}

// eachText calls f for every text file of the repository.
func eachText(t *testing.T, f func(path string, text []byte)) {
	t.Helper()
	seen := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != "." && (strings.HasPrefix(name, ".") && name != ".ci" || name == "bin") {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if bytes.IndexByte(text, 0) >= 0 { // not text
			return nil
		}
		seen++
		f(path, text)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 500 {
		t.Fatalf("only %d files seen: the walk does not look where they are", seen)
	}
}
