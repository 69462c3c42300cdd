package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// unit is what a figure is counted in, and how it is written.
type unit int

const (
	seconds unit = iota
	milliseconds
	microseconds
	kilobytes
	megabytes
	times
	writes
	pieces
	gigabits
	perSecond
	megabytesPerSecond
)

func (u unit) format(v float64) string {
	switch u {
	case seconds:
		return fmt.Sprintf("%.2f s", v)
	case milliseconds:
		return fmt.Sprintf("%.1f ms", v)
	case microseconds:
		return fmt.Sprintf("%.1f µs", v)
	case kilobytes:
		return fmt.Sprintf("%.1f kB", v/1e3)
	case megabytes:
		return fmt.Sprintf("%.0f MB", v)
	case gigabits:
		return fmt.Sprintf("%.1f Gbit/s", v)
	case megabytesPerSecond:
		return fmt.Sprintf("%.1f MB/s", v)
	case perSecond:
		return fmt.Sprintf("%.0f/s", v)
	case writes, pieces:
		return strconv.FormatFloat(v, 'f', -1, 64)
	default:
		return fmt.Sprintf("%.2f times", v)
	}
}

// in turns a duration into a number of the unit.
func (u unit) in(d time.Duration) float64 {
	switch u {
	case milliseconds:
		return float64(d.Nanoseconds()) / 1e6
	case microseconds:
		return float64(d.Nanoseconds()) / 1e3
	default:
		return d.Seconds()
	}
}

// expectation is what a figure should be; the zero value expects nothing.
type expectation struct {
	below float64 // of fairlead's value, in the figure's unit
	share float64 // of fairlead's value divided by the peer's, at most
	least float64 // of fairlead's value divided by the peer's, at least
}

// figure is one line of the table. A value that was not measured is NaN.
type figure struct {
	run, what      string
	unit           unit
	fairlead, peer float64
	peerName       string
	want           expectation
}

// unpaired is a figure without a peer.
func unpaired(what string, u unit, v float64, want expectation) figure {
	return figure{what: what, unit: u, fairlead: v, peer: math.NaN(), want: want}
}

func (f figure) value(v float64) string {
	if math.IsNaN(v) {
		return ""
	}
	return f.unit.format(v)
}

func (f figure) peerText() string {
	if math.IsNaN(f.peer) {
		return ""
	}
	return f.value(f.peer) + " (" + f.peerName + ")"
}

func (f figure) ratio() string {
	if math.IsNaN(f.peer) || f.peer == 0 {
		return ""
	}
	return fmt.Sprintf("%.3g", f.fairlead/f.peer)
}

// expected names the figure that was expected, and whether it was reached.
func (f figure) expected() string {
	var parts []string
	met := true
	if f.want.below > 0 {
		parts = append(parts, "under "+f.unit.format(f.want.below))
		met = met && f.fairlead < f.want.below
	}
	if f.want.share > 0 && !math.IsNaN(f.peer) {
		parts = append(parts, fmt.Sprintf("ratio at most %.3g", f.want.share))
		met = met && f.fairlead <= f.want.share*f.peer
	}
	if f.want.least > 0 && !math.IsNaN(f.peer) {
		parts = append(parts, fmt.Sprintf("ratio at least %.3g", f.want.least))
		met = met && f.fairlead >= f.want.least*f.peer
	}
	if len(parts) == 0 {
		return ""
	}
	verdict := ": met"
	if !met {
		verdict = ": **missed**"
	}
	return strings.Join(parts, ", ") + verdict
}

// printTable writes the figures as a table that reads well as text and as
// Markdown. Without judge it leaves the expectations out.
func printTable(w io.Writer, figures []figure, judge bool) error {
	rows := [][]string{{"run", "figure", "fairlead", "peer", "ratio"}}
	if judge {
		rows[0] = append(rows[0], "expected")
	}
	for _, f := range figures {
		row := []string{f.run, f.what, f.value(f.fairlead), f.peerText(), f.ratio()}
		if judge {
			row = append(row, f.expected())
		}
		rows = append(rows, row)
	}
	widths := make([]int, len(rows[0]))
	for _, r := range rows {
		for i, cell := range r {
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	dashes := make([]string, len(widths))
	for i, n := range widths {
		dashes[i] = strings.Repeat("-", n)
	}
	rows = slices.Insert(rows, 1, dashes)
	for _, r := range rows {
		for i, cell := range r {
			r[i] = cell + strings.Repeat(" ", widths[i]-len([]rune(cell)))
		}
		if _, err := fmt.Fprintln(w, "| "+strings.Join(r, " | ")+" |"); err != nil {
			return err
		}
	}
	return nil
}

// percentile returns the smallest of the values that at least share p of them
// do not exceed. Of no values it is NaN.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	i := int(math.Ceil(p*float64(len(sorted)))) - 1
	return sorted[max(i, 0)]
}
