package fairlead_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// walks are the sections of docs/flow.md that list files, and the most files
// that each may need: a change must not have to be followed through half of the
// repository.
var walks = map[string]int{"One endpoint changes": 20, "One Service is created": 15, "One question": 12, "One Pod": 18}

func TestWalks(t *testing.T) {
	text, err := os.ReadFile("docs/flow.md")
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, s := range strings.Split(string(text), "\n### ")[1:] {
		title, body, _ := strings.Cut(s, "\n")
		sections[title] = body
	}
	step := regexp.MustCompile("(?m)^[0-9]+\\. `([^`]+)`")
	for title, most := range walks {
		files := map[string]bool{}
		for _, m := range step.FindAllStringSubmatch(sections[title], -1) {
			files[m[1]] = true
			if _, err := os.Stat(m[1]); err != nil {
				t.Errorf("docs/flow.md, %s: %v", title, err)
			}
		}
		if len(files) < 5 || len(files) > most {
			t.Errorf("docs/flow.md, %s: %d files, want 5 to %d", title, len(files), most)
		}
	}
}
