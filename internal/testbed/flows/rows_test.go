package flows

import (
	"slices"
	"testing"
)

// Every row is its own question and says why it is asked.
func TestRowsNameTheirReason(t *testing.T) {
	rows := slices.Concat(Rows, APIRows, HostPortRows)
	if len(rows) < 150 {
		t.Errorf("%d rows, want at least 150", len(rows))
	}
	seen := map[string]bool{}
	for _, r := range rows {
		if seen[r.Name] {
			t.Errorf("%q stands there twice", r.Name)
		}
		seen[r.Name] = true
		if r.Behaviour == "" || (r.API == nil) == (r.Services == nil) {
			t.Errorf("%q has no reason, or not one of API and Services", r.Name)
		}
	}
}
