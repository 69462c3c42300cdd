// Package config reads the configuration file, which sets flags of the commands that run
// for long, and has the commands that check and show it.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kubeproxyconfig"
)

// maxConfigFile bounds the size of a configuration file, in bytes.
const maxConfigFile = 1 << 20

// Sections are the commands whose flags a configuration file may set: the ones that run for
// long. Each is a section of the file.
func Sections() []string {
	return []string{"up", "server", "agent", "proxy", "dns", "controllers", "lb"}
}

// secretFlags are the flags whose values are not shown.
func secretFlags() []string { return []string{"token"} }

// setting is the value of a flag in a configuration file.
type setting struct {
	// command is the section, "" for a flag that every command has.
	command, flag string
	value         *yaml.Node
	// at is the field of a file whose fields have other names than flags.
	at string
}

func (s setting) path() string {
	switch {
	case s.at != "":
		return s.at
	case s.command == "":
		return s.flag
	}
	return s.command + "." + s.flag
}

// File is what a configuration file sets, in its order.
type File struct {
	// path is empty where there is no file.
	path     string
	settings []setting
	// open reports that others than the owner may read the file.
	open bool
	// kubeProxy is set if the file is a KubeProxyConfiguration.
	kubeProxy *KubeProxyFile
}

// defaultConfigFile is that of the machine for root, and none for others.
func defaultConfigFile() string {
	if os.Geteuid() == 0 && !base.MappedRoot() {
		return base.SystemConfigFile
	}
	return ""
}

// section returns the one of a command: that of the agent for what looks at the machine before
// its agent does.
func section(cmd *cobra.Command) string {
	if cmd.Name() == "check" {
		return "agent"
	}
	return cmd.Name()
}

// AddFlag gives the commands that have a section the flag --config.
func AddFlag(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		if slices.Contains(Sections(), section(cmd)) {
			cmd.Flags().String("config", defaultConfigFile(),
				"file of flags in YAML, by the command's name; flags of the command line come first (docs/configuration.md)")
		}
	}
}

// Configure sets the flags of cmd that its configuration file has and the command line has
// not. The whole file must be right: a mistake in another command's section is an error, too.
func Configure(cmd *cobra.Command, newRoot func() *cobra.Command) error {
	file := cmd.Flags().Lookup("config")
	if file == nil || cmd.Parent() != cmd.Root() {
		return nil
	}
	if file.Changed && file.Value.String() == "" {
		return nil
	}
	c, err := Read(file.Value.String(), file.Changed)
	if err != nil {
		return err
	}
	if len(c.settings) > 0 { // else there is nothing to check, for which all commands would be made a second time
		if err := errors.Join(c.Check(newRoot())...); err != nil {
			return base.AsUsage(err)
		}
	}
	if f := c.kubeProxy; f != nil {
		if cmd.Name() != proxyCommand {
			return base.Usagef("%s is a KubeProxyConfiguration, which only 'fairlead proxy' reads", c.path)
		}
		if err := f.replaceFlags(cmd); err != nil {
			return err
		}
		f.remember(cmd)
		for _, s := range c.settings {
			if f := cmd.Flags().Lookup(s.flag); f != nil && s.flag == "kubeconfig" {
				f.Changed = false // the file comes first
			}
		}
	}
	return c.apply(cmd)
}

// Read reads a file; one that is not there sets nothing, unless it is required.
func Read(path string, required bool) (*File, error) {
	if path == "" {
		return &File{}, nil
	}
	text, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) && !required {
		return &File{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("the configuration %s: %w", path, err)
	}
	c, err := Parse(path, text)
	if err != nil {
		return nil, base.AsUsage(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("the configuration: %w", err)
	}
	c.open = info.Mode().Perm()&0o077 != 0
	return c, nil
}

func readFile(path string) ([]byte, error) {
	read := fileio.ReadRegular
	if os.Geteuid() == 0 {
		read = fileio.ReadTrusted // it names the server to obey, and programs to run
	}
	return read(path, maxConfigFile)
}

// Parse parses a file that holds a mapping of flags, and of commands to mappings of
// flags, or a KubeProxyConfiguration. Which flags there are is left to check.
func Parse(path string, text []byte) (*File, error) {
	c := &File{path: path}
	var doc, more yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(text))
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return c, nil // nothing but comments
	} else if err != nil {
		return nil, fmt.Errorf("%s: %s", path, strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: has a second document or cannot be read to its end; want one mapping", path)
	}
	if isNull(doc.Content[0]) {
		return c, nil
	}
	if kubeproxyconfig.Is(doc.Content[0]) {
		return c, c.parseKubeProxy(text, doc.Content[0])
	}
	errs := c.section("", doc.Content[0])
	return c, errors.Join(errs...)
}

// section takes over the settings of a mapping.
func (c *File) section(command string, n *yaml.Node) (errs []error) {
	if n.Kind != yaml.MappingNode {
		what := "the file"
		if command != "" {
			what = command
		}
		return []error{c.errorf(n, "%s: want a mapping of flags to values", what)}
	}
	seen := map[string]int{}
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		s := setting{command: command, flag: key.Value, value: value}
		if line, twice := seen[key.Value]; twice {
			errs = append(errs, c.errorf(key, "%s: is already in line %d", s.path(), line))
			continue
		}
		seen[key.Value] = key.Line
		if command == "" && slices.Contains(Sections(), key.Value) {
			if !isNull(value) {
				errs = append(errs, c.section(key.Value, value)...)
			}
			continue
		}
		c.settings = append(c.settings, s)
	}
	return errs
}

func (c *File) errorf(at *yaml.Node, format string, args ...any) error {
	return fmt.Errorf("%s:%d: %w", c.path, at.Line, fmt.Errorf(format, args...))
}

// Check returns what is wrong with each setting, and with each command's flags as a whole, as
// far as that can be known without starting anything.
func (c *File) Check(root *cobra.Command) []error {
	var errs []error
	wrong := map[string]bool{}
	for _, s := range c.settings {
		err := c.set(Section(root, s.command), s)
		if err == nil && root.PersistentFlags().Lookup(s.flag) != nil {
			if err = root.PersistentPreRunE(root, nil); err != nil {
				err = c.errorf(s.value, "%s: %w", s.path(), err)
			}
		}
		if err != nil {
			errs, wrong[s.command] = append(errs, err), true
		}
		if slices.Contains(secretFlags(), s.flag) && c.open {
			errs = append(errs, c.errorf(s.value, "%s: others may read the file: chmod 600 it, or use token-file", s.path()))
		}
	}
	for _, name := range Sections() {
		cmd := Section(root, name)
		if wrong[""] || wrong[name] || cmd.PreRunE == nil ||
			!slices.ContainsFunc(c.settings, func(s setting) bool { return s.command == name }) {
			continue
		}
		if err := cmd.PreRunE(cmd, nil); err != nil {
			errs = append(errs, fmt.Errorf("%s: %s: %w", c.path, name, err))
		}
	}
	return errs
}

// Section returns the command of a section, root for "".
func Section(root *cobra.Command, name string) *cobra.Command {
	for _, cmd := range root.Commands() {
		if cmd.Name() == name {
			cmd.InheritedFlags() // adds them to cmd.Flags
			return cmd
		}
	}
	return root
}

// apply sets the flags of cmd that have not been given. Its own section comes before what is
// set for every command.
func (c *File) apply(cmd *cobra.Command) error {
	for _, name := range []string{section(cmd), ""} {
		for _, s := range c.settings {
			f := cmd.Flags().Lookup(s.flag)
			if s.command != name || f == nil || f.Changed {
				continue
			}
			if err := c.set(cmd, s); err != nil {
				return base.AsUsage(err)
			}
		}
	}
	return nil
}

// set sets a flag of cmd.
func (c *File) set(cmd *cobra.Command, s setting) error {
	f := settable(cmd, s.flag)
	if f == nil {
		names := settableNames(cmd)
		if s.command == "" {
			names = append(names, Sections()...)
			return c.errorf(s.value, "%s: neither a command nor a flag that all have; want %s", s.path(), base.Wanted(s.flag, names))
		}
		return c.errorf(s.value, "%s: fairlead %s has no such flag%s", s.path(), s.command, base.DidYouMean(s.flag, "", names))
	}
	values, err := texts(f, s.value)
	if list, ok := f.Value.(pflag.SliceValue); err == nil && ok && len(values) == 0 {
		err = list.Replace(nil)
	}
	if err != nil {
		return c.errorf(s.value, "%s: %w", s.path(), err)
	}
	for _, v := range values {
		err := f.Value.Set(v)
		if number := new(strconv.NumError); errors.As(err, &number) {
			err = number.Err
		}
		if err != nil {
			return c.errorf(s.value, "%s: %q: %w", s.path(), v, err)
		}
	}
	f.Changed = true
	return nil
}

// settable returns the flag of cmd that a configuration file may set, nil if there is none.
func settable(cmd *cobra.Command, name string) *pflag.Flag {
	flags := cmd.Flags()
	if cmd.Parent() == nil {
		flags = cmd.PersistentFlags()
	}
	if name == "help" || name == "config" {
		return nil
	}
	return flags.Lookup(name)
}

// settableNames lists the flags of cmd that a configuration file may set.
func settableNames(cmd *cobra.Command) (names []string) {
	flags := cmd.Flags()
	if cmd.Parent() == nil {
		flags = cmd.PersistentFlags()
	}
	flags.VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && settable(cmd, f.Name) != nil {
			names = append(names, f.Name)
		}
	})
	return names
}

// texts returns what to call the flag's Set with, one after the other: several values for a
// flag that may be given several times, none for an empty one, one with commas for a list.
func texts(f *pflag.Flag, n *yaml.Node) ([]string, error) {
	kind := f.Value.Type()
	_, list := f.Value.(pflag.SliceValue)
	switch {
	case n.Kind == yaml.AliasNode:
		return texts(f, n.Alias)
	case isNull(n):
		return nil, errors.New(`has no value; leave the line out for the default, or write "" for an empty one`)
	case n.Kind == yaml.ScalarNode:
		return []string{n.Value}, nil
	case n.Kind == yaml.MappingNode && kind == "stringToString":
		var out []string
		seen := map[string]int{}
		for i := 0; i < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			if line, twice := seen[key.Value]; twice {
				return nil, fmt.Errorf("%s: is already in line %d", key.Value, line)
			}
			seen[key.Value] = key.Line
			if value.Kind != yaml.ScalarNode || isNull(value) {
				return nil, fmt.Errorf("%s: want one value", key.Value)
			}
			out = append(out, key.Value+"="+value.Value)
		}
		return out, nil
	case n.Kind == yaml.MappingNode:
		return nil, errors.New("is a mapping; want a value")
	}
	var items []string
	for _, item := range n.Content {
		if item.Kind != yaml.ScalarNode || isNull(item) {
			return nil, fmt.Errorf("line %d: want one value", item.Line)
		}
		items = append(items, item.Value)
	}
	_, repeated := f.Value.(repeatedFlag)
	switch {
	case list || repeated:
		return items, nil
	case strings.HasSuffix(kind, ",..."):
		return []string{strings.Join(items, ",")}, nil
	}
	return nil, errors.New("is a list; want one value")
}

// repeatedFlag is a flag that may be given several times, each adding to the others.
type repeatedFlag interface{ Values() []string }

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// Values returns what the sections of the file set a flag to.
func (c *File) Values(flag string) (out []string) {
	for _, s := range c.settings {
		if s.flag == flag {
			out = append(out, s.value.Value)
		}
	}
	return out
}
