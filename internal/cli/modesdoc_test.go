package cli

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/cli/parts"
)

// The documents list the values of --mode: the README in a sentence, in the
// order of the help, and docs/modes.md in a table.
func TestModesAreDocumented(t *testing.T) {
	want := parts.ModeValues()[1:]
	quoted := regexp.MustCompile("`([a-z0-9]+)`")
	for _, doc := range []struct {
		file string
		list *regexp.Regexp
		want []string
	}{
		{"../../README.md", regexp.MustCompile("`--mode` is ([^.;()]+)"), parts.ModeValues()},
		{"../../docs/modes.md", regexp.MustCompile("(?m)^(\\| `[a-z0-9]+`)"), want},
	} {
		text, err := os.ReadFile(doc.file)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, list := range doc.list.FindAllStringSubmatch(string(text), -1) {
			for _, name := range quoted.FindAllStringSubmatch(list[1], -1) {
				got = append(got, name[1])
			}
		}
		if !slices.Equal(got, doc.want) {
			t.Errorf("%s lists the modes %q, want %q", doc.file, got, doc.want)
		}
	}
	if _, help, _ := call(t, "proxy", "--help"); !strings.Contains(help, "auto, nft, iptables, ipvs or userspace") {
		t.Errorf("the help of --mode lists other modes:\n%s", help)
	}
}
