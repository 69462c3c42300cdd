package fairlead_test

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// Each line of docs/behaviour.md about load balancers of clouds that is marked as built is cited by a test.
func TestBehavioursOfCloudsAreTested(t *testing.T) {
	text, err := os.ReadFile("docs/behaviour.md")
	if err != nil {
		t.Fatal(err)
	}
	cited := citedBehaviours(t)
	built := 0
	for n := 106; n <= 184; n++ {
		if n > 149 && n < 177 {
			continue
		}
		line := regexp.MustCompile(fmt.Sprintf(`(?m)^\| %d \| .* \|$`, n)).Find(text)
		if !strings.Contains(string(line), "| |") {
			continue
		}
		if built++; cited[n] == "" {
			t.Errorf("behaviour %d is marked as built, and no test cites it", n)
		}
	}
	if built < 40 {
		t.Errorf("only %d lines are marked as built", built)
	}
}

// A behaviour that a test cites is built: docs/behaviour.md does not mark it *not yet*.
func TestBehavioursThatAreTestedAreBuilt(t *testing.T) {
	text, err := os.ReadFile("docs/behaviour.md")
	if err != nil {
		t.Fatal(err)
	}
	cited := citedBehaviours(t)
	for _, m := range regexp.MustCompile(`(?m)^\| (\d+) \| .* \| \*not yet\* \|`).FindAllSubmatch(text, -1) {
		n, err := strconv.Atoi(string(m[1]))
		if err != nil {
			t.Fatal(err)
		}
		if cited[n] != "" {
			t.Errorf("behaviour %d is marked *not yet*, and %s cites it", n, cited[n])
		}
	}
}

// citedBehaviours returns for each behaviour a test file that cites it, by its number or in a short range: a range over all of
// them would show nothing.
func citedBehaviours(t *testing.T) map[int]string {
	t.Helper()
	const longest = 10
	cited := map[int]string{}
	ranges, single := regexp.MustCompile(`(\d+) to (\d+)`), regexp.MustCompile(`\d+`)
	tables := regexp.MustCompile(`(?m)^\s*\{"(\d+)", `)
	rows := regexp.MustCompile(`\bBehaviour: +"([0-9, ]+)"`)
	eachText(t, func(path string, text []byte) {
		if !strings.HasSuffix(path, "_test.go") && !strings.HasPrefix(path, "internal/testbed/flows/") {
			return
		}
		cite := func(number []byte) {
			n, _ := strconv.Atoi(string(number))
			cited[n] = path
		}
		flat := regexp.MustCompile(`\n\s*//`).ReplaceAll(text, nil)
		for _, m := range citation.FindAllSubmatch(flat, -1) {
			for _, r := range ranges.FindAllSubmatch(m[1], -1) {
				first, _ := strconv.Atoi(string(r[1]))
				last, _ := strconv.Atoi(string(r[2]))
				for n := first; n <= last && last-first <= longest; n++ {
					cited[n] = path
				}
			}
			for _, n := range single.FindAll(ranges.ReplaceAll(m[1], nil), -1) {
				cite(n)
			}
		}
		for _, m := range tables.FindAllSubmatch(text, -1) {
			cite(m[1])
		}
		for _, m := range rows.FindAllSubmatch(text, -1) {
			for _, n := range single.FindAll(m[1], -1) {
				cite(n)
			}
		}
	})
	return cited
}
