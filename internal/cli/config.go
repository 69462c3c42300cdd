package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

func newConfig(g *global) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Check and show the configuration file",
		Long: `Check and show the configuration file, in which every flag of the commands that run
for long has a line (docs/configuration.md).`,
		Example: `  fairlead config check
  fairlead config show agent`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newConfigCheck(g), newConfigShow(g))
	return cmd
}

func newConfigCheck(g *global) *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Report what is wrong in the configuration file, by line and field",
		Example: `  fairlead config check
  fairlead config check --config /tmp/new.yaml && install -m 600 /tmp/new.yaml /etc/fairlead/config.yaml`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			c, err := readConfig(path, true)
			if err != nil {
				return err
			}
			errs := c.check()
			for _, err := range errs {
				fmt.Fprintln(g.err, err)
			}
			if len(errs) > 0 {
				return fmt.Errorf("%s is wrong in %d places", path, len(errs))
			}
			_, err = fmt.Fprintf(g.out, "%s is right: it sets %d flags\n", path, len(c.settings))
			return err
		},
	}
	cmd.Flags().StringVar(&path, "config", systemConfigFile, "the file")
	return cmd
}

// effective is a flag with the value it would have, and where that comes from.
type effective struct {
	Flag   string `json:"flag"`
	Value  any    `json:"value"`
	Source string `json:"source"`
}

func newConfigShow(g *global) *cobra.Command {
	var path, output string
	cmd := &cobra.Command{
		Use:   "show [COMMAND...]",
		Short: "Show every flag of a command with the value it has, and where that comes from",
		Long: `Show every flag of the commands (those with a section in the file, if none is named) with
the value that it has where the command line does not set it, and where that comes from. What
is printed is a configuration file itself. A token is not shown.`,
		Example: `  fairlead config show
  fairlead config show server -o json`,
		ValidArgs: configured(),
		RunE: func(_ *cobra.Command, args []string) error {
			if !slices.Contains([]string{"yaml", "json"}, output) {
				return usagef("--output is %q; want %s", output, wanted(output, []string{"yaml", "json"}))
			}
			for _, name := range args {
				if !slices.Contains(configured(), name) {
					return usagef("%q has no flags in a configuration file; want %s", name, wanted(name, configured()))
				}
			}
			c, err := readConfig(path, path != systemConfigFile)
			if err != nil {
				return err
			}
			if err := errors.Join(c.check()...); err != nil {
				return err
			}
			for _, s := range c.settings {
				if len(args) == 0 && s.command != "" && !slices.Contains(args, s.command) {
					args = append(args, s.command)
				}
			}
			return g.showConfig(c, args, output)
		},
	}
	cmd.Flags().StringVar(&path, "config", systemConfigFile, "the file")
	cmd.Flags().StringVarP(&output, "output", "o", "yaml", "yaml or json")
	return cmd
}

func (g *global) showConfig(c *configFile, commands []string, output string) error {
	all := map[string][]effective{}
	for _, name := range commands {
		flags, err := c.effective(name)
		if err != nil {
			return err
		}
		all[name] = flags
	}
	if output == "json" {
		enc := json.NewEncoder(g.out)
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
	enc := yaml.NewEncoder(g.out)
	enc.SetIndent(2)
	return errors.Join(enc.Encode(doc), enc.Close())
}

// effective returns the flags of a command, in the order of their names.
func (c *configFile) effective(name string) (out []effective, err error) {
	cmd := sectionCommand(newRoot(streams{}), name)
	if err := c.apply(cmd); err != nil {
		return nil, err
	}
	for _, flag := range settableNames(cmd) {
		f := cmd.Flags().Lookup(flag)
		if f.Value.String() == "" && f.Value.Type() != "string" {
			continue // an empty text is no value of it
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
func (c *configFile) source(command, flag string) string {
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
		return append([]string{}, v.values()...)
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
