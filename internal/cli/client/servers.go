package client

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/cli/base"
)

// NewServerMembers returns 'fairlead server members'.
func NewServerMembers(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var output base.OutputFlag
	local := false
	cmd := &cobra.Command{
		Use: "members", Short: "List the servers of the cluster and their state",
		Long: `List the servers of a cluster with embedded etcds: who leads, who is still a learner,
who answers, and how far the others are behind the leader. If no server answers, it asks
the etcd of this machine, which needs no quorum.`,
		Example: `  fairlead server members
  fairlead server members -o json
  fairlead server members --local --data-dir /srv/fairlead`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list, err := membersOf(cmd.Context(), &f, local)
			if err != nil {
				return err
			}
			return output.Write(g.Out, list, func(w io.Writer) error { return printMembers(w, list) })
		},
		PreRunE: func(*cobra.Command, []string) error { return output.Check() },
	}
	f.Add(cmd)
	output.Add(cmd)
	cmd.Flags().BoolVar(&local, "local", false, "only ask the etcd of the server on this machine, as its user")
	return cmd
}

func printMembers(out io.Writer, list []members.Member) error {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "NAME\tROLE\tPEER\tSERVER\tANSWERS\tSIZE\tLAG")
	for _, m := range list {
		answers, size, lag := "no", "-", "-"
		if m.Status != nil {
			answers, size = "yes", fmt.Sprintf("%.1f MiB", float64(m.Status.SizeBytes)/(1<<20))
		}
		if m.Lag != nil {
			lag = strconv.FormatInt(*m.Lag, 10)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", m.Name, m.Role, m.Peer, cmp.Or(m.Server, "-"), answers, size, lag)
	}
	return w.Flush()
}

// members asks the server, or the etcd of this machine.
func membersOf(ctx context.Context, f *base.ClientFlags, local bool) ([]members.Member, error) {
	var asked error
	if !local {
		cfg, _, err := f.Load()
		if err == nil {
			var list []members.Member
			if list, err = members.Ask(ctx, cfg); err == nil {
				return list, nil
			}
		}
		if base.IsAnswer(err) {
			return nil, err
		}
		asked = err
	}
	list, err := store.LocalMembers(ctx, f.DataDir)
	if err != nil {
		return nil, errors.Join(asked, err)
	}
	if cfg, _, err := (&base.ClientFlags{Kubeconfig: filepath.Join(f.DataDir, base.AdminKubeconfig)}).Load(); err == nil {
		members.AskEach(ctx, cfg, list)
	}
	return list, nil
}

// NewServerRemove returns 'fairlead server remove'.
func NewServerRemove(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	force := false
	cmd := &cobra.Command{
		Use: "remove NAME", Short: "Remove a server from the cluster for good",
		Long: `Remove a server from a cluster with embedded etcds. Its process ends and does not start again.
Its data directory keeps the key of the authority (pki/ca.key), the key that signs tokens
(pki/sa.key) and admin.kubeconfig, which stay valid: whoever has a copy is an administrator.
Delete the directory. If a copy may be in other hands, replace the authority with
'fairlead certs rotate-ca', and the key of tokens (docs/security.md, "Tokens of Pods").

To replace a machine, remove its server and start the new one
with --join. A server that joins again under the same name or address must be removed first.`,
		Example: `  fairlead server remove server3
  fairlead server remove 192.0.2.13:2380`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return base.Usagef("which server? give a NAME of 'fairlead server members'")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, _, err := f.Load()
			if err != nil {
				return err
			}
			err = members.Remove(cmd.Context(), cfg, args[0], force)
			if apierrors.IsNotFound(err) {
				return fmt.Errorf("there is no server %s: see 'fairlead server members'", args[0])
			}
			if err != nil {
				return err
			}
			fmt.Fprintf(g.Out, "server %s removed\n", args[0])
			fmt.Fprintln(g.Err, "its data directory still has the keys of the cluster: delete it on its machine; "+
				"if someone may have a copy, run 'fairlead certs rotate-ca'")
			return nil
		},
	}
	f.Add(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "remove it even if the others lose the quorum")
	cmd.ValidArgsFunction = base.CompleteNames(serverNames)
	return cmd
}

// serverNames lists the servers for the completion of a name.
func serverNames(ctx context.Context, c kubernetes.Interface) ([]string, error) {
	data, err := c.Discovery().RESTClient().Get().AbsPath(members.Path).Do(ctx).Raw()
	if err != nil {
		return nil, err
	}
	var list []members.Member
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, err
	}
	var names []string
	for _, m := range list {
		names = append(names, m.Name)
	}
	return names, nil
}
