package base

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// maxSlip is how many letters a typing error may change, as cobra counts them for
// commands (SuggestionsMinimumDistance).
const maxSlip = 2

// IsSlip reports whether one word may have been meant by another: at most maxSlip letters
// differ, case aside, and fewer than half of them.
func IsSlip(typed, meant string) bool {
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

// meant returns the value that may have been meant by typed, "" if none is close.
func meant(typed string, values []string) string {
	best := ""
	for _, v := range values {
		if IsSlip(typed, v) && (best == "" || distance(typed, v) < distance(typed, best)) {
			best = v
		}
	}
	return best
}

// DidYouMean returns "; did you mean X?" with the value that is closest to typed, "" if
// none is close. prefix stands before the value.
func DidYouMean(typed, prefix string, values []string) string {
	if m := meant(typed, values); m != "" {
		return "; did you mean " + prefix + m + "?"
	}
	return ""
}

// OneOf returns "a, b or c".
func OneOf(values []string) string {
	last := len(values) - 1
	if last < 1 {
		return strings.Join(values, "")
	}
	return strings.Join(values[:last], ", ") + " or " + values[last]
}

// Wanted returns the values that a flag has, and which one may have been meant.
func Wanted(typed string, values []string) string {
	return OneOf(values) + DidYouMean(typed, "", values)
}

// rangeOf returns which values a flag of a type of the library has, "" for other types: those say it themselves.
func rangeOf(typ string) string {
	switch typ {
	case "bool":
		return "true or false"
	case "duration":
		return "a duration, such as 500ms, 30s or 2h"
	case "float32", "float64":
		return "a number, such as 0.5"
	case "int", "int64":
		return "a whole number"
	case "int32":
		return fmt.Sprintf("a whole number from %d to %d", math.MinInt32, math.MaxInt32)
	case "uint8":
		return fmt.Sprintf("a whole number from 0 to %d", math.MaxUint8)
	case "uint16":
		return fmt.Sprintf("a whole number from 0 to %d", math.MaxUint16)
	case "uint32":
		return fmt.Sprintf("a whole number from 0 to %d", uint32(math.MaxUint32))
	case "uint", "uint64", "count":
		return "a whole number, 0 or more"
	}
	return ""
}

// SuggestFlag adds to the error of an unknown flag which one may have been meant, and says which values a flag has.
func SuggestFlag(cmd *cobra.Command, err error) error {
	invalid := new(pflag.InvalidValueError)
	if errors.As(err, &invalid) {
		if want := rangeOf(invalid.GetFlag().Value.Type()); want != "" {
			return Usagef("--%s is %q; want %s", invalid.GetFlag().Name, invalid.GetValue(), want)
		}
	}
	unknown := new(pflag.NotExistError)
	if errors.As(err, &unknown) && len(unknown.GetSpecifiedName()) > 1 {
		var names []string
		add := func(f *pflag.Flag) {
			if !f.Hidden {
				names = append(names, f.Name)
			}
		}
		cmd.Flags().VisitAll(add)
		cmd.InheritedFlags().VisitAll(add)
		err = fmt.Errorf("%w%s", err, DidYouMean(unknown.GetSpecifiedName(), "--", names))
	}
	return AsUsage(err)
}

// unknownCommand is the error of a sub-command that there is not.
func unknownCommand(cmd *cobra.Command, name string) error {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return Usagef("unknown command %q%s", name, DidYouMean(name, "", names))
}
