package status

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/runner/api"
)

func TestTopPrints(t *testing.T) {
	row := func(name string, cores, bytes uint64) topRow {
		w := topRow{Namespace: "default", Name: name, Node: "n1"}
		w.set(&api.CPUStats{UsageNanoCores: cores}, &api.MemoryStats{UsageBytes: 2 * bytes, WorkingSetBytes: bytes})
		return w
	}
	rows := []topRow{row("b", 1_200_000_000, 5<<20), row("a", 400_000, 9<<20), {Namespace: "default", Name: "c", Node: "n2"}}
	for sort, want := range map[string]string{"name": "a b c", "cpu": "b a c", "memory": "a b c"} {
		slices.SortFunc(rows, (&topCommand{sortBy: sort}).compare)
		if got := rows[0].Name + " " + rows[1].Name + " " + rows[2].Name; got != want {
			t.Errorf("--sort-by %s: %s, want %s", sort, got, want)
		}
	}
	slices.SortFunc(rows, (&topCommand{sortBy: "name"}).compare)
	print := func(r topReport) string {
		var out bytes.Buffer
		if err := r.print(&out); err != nil {
			t.Fatal(err)
		}
		var lines []string
		for line := range strings.Lines(out.String()) {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
		return strings.Join(lines, "\n")
	}
	if got, want := print(topReport{Pods: rows}), `NAMESPACE NAME NODE CPU(cores) MEMORY(bytes)
default a n1 1m 9Mi
default b n1 1200m 5Mi
default c n2 <unknown> <unknown>`; got != want {
		t.Errorf("pods:\n%s\nwant\n%s", got, want)
	}
	n := row("n1", 1_000_000_000, 1<<30)
	n.CPUPercent, n.MemoryPercent = percent(n.CPUNanoCores, 4e9), percent(n.MemoryBytes, 8<<30)
	if got, want := print(topReport{Nodes: []topRow{n, {Name: "n2"}}}), `NAME CPU(cores) CPU(%) MEMORY(bytes) MEMORY(%)
n1 1000m 25% 1024Mi 12%
n2 <unknown> <unknown> <unknown> <unknown>`; got != want {
		t.Errorf("nodes:\n%s\nwant\n%s", got, want)
	}
}
