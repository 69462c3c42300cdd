package cli

import (
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// WriteManPages writes a manual page of section 1 for each command into dir; they carry the
// date of made.
func WriteManPages(dir string, made time.Time) error {
	root := emptyRoot()
	root.DisableAutoGenTag = true
	everywhere(root)
	return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "fairlead", Manual: "fairlead", Date: &made}, dir)
}

// everywhere sets the defaults that depend on the machine or on its user to the defaults of root.
func everywhere(cmd *cobra.Command) {
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		f.DefValue = strings.ReplaceAll(f.DefValue, base.DefaultDataDir(), base.SystemDataDir)
		switch f.Name {
		case "node-name", "node":
			f.DefValue = ""
		case "config":
			f.DefValue = base.SystemConfigFile
		case "services-dir":
			f.DefValue = base.SystemServicesDir
		}
	})
	for _, c := range cmd.Commands() {
		everywhere(c)
	}
}

// WriteCompletion writes what lets a shell (bash, zsh or fish) complete commands, flags and
// their values.
func WriteCompletion(w io.Writer, shell string) error {
	root := emptyRoot()
	switch shell {
	case "bash":
		return root.GenBashCompletionV2(w, true)
	case "zsh":
		return root.GenZshCompletion(w)
	case "fish":
		return root.GenFishCompletion(w, true)
	}
	return base.Usagef("there is no completion for the shell %q; want bash, zsh or fish", shell)
}

// emptyRoot returns a tree of commands that reads and writes nothing.
func emptyRoot() *cobra.Command {
	return newRoot(base.Streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard})
}
