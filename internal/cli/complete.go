package cli

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/controller"
	"github.com/fairlead/fairlead/internal/dataplane/ipvs"
)

// completeTimeout bounds what a shell waits for when it completes a name from the API.
const completeTimeout = 2 * time.Second

// flagValues are the values of the flags that have one of a few, by the flag's name;
// listValues those of flags that have several, separated by commas.
func flagValues() map[string][]string {
	return map[string][]string{
		"log-level": logLevels(), "log-format": logFormats(), "output": outputs(),
		"mode": modeValues(), "iptables-variant": variants(), "balance": balances(), "ipvs-scheduler": ipvs.Schedulers,
		"detect-local-mode": {"ClusterCIDR", "NodeCIDR"},
		"pod-records":       podModes(), "upstream-policy": {policyRandom, policySequential},
	}
}

func listValues() map[string][]string {
	return map[string][]string{"controllers": controller.Names(), "nodeport-addresses": {"primary"}}
}

// flagNames list the objects whose names flags have, by the flag's name.
func flagNames() map[string]lister {
	return map[string]lister{"node": nodeNames, "via": nodeNames, "node-name": nodeNames, "namespace": namespaceNames}
}

// lister returns the names of objects.
type lister func(context.Context, kubernetes.Interface) ([]string, error)

// addCompletion sets how a shell completes the values of the flags of cmd and of the
// commands below it.
func addCompletion(cmd *cobra.Command) {
	add := func(f *pflag.Flag) {
		var complete cobra.CompletionFunc
		if values, ok := flagValues()[f.Name]; ok {
			complete = cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
		} else if values, ok := listValues()[f.Name]; ok {
			complete = completeList(values)
		} else if list, ok := flagNames()[f.Name]; ok {
			complete = completeNames(list)
		} else if strings.HasSuffix(f.Name, "-dir") {
			complete = cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
		}
		if complete != nil {
			_ = cmd.RegisterFlagCompletionFunc(f.Name, complete) // fails for a flag that has one already
		}
	}
	cmd.LocalFlags().VisitAll(add)
	for _, c := range cmd.Commands() {
		addCompletion(c)
	}
}

// completeList completes the last of several values, without those that are there.
func completeList(values []string) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
		i := strings.LastIndex(typed, ",") + 1
		var out []string
		for _, v := range values {
			if strings.HasPrefix(v, typed[i:]) && !strings.Contains(","+typed[:i], ","+v+",") {
				out = append(out, typed[:i]+v)
			}
		}
		return out, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	}
}

// completeNames completes the name of an object, with the credentials that the command
// would use; none where the API does not answer.
func completeNames(list lister) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		f := clientFlags{kubeconfig: textFlag(cmd, "kubeconfig"), dataDir: textFlag(cmd, "data-dir")}
		client, _, err := f.client()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completeTimeout)
		defer cancel()
		names, _ := list(ctx, client)
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// textFlag returns the value of a flag, "" if cmd has none of the name.
func textFlag(cmd *cobra.Command, name string) string {
	f := cmd.Flags().Lookup(name)
	if f == nil {
		return ""
	}
	return f.Value.String()
}

// nodeNames lists the Nodes.
func nodeNames(ctx context.Context, client kubernetes.Interface) (out []string, err error) {
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range nodes.Items {
		out = append(out, nodes.Items[i].Name)
	}
	return out, nil
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

// tokenIDs lists the join tokens.
func tokenIDs(ctx context.Context, client kubernetes.Interface) (out []string, err error) {
	all, err := client.CoreV1().Secrets(join.SecretNamespace).List(ctx, metav1.ListOptions{FieldSelector: "type=" + string(join.SecretType)})
	if err != nil {
		return nil, err
	}
	for i := range all.Items {
		if l, err := join.List(&all.Items[i]); err == nil {
			out = append(out, l.ID)
		}
	}
	return out, nil
}
