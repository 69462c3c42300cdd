package cli

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/controller"
	"github.com/fairlead/fairlead/internal/dataplane/ipvs"
)

// flagValues are the values of the flags that have one of a few, by the flag's name;
// listValues the values of flags that have several, separated by commas.
func flagValues() map[string][]string {
	return map[string][]string{
		"log-level": base.LogLevels(), "log-format": base.LogFormats(), "output": base.Outputs(),
		"mode": parts.ModeValues(), "iptables-variant": parts.Variants(), "balance": parts.Balances(), "ipvs-scheduler": ipvs.Schedulers,
		"connect-time":      parts.ConnectTimes(),
		"forwarding":        parts.Forwardings(),
		"detect-local-mode": {"ClusterCIDR", "NodeCIDR"},
		"pod-records":       parts.PodModes(), "upstream-policy": {parts.PolicyRandom, parts.PolicySequential},
	}
}

func listValues() map[string][]string {
	return map[string][]string{"controllers": controller.Names(), "nodeport-addresses": {"primary"}}
}

// flagNames list the objects whose names flags have, by the flag's name.
func flagNames() map[string]base.Lister {
	return map[string]base.Lister{"node": base.NodeNames, "via": base.NodeNames, "node-name": base.NodeNames, "namespace": namespaceNames}
}

// addCompletion sets how a shell completes the values of the flags of cmd and of the
// commands below it.
func addCompletion(cmd *cobra.Command) {
	complete := map[string]cobra.CompletionFunc{} // by the flag's name
	for name, values := range flagValues() {
		complete[name] = cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	}
	for name, values := range listValues() {
		complete[name] = base.CompleteList(values)
	}
	for name, list := range flagNames() {
		complete[name] = base.CompleteNames(list)
	}
	registerCompletion(cmd, complete)
}

func registerCompletion(cmd *cobra.Command, complete map[string]cobra.CompletionFunc) {
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		c := complete[f.Name]
		if c == nil && strings.HasSuffix(f.Name, "-dir") {
			c = cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
		}
		if c != nil {
			_ = cmd.RegisterFlagCompletionFunc(f.Name, c) // fails for a flag that has one already
		}
	})
	for _, c := range cmd.Commands() {
		registerCompletion(c, complete)
	}
}

// nameShells makes 'completion' name the shells for one that it does not know; the library prints its help, as if that was asked for.
func nameShells(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() != "completion" {
			continue
		}
		var shells []string
		for _, shell := range c.Commands() {
			shells = append(shells, shell.Name())
		}
		c.Args = cobra.ArbitraryArgs
		c.RunE = func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return c.Help()
			}
			return base.Usagef("there is no completion for the shell %q; want %s", args[0], base.Wanted(args[0], shells))
		}
	}
}

// namespaceNames lists the Namespaces.
func namespaceNames(ctx context.Context, client kubernetes.Interface) (out []string, err error) {
	all, err := client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range all.Items {
		out = append(out, all.Items[i].Name)
	}
	return out, nil
}
