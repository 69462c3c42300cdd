package daemon

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/chain"
)

// beside are the flags of 'dns' that stand beside --corefile; the file decides all else.
var beside = []string{"corefile", "kubeconfig", "data-dir"}

// checkCorefile refuses flags whose subject the Corefile decides.
func checkCorefile(cmd *cobra.Command) (err error) {
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if err == nil && f.Changed && !slices.Contains(beside, f.Name) {
			err = base.Usagef("--%s does not go with --corefile, which decides it; remove the flag, or change the file", f.Name)
		}
	})
	return err
}

// runCorefile serves what the Corefile asks for until ctx is done.
func (c *dnsCommand) runCorefile(ctx context.Context, log *slog.Logger) error {
	plan, err := corefile.Load(c.corefile)
	if err != nil {
		return base.AsUsage(err)
	}
	// The signals are CoreDNS's: SIGUSR1 reads the file again, SIGHUP does nothing.
	again := make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGUSR1)
	defer signal.Stop(again)
	signal.Ignore(syscall.SIGHUP)
	server, err := chain.New(chain.Options{
		Plan: plan, File: c.corefile, Reload: again, Client: c.clientOf, Version: base.Version, Log: log,
	})
	if err != nil {
		return err
	}
	return lifecycle.RunAll(ctx, log, func() {}, lifecycle.Component{Name: "dns", Run: server.Run})
}

// clientOf returns the client of a kubeconfig that the Corefile names, or of the command line.
func (c *dnsCommand) clientOf(kubeconfig, name string) (kubernetes.Interface, error) {
	var cfg *rest.Config
	var err error
	if kubeconfig == "" {
		cfg, _, err = c.client.Load()
	} else {
		cfg, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
			&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}, &clientcmd.ConfigOverrides{CurrentContext: name}).ClientConfig()
	}
	if err != nil {
		return nil, err
	}
	cfg = base.AgentConfig(cfg)
	cfg.UserAgent = "fairlead-dns/" + base.Version
	cfg.DisableCompression = true // see dnsCommand.run
	return kubernetes.NewForConfig(cfg)
}
