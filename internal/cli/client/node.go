package client

import (
	"context"
	"fmt"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/svc"
)

// NewNode returns 'fairlead node'.
func NewNode(g *base.Global) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Lock machines out of the cluster, and let them back",
		Long: `Lock machines out of the cluster, and let them back. When a Node is deleted, by
'fairlead node remove' or 'kubectl delete node', the server refuses the certificates of its
machine, also stolen copies, until 'fairlead node admit' lets them back. The server keeps a
record of each such Node, a ConfigMap in kube-system.`,
		Example: `  fairlead node remove node7
  fairlead node removed
  fairlead node admit node7`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newNodeRemove(g), newNodeRemoved(g), newNodeAdmit(g))
	return cmd
}

// oneNode wants the name of a node.
func oneNode(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return base.Usagef("which node? give one NAME")
	}
	return nil
}

func newNodeRemove(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	cmd := &cobra.Command{
		Use: "remove NAME", Short: "Delete a Node and lock its machine out", Args: oneNode,
		Long: `Delete a Node, its Lease and the endpoints of its DNS server, and refuse the
certificates of its machine from then on. Sets replace the Pods of the node on other nodes.
The processes of its Pods run on until the machine is stopped or its agent ends. Join tokens
that the machine may know stay valid: the command lists them.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, _, err := f.Client()
			if err != nil {
				return err
			}
			r := removal{Global: g, client: client, name: args[0]}
			return r.run(cmd.Context())
		},
	}
	f.Add(cmd)
	cmd.ValidArgsFunction = base.CompleteNames(base.NodeNames)
	return cmd
}

// removal removes one node.
type removal struct {
	*base.Global
	client kubernetes.Interface
	name   string
}

func (r removal) run(ctx context.Context) error {
	nodes := r.client.CoreV1().Nodes()
	n, err := nodes.Get(ctx, r.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("there is no Node %s: 'kubectl get nodes' lists them, 'fairlead node removed' lists the removed ones", r.name)
	}
	if err != nil {
		return err
	}
	if err := nodes.Delete(ctx, r.name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &n.UID}}); err != nil {
		return err
	}
	if err := r.deleteEndpoints(ctx); err != nil {
		return err
	}
	err = r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Delete(ctx, r.name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	fmt.Fprintf(r.Out, "node %s removed\n", r.name)
	if n, err := nodes.Get(ctx, r.name, metav1.GetOptions{}); err == nil && n.DeletionTimestamp != nil {
		fmt.Fprintf(r.Err, "its Node waits for the finalizers %v, and no longer counts\n", n.Finalizers)
	}
	records, err := r.records(ctx)
	if err != nil {
		return err
	}
	if len(records) == 0 {
		fmt.Fprintln(r.Err, "the server has no record of the machine, whose credentials stay valid: no machine had registered the Node, "+
			"it is that of the server's own machine, or the server is not fairlead's")
	}
	return r.listTokens(ctx)
}

// deleteEndpoints deletes the EndpointSlices of the node's DNS server.
func (r removal) deleteEndpoints(ctx context.Context) error {
	api := r.client.DiscoveryV1().EndpointSlices(svc.SystemNamespace)
	all, err := api.List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + svc.DNSService})
	if err != nil {
		return err
	}
	for i := range all.Items {
		e := &all.Items[i]
		if e.Labels[svc.NodeLabel] != svc.NodeLabelValue(r.name) && !ofNode(e, r.name) {
			continue
		}
		if err := api.Delete(ctx, e.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// ofNode reports whether a slice has endpoints, of one node only.
func ofNode(e *discoveryv1.EndpointSlice, node string) bool {
	return len(e.Endpoints) > 0 && !slices.ContainsFunc(e.Endpoints, func(p discoveryv1.Endpoint) bool {
		return p.NodeName == nil || *p.NodeName != node
	})
}

func (r removal) records(ctx context.Context) ([]join.Removed, error) {
	return removedNodes(ctx, r.client, svc.RemovedNodeLabel+"="+svc.NodeLabelValue(r.name))
}

// listTokens names the join tokens that are valid.
func (r removal) listTokens(ctx context.Context) error {
	ids, err := tokenIDs(ctx, r.client)
	if err != nil {
		return err
	}
	if len(ids) > 0 {
		fmt.Fprintf(r.Err, "these join tokens are valid; revoke those that the machine may know: %v ('fairlead token list', "+
			"'fairlead token revoke ID')\n", ids)
	}
	return nil
}

// removedNodes lists the records of removed Nodes, the newest first.
func removedNodes(ctx context.Context, client kubernetes.Interface, selector string) (out []join.Removed, err error) {
	all, err := client.CoreV1().ConfigMaps(join.RemovedNamespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, err
	}
	for i := range all.Items {
		if r, err := join.ReadRemoved(&all.Items[i]); err == nil {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b join.Removed) int { return b.At.Compare(a.At) })
	return out, nil
}

func newNodeRemoved(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	cmd := &cobra.Command{
		Use: "removed", Short: "List the Nodes that were deleted and whose machines are locked out", Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, _, err := f.Client()
			if err != nil {
				return err
			}
			all, err := removedNodes(cmd.Context(), client, join.RemovedSelector())
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(g.Out, 0, 0, 3, ' ', 0)
			fmt.Fprintln(w, "NAME\tIDENTITY\tREMOVED\tBY")
			for _, r := range all {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.Node, identityOf(r), r.At.Format(time.RFC3339), r.By)
			}
			return w.Flush()
		},
	}
	f.Add(cmd)
	return cmd
}

// identityOf returns the identity of a record for people.
func identityOf(r join.Removed) string {
	if r.Identity == "" {
		return "none"
	}
	return r.Identity
}

func newNodeAdmit(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	identity := ""
	cmd := &cobra.Command{
		Use: "admit NAME", Short: "Let the machine of a removed Node back", Args: oneNode,
		Long: `Let the machine of a removed Node back: its certificates count again, also stolen
copies, and its agent registers the Node within seconds. A machine that was set up anew needs
a join token in place of this.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, _, err := f.Client()
			if err != nil {
				return err
			}
			all, err := removedNodes(cmd.Context(), client, svc.RemovedNodeLabel+"="+svc.NodeLabelValue(args[0]))
			if err != nil {
				return err
			}
			all = slices.DeleteFunc(all, func(r join.Removed) bool {
				return r.Node != args[0] || identity != "" && identityOf(r) != identity
			})
			switch {
			case len(all) == 0:
				return fmt.Errorf("no machine of a node %s is locked out: 'fairlead node removed' lists them", args[0])
			case len(all) > 1:
				var ids []string
				for _, r := range all {
					ids = append(ids, identityOf(r))
				}
				return base.Usagef("%d machines of the name %s were removed: give --identity with one of %v ('fairlead node removed')",
					len(all), args[0], ids)
			}
			err = client.CoreV1().ConfigMaps(join.RemovedNamespace).Delete(cmd.Context(),
				join.RemovedName(all[0].Node, all[0].Identity), metav1.DeleteOptions{})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(g.Out, "node %s admitted: its machine may register again\n", args[0])
			return err
		},
	}
	f.Add(cmd)
	cmd.Flags().StringVar(&identity, "identity", "", "which machine, if several of this name were removed ('fairlead node removed')")
	cmd.ValidArgsFunction = base.CompleteNames(removedNames)
	return cmd
}

// removedNames lists the names of removed Nodes.
func removedNames(ctx context.Context, client kubernetes.Interface) (out []string, err error) {
	all, err := removedNodes(ctx, client, join.RemovedSelector())
	for _, r := range all {
		out = append(out, r.Node)
	}
	return slices.Compact(out), err
}
