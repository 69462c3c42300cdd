package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// NewCommand returns 'fairlead config'. newRoot returns a new tree of all commands, by whose flags a
// file is checked.
func NewCommand(g *base.Global, newRoot func() *cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Check and show the configuration file",
		Long: `Check and show the configuration file, which can set every flag of the commands that
run for long (docs/configuration.md).`,
		Example: `  fairlead config check
  fairlead config show agent`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newConfigCheck(g, newRoot), newConfigShow(g, newRoot))
	return cmd
}

func newConfigCheck(g *base.Global, newRoot func() *cobra.Command) *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Report mistakes in the configuration file, by line and field",
		Example: `  fairlead config check
  fairlead config check --config /tmp/new.yaml && install -m 600 /tmp/new.yaml /etc/fairlead/config.yaml`,
		Args: base.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			c, err := Read(path, true)
			if err != nil {
				return err
			}
			errs := c.Check(newRoot())
			for _, err := range errs {
				fmt.Fprintln(g.Err, err)
			}
			if len(errs) > 0 {
				return fmt.Errorf("%s has %d mistakes", path, len(errs))
			}
			_, err = fmt.Fprintf(g.Out, "%s is valid: it sets %d flags\n", path, len(c.settings))
			return err
		},
	}
	cmd.Flags().StringVar(&path, "config", base.SystemConfigFile, "the file")
	return cmd
}

// effective is a flag with the value it would have, and where that comes from.
type effective struct {
	Flag   string `json:"flag"`
	Value  any    `json:"value"`
	Source string `json:"source"`
}

func newConfigShow(g *base.Global, newRoot func() *cobra.Command) *cobra.Command {
	var path, output string
	cmd := &cobra.Command{
		Use:   "show [COMMAND...]",
		Short: "Show every flag of a command with its value, and where that comes from",
		Long: `Show every flag of the commands (without arguments, of all commands with a section in the
file) with the value that it has unless the command line sets it, and where that comes from.
The output is a configuration file itself. A token is not shown.`,
		Example: `  fairlead config show
  fairlead config show server -o json`,
		ValidArgs: Sections(),
		RunE: func(_ *cobra.Command, args []string) error {
			if !slices.Contains([]string{"yaml", "json"}, output) {
				return base.Usagef("--output is %q; want %s", output, base.Wanted(output, []string{"yaml", "json"}))
			}
			for _, name := range args {
				if !slices.Contains(Sections(), name) {
					return base.Usagef("%q has no flags in a configuration file; want %s", name, base.Wanted(name, Sections()))
				}
			}
			c, err := Read(path, path != base.SystemConfigFile)
			if err != nil {
				return err
			}
			if err := errors.Join(c.Check(newRoot())...); err != nil {
				return err
			}
			for _, s := range c.settings {
				if len(args) == 0 && s.command != "" && !slices.Contains(args, s.command) {
					args = append(args, s.command)
				}
			}
			return showConfig(g.Out, newRoot, c, args, output)
		},
	}
	cmd.Flags().StringVar(&path, "config", base.SystemConfigFile, "the file")
	cmd.Flags().StringVarP(&output, "output", "o", "yaml", "yaml or json")
	return cmd
}

func showConfig(out io.Writer, newRoot func() *cobra.Command, c *File, commands []string, output string) error {
	all := map[string][]effective{}
	for _, name := range commands {
		flags, err := c.effective(newRoot(), name)
		if err != nil {
			return err
		}
		all[name] = flags
	}
	if output == "json" {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(all)
	}
	doc := &yaml.Node{Kind: yaml.MappingNode}
	for _, name := range commands {
		section := &yaml.Node{Kind: yaml.MappingNode}
		for _, e := range all[name] {
			value := &yaml.Node{}
			if err := value.Encode(e.Value); err != nil {
				return err
			}
			value.Style = yaml.FlowStyle
			value.LineComment = e.Source
			section.Content = append(section.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: e.Flag}, value)
		}
		doc.Content = append(doc.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: name}, section)
	}
	enc := yaml.NewEncoder(out)
	enc.SetIndent(2)
	return errors.Join(enc.Encode(doc), enc.Close())
}

// effective returns the flags of a command, in the order of their names.
func (c *File) effective(root *cobra.Command, name string) (out []effective, err error) {
	cmd := Section(root, name)
	if err := c.apply(cmd); err != nil {
		return nil, err
	}
	for _, flag := range settableNames(cmd) {
		f := cmd.Flags().Lookup(flag)
		if f.Value.String() == "" && f.Value.Type() != "string" {
			continue // it has no value
		}
		e := effective{Flag: flag, Value: plain(cmd.Flags(), f), Source: c.source(name, flag)}
		if slices.Contains(secretFlags(), flag) && f.Changed {
			e.Value, e.Source = "", e.Source+", not shown"
		}
		out = append(out, e)
	}
	return out, nil
}

// source returns where the value of a flag comes from.
func (c *File) source(command, flag string) string {
	for _, section := range []string{command, ""} {
		for _, s := range c.settings {
			if s.command == section && s.flag == flag {
				return c.path + ":" + strconv.Itoa(s.value.Line)
			}
		}
	}
	return "default"
}

// plain returns the value of a flag as JSON and YAML have it.
func plain(flags *pflag.FlagSet, f *pflag.Flag) any {
	text := f.Value.String()
	switch v := f.Value.(type) {
	case pflag.SliceValue:
		return append([]string{}, v.GetSlice()...)
	case repeatedFlag:
		return append([]string{}, v.Values()...)
	}
	if pairs, err := flags.GetStringToString(f.Name); err == nil {
		return pairs
	}
	if on, err := flags.GetBool(f.Name); err == nil {
		return on
	}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && strings.Contains(f.Value.Type(), "int") {
		return n
	}
	return text
}
