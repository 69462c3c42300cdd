package fairlead_test

import (
	"regexp"
	"strings"
	"testing"
)

// A test, benchmark or fuzz target that a document names exists. TestName stands for any.
func TestDocumentsNameTests(t *testing.T) {
	named := regexp.MustCompile(`\b(?:Test|Benchmark|Fuzz)[A-Z]\w*`)
	defined := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz)[A-Z]\w*)\(`)
	exists := map[string]bool{"TestName": true}
	in := map[string]string{} // the first document with a name
	eachText(t, func(path string, text []byte) {
		switch {
		case strings.HasSuffix(path, "_test.go"):
			for _, m := range defined.FindAllSubmatch(text, -1) {
				exists[string(m[1])] = true
			}
		case strings.HasSuffix(path, ".md"):
			for _, name := range named.FindAll(text, -1) {
				if in[string(name)] == "" {
					in[string(name)] = path
				}
			}
		}
	})
	if len(in) < 200 {
		t.Fatalf("only %d tests are named: this does not look where they are", len(in))
	}
	for name, path := range in {
		if !exists[name] {
			t.Errorf("%s names %s, which does not exist", path, name)
		}
	}
}
