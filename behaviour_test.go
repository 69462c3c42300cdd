package fairlead_test

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// Each line of docs/behaviour.md about load balancers of clouds that is marked as built is cited by a test, alone or in a short
// list: one that names them all would show nothing.
func TestBehavioursOfCloudsAreTested(t *testing.T) {
	text, err := os.ReadFile("docs/behaviour.md")
	if err != nil {
		t.Fatal(err)
	}
	const longest = 10
	cited := map[int]bool{}
	ranges, single := regexp.MustCompile(`(\d+) to (\d+)`), regexp.MustCompile(`\d+`)
	tables := regexp.MustCompile(`(?m)^\s*\{"(\d+)", `)
	eachText(t, func(path string, text []byte) {
		if !strings.HasSuffix(path, "_test.go") {
			return
		}
		flat := regexp.MustCompile(`\n\s*//`).ReplaceAll(text, nil)
		for _, m := range citation.FindAllSubmatch(flat, -1) {
			for _, r := range ranges.FindAllSubmatch(m[1], -1) {
				first, _ := strconv.Atoi(string(r[1]))
				last, _ := strconv.Atoi(string(r[2]))
				for n := first; n <= last && last-first <= longest; n++ {
					cited[n] = true
				}
			}
			for _, n := range single.FindAll(ranges.ReplaceAll(m[1], nil), -1) {
				k, _ := strconv.Atoi(string(n))
				cited[k] = true
			}
		}
		for _, m := range tables.FindAllSubmatch(text, -1) {
			k, _ := strconv.Atoi(string(m[1]))
			cited[k] = true
		}
	})
	built := 0
	for n := 106; n <= 184; n++ {
		if n > 149 && n < 177 {
			continue
		}
		line := regexp.MustCompile(fmt.Sprintf(`(?m)^\| %d \| .* \|$`, n)).Find(text)
		if !strings.Contains(string(line), "| |") {
			continue
		}
		if built++; !cited[n] {
			t.Errorf("behaviour %d is marked as built, and no test cites it", n)
		}
	}
	if built < 40 {
		t.Errorf("only %d lines are marked as built", built)
	}
}
