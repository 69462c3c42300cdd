package config

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/fairlead/fairlead/internal/kubeproxyconfig"
)

// KubeProxyFile is a KubeProxyConfiguration that 'fairlead proxy' was started with in place of fairlead's own file.
type KubeProxyFile struct {
	path    string
	text    []byte
	notes   []string
	ignored []string
}

// KubeProxy returns the KubeProxyConfiguration that Configure has found for cmd, nil if it has found none.
func KubeProxy(cmd *cobra.Command) *KubeProxyFile {
	if cmd.Context() == nil {
		return nil
	}
	f, _ := cmd.Context().Value(kubeProxyKey{}).(*KubeProxyFile)
	return f
}

type kubeProxyKey struct{}

// Log logs once what of the file, and of the flags beside it, has no effect.
func (f *KubeProxyFile) Log(log *slog.Logger) {
	log.Info("configured by a KubeProxyConfiguration", "file", f.path)
	for _, n := range f.notes {
		log.Warn("a part of the KubeProxyConfiguration is ignored", "file", f.path, "reason", n)
	}
	if len(f.ignored) > 0 {
		log.Warn("flags beside a KubeProxyConfiguration are ignored, as by kube-proxy: write their values into the file",
			"file", f.path, "flags", strings.Join(f.ignored, " "))
	}
}

// Changed reports whether the file has other text now that is valid. A file that is not valid, or cannot be read, is
// the returned error.
func (f *KubeProxyFile) Changed(newRoot func() *cobra.Command) (bool, error) {
	text, err := readFile(f.path)
	if err != nil || bytes.Equal(text, f.text) {
		return false, err
	}
	c, err := Parse(f.path, text)
	if err == nil {
		err = errors.Join(c.Check(newRoot())...)
	}
	return err == nil, err
}

// parseKubeProxy takes over a KubeProxyConfiguration.
func (c *File) parseKubeProxy(text []byte, doc *yaml.Node) error {
	f, err := kubeproxyconfig.Parse(text, doc)
	if err != nil {
		return fmt.Errorf("%s: a KubeProxyConfiguration: %w", c.path, err)
	}
	c.kubeProxy = &KubeProxyFile{path: c.path, text: text, notes: append(f.Lenient, f.Notes...)}
	for _, s := range f.Settings {
		value := &yaml.Node{Kind: yaml.SequenceNode, Line: s.Line}
		for _, v := range s.Values {
			value.Content = append(value.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: v, Line: s.Line})
		}
		if len(s.Values) == 1 {
			value = value.Content[0]
		}
		c.settings = append(c.settings, setting{command: proxyCommand, flag: s.Flag, value: value, at: s.Path})
	}
	return nil
}

// proxyCommand is the one that a KubeProxyConfiguration configures.
const proxyCommand = "proxy"

// beside are kube-proxy's flags that count beside a file; all its others are ignored then. A kubeconfig counts if the
// file names none, which kube-proxy ignores, too.
var beside = []string{"hostname-override", "kubeconfig", "logging-format", "v", "vmodule", "log-flush-frequency", "log-text-split-stream",
	"log-text-info-buffer-size", "log-json-split-stream", "log-json-info-buffer-size"}

// replaceFlags gives the flags that kube-proxy ignores beside a file their defaults.
func (f *KubeProxyFile) replaceFlags(cmd *cobra.Command) error {
	for _, name := range append(kubeproxyconfig.FlagsBut(beside), "healthz-port", "metrics-port") {
		flag := cmd.Flags().Lookup(name)
		if flag == nil || !flag.Changed {
			continue
		}
		f.ignored = append(f.ignored, "--"+name)
		if list, ok := flag.Value.(pflag.SliceValue); ok {
			if err := list.Replace(nil); err != nil {
				return err
			}
		} else if err := flag.Value.Set(flag.DefValue); err != nil {
			return err
		}
		flag.Changed = false
	}
	return nil
}

// remember makes KubeProxy return f for cmd.
func (f *KubeProxyFile) remember(cmd *cobra.Command) {
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	cmd.SetContext(context.WithValue(ctx, kubeProxyKey{}, f))
}
