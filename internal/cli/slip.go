package cli

import "strings"

// maxSlip is how many letters a typing error may change, as cobra counts them for
// commands (SuggestionsMinimumDistance).
const maxSlip = 2

// slip reports whether one word may have been meant by another: at most maxSlip letters
// differ, case aside, and fewer than half of them.
func slip(typed, meant string) bool {
	typed, meant = strings.ToLower(typed), strings.ToLower(meant)
	d := distance(typed, meant)
	return d <= maxSlip && 2*d < max(len(typed), len(meant))
}

// distance is how many letters have to be changed, added, left out or swapped with the
// next one to make b of a (optimal string alignment).
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j-1]+cost, rows[i-1][j]+1, rows[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
