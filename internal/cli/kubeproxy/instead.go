package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/dataplane/handover"
	"github.com/fairlead/fairlead/internal/kubeproxyconfig"
)

// ShowsVersion reports that the version is all that is asked for.
func (k *Flags) ShowsVersion() bool { return k.version != "false" }

// cleanupTimeout bounds --cleanup.
const cleanupTimeout = time.Minute

// Instead does what --version, --write-config-to and --cleanup ask for, and reports whether that was all.
func (k *Flags) Instead(ctx context.Context, out io.Writer, log *slog.Logger) (done bool, err error) {
	switch {
	case k.ShowsVersion():
		_, err = fmt.Fprintln(out, "fairlead", base.Version)
	case k.writeConfig != "":
		err = k.write(out)
	case k.cleanup:
		err = cleanUp(ctx, out, log)
	default:
		return false, nil
	}
	return true, err
}

// InitOnly sets the kernel parameters of the proxy if they are all that is asked for.
func (k *Flags) InitOnly(log *slog.Logger, p *parts.ProxyFlags) (done bool) {
	if k.initOnly {
		p.InitKernel(log)
	}
	return k.initOnly
}

func (k *Flags) write(out io.Writer) error {
	cfg, err := k.Effective("")
	if err != nil {
		return err
	}
	text, err := kubeproxyconfig.Text(cfg)
	if err != nil {
		return err
	}
	if err := os.WriteFile(k.writeConfig, text, 0o644); err != nil {
		return fmt.Errorf("--write-config-to: %w", err)
	}
	_, err = fmt.Fprintln(out, "wrote the configuration to", k.writeConfig)
	return err
}

// cleanUp removes what a proxy has written. Beside a running one it changes nothing.
func cleanUp(ctx context.Context, out io.Writer, log *slog.Logger) error {
	held, err := parts.ProxyLock.Try(log)
	if err != nil {
		return fmt.Errorf("nothing was removed: %w; stop it first", err)
	}
	defer held.Close()
	ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()
	if err := handover.ToKubeProxy(ctx); err != nil {
		log.Warn("cannot hand clients over to kube-proxy", "err", err)
	}
	if err := parts.CleanUpModes(ctx, ""); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "removed: the rules of 'fairlead proxy'; 'fairlead cleanup --kube-proxy' removes the rules of kube-proxy")
	return err
}

// Effective returns the KubeProxyConfiguration that does what the flags do. mode is the mode that the proxy has chosen,
// "" before it has.
func (k *Flags) Effective(mode string) (*v1alpha1.KubeProxyConfiguration, error) {
	if mode == "" {
		mode, _ = k.flags.GetString("mode")
	}
	return kubeproxyconfig.Of(func(flag string) []string {
		switch flag {
		case "proxy-mode":
			for theirs, ours := range modeNames {
				if ours == mode {
					return []string{theirs}
				}
			}
			return nil
		case "hostname-override":
			if name, _ := k.flags.GetString("node-name"); k.changed("node-name") {
				return []string{name}
			}
			return nil
		case "iptables-sync-period":
			if k.changed("sync-period") {
				flag = "sync-period"
			}
		}
		return valuesOf(k.flags.Lookup(flag))
	})
}

// valuesOf returns the values of a flag, none if it has none.
func valuesOf(f *pflag.Flag) []string {
	if f == nil {
		return nil
	}
	if list, ok := f.Value.(pflag.SliceValue); ok {
		return list.GetSlice()
	}
	text := f.Value.String()
	if text == "" {
		return nil
	}
	if f.Name == "ipvs-exclude-cidrs" {
		return strings.Split(text, ",")
	}
	return []string{text}
}

// watchPeriod is how often a KubeProxyConfiguration is read again.
const watchPeriod = 5 * time.Second

// errChanged ends the proxy, for a service manager or a kubelet to start it again.
var errChanged = errors.New("the KubeProxyConfiguration has changed: ending, to be started again with it")

// Watch returns a component that ends with an error when the KubeProxyConfiguration has other valid text, as kube-proxy
// does. Text that is not valid is logged once, and the proxy keeps what it has.
func (k *Flags) Watch(log *slog.Logger, newRoot func() *cobra.Command) []lifecycle.Component {
	if k.file == nil {
		return nil
	}
	run := func(ctx context.Context) error {
		tick := time.NewTicker(watchPeriod)
		defer tick.Stop()
		for last := ""; ; {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
			changed, err := k.file.Changed(newRoot)
			if changed {
				return errChanged
			}
			text := ""
			if err != nil {
				text = err.Error()
			}
			if text != "" && text != last {
				log.Error("the KubeProxyConfiguration has changed and is not valid; keeping the current one", "err", err)
			}
			last = text
		}
	}
	return []lifecycle.Component{{Name: "configuration", Run: run}}
}
