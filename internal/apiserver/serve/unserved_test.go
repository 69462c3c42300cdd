package serve

import (
	"os"
	"strings"
	"testing"
)

// The page to which the error for a kind that is not served leads names the kind.
func TestUnservedKindsAreListed(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../../docs/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	_, list, found := strings.Cut(string(page), "Not served: ")
	list, _, end := strings.Cut(list, ". A request")
	if !found || !end {
		t.Fatal("the page has no list of what is not served")
	}
	listed := map[string]bool{}
	for _, kind := range strings.FieldsFunc(list, func(r rune) bool { return strings.ContainsRune(", ()\n", r) }) {
		kind = strings.ToLower(kind)
		for _, plural := range []string{kind + "s", kind + "es", strings.TrimSuffix(kind, "y") + "ies"} {
			listed[plural] = true
		}
	}
	for group, resources := range unserved {
		for _, r := range resources {
			if !listed[r] {
				t.Errorf("docs/compatibility.md does not list %s of group %q", r, group)
			}
		}
	}
}
