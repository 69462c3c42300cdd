package cli

import (
	"encoding/json"
	"io"
	"slices"

	"github.com/spf13/cobra"
)

// outputFlag is --output of a command that shows a report.
type outputFlag string

// outputs are the values of --output.
func outputs() []string { return []string{"table", "json"} }

func (o *outputFlag) add(cmd *cobra.Command) {
	cmd.Flags().StringVarP((*string)(o), "output", "o", "table", oneOf(outputs()))
}

// check rejects what is none of outputs.
func (o outputFlag) check() error {
	if !slices.Contains(outputs(), string(o)) {
		return usagef("--output is %q; want %s", string(o), wanted(string(o), outputs()))
	}
	return nil
}

// write writes a report as JSON, or as print does.
func (o outputFlag) write(w io.Writer, report any, print func(io.Writer) error) error {
	if o != "json" {
		return print(w)
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(report)
}
