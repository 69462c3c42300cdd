package base

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// completeTimeout bounds what a shell waits for when it completes a name from the API.
const completeTimeout = 2 * time.Second

// Lister returns the names of objects.
type Lister func(context.Context, kubernetes.Interface) ([]string, error)

// CompleteList completes the last of several values, without the given ones.
func CompleteList(values []string) cobra.CompletionFunc {
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

// CompleteNames completes the name of an object, with the credentials that the command
// would use; none where the API does not answer.
func CompleteNames(list Lister) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		f := ClientFlags{Kubeconfig: textFlag(cmd, "kubeconfig"), DataDir: textFlag(cmd, "data-dir")}
		client, _, err := f.Client()
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

// NodeNames lists the Nodes.
func NodeNames(ctx context.Context, client kubernetes.Interface) (out []string, err error) {
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range nodes.Items {
		out = append(out, nodes.Items[i].Name)
	}
	return out, nil
}
