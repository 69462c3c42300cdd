package base

import (
	"encoding/json"
	"io"
	"slices"
	"strings"
	"unicode"

	"github.com/spf13/cobra"
)

// OutputFlag is --output of a command that shows a report.
type OutputFlag string

// Outputs are the values of --output.
func Outputs() []string { return []string{"table", "json"} }

// Add adds --output to a command.
func (o *OutputFlag) Add(cmd *cobra.Command) {
	cmd.Flags().StringVarP((*string)(o), "output", "o", "table", OneOf(Outputs()))
}

// Check rejects a value that is not one of Outputs.
func (o OutputFlag) Check() error {
	if !slices.Contains(Outputs(), string(o)) {
		return Usagef("--output is %q; want %s", string(o), Wanted(string(o), Outputs()))
	}
	return nil
}

// Write writes a report as JSON, or as print does.
func (o OutputFlag) Write(w io.Writer, report any, print func(io.Writer) error) error {
	if o != "json" {
		return print(w)
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(report)
}

// PlainLine returns text as one line of at most MaxLine characters, without any that
// a terminal acts on or that change the order of others.
func PlainLine(text string) string {
	folded := strings.Join(strings.Fields(strings.ReplaceAll(strings.TrimSpace(text), "\n", "; ")), " ")
	line := []rune(strings.Map(func(c rune) rune {
		if !unicode.IsPrint(c) {
			return unicode.ReplacementChar
		}
		return c
	}, folded))
	if len(line) > MaxLine {
		line = append(line[:MaxLine-1], '…')
	}
	return string(line)
}

// MaxLine bounds a plain line, in characters.
const MaxLine = 300
