package cli

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

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/members"
)

// severalFlags make a server one of several with embedded etcds.
type severalFlags struct {
	token joinFlags
}

func (s *severalFlags) add(cmd *cobra.Command, o *apiserver.Options) {
	flags := cmd.Flags()
	flags.BoolVar(&o.ClusterInit, "cluster-init", false,
		"be the first of several servers, which others join; a server that was the only one keeps its objects")
	flags.StringVar(&o.Join.Server, "join", "", "URL of a server of the cluster that this one joins at its first start")
	flags.StringVar(&s.token.text, "token", "", "token of 'fairlead token create --server' for --join; others see it in the process list")
	flags.StringVar(&s.token.file, "token-file", "", "file with the token for --join, needed for the first start alone")
	flags.StringVar(&o.ServerName, "server-name", "", "name of this server among several, for good (default: the host's name)")
	flags.Uint16Var(&o.EtcdPeerPort, "etcd-peer-port", apiserver.DefaultEtcdPeerPort,
		"port at --advertise-address where the embedded etcds of several servers reach each other")
	cmd.MarkFlagsMutuallyExclusive("cluster-init", "join")
	cmd.MarkFlagsMutuallyExclusive("cluster-init", "etcd-servers")
	cmd.MarkFlagsMutuallyExclusive("join", "etcd-servers")
}

// check rejects flags that have no effect on a server that is, and stays, the only one.
func (s *severalFlags) check(cmd *cobra.Command, o *apiserver.Options) error {
	if o.ClusterInit || o.Join.Server != "" || apiserver.IsMember(o.DataDir) {
		return nil
	}
	for _, name := range []string{"token", "token-file", "server-name", "etcd-peer-port"} {
		if flag := cmd.Flags().Lookup(name); flag.Value.String() != flag.DefValue {
			return usagef("--%s has no effect without --cluster-init or --join: this would be the only server", name)
		}
	}
	return nil
}

// join prepares the data directory of a server that joins. The token is not needed once it has joined.
func (s *severalFlags) join(ctx context.Context, o *apiserver.Options) error {
	if o.Join.Server == "" {
		return nil
	}
	var err error
	if o.Join.Token, err = s.token.read(); err != nil {
		o.Log.Debug("no token", "err", err)
	}
	if bad := apiserver.Join(ctx, *o); bad != nil {
		if o.Join.Token == "" && err != nil {
			return err
		}
		return bad
	}
	return nil
}

func newServerMembers(g *global) *cobra.Command {
	var f clientFlags
	var output outputFlag
	local := false
	cmd := &cobra.Command{
		Use: "members", Short: "List the servers of the cluster, and how they are",
		Long: `List the servers of a cluster with embedded etcds: who leads, who is still a learner,
who answers, and how far the others are behind the leader. Where no server answers and
nothing else was asked for, the etcd of this machine is asked, which needs no quorum.`,
		Example: `  fairlead server members
  fairlead server members -o json
  fairlead server members --local --data-dir /srv/fairlead`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list, err := f.members(cmd.Context(), local)
			if err != nil {
				return err
			}
			return output.write(g.out, list, func(w io.Writer) error { return printMembers(w, list) })
		},
		PreRunE: func(*cobra.Command, []string) error { return output.check() },
	}
	f.add(cmd)
	output.add(cmd)
	cmd.Flags().BoolVar(&local, "local", false, "ask the etcd of the server on this machine alone, as its user")
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

// isAnswer reports whether an error is a server's decision, as opposed to a server that cannot be
// asked or cannot decide.
func isAnswer(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code < 500
}

// members asks the server, or the etcd of this machine.
func (f *clientFlags) members(ctx context.Context, local bool) ([]members.Member, error) {
	var asked error
	if !local {
		cfg, _, err := f.load()
		if err == nil {
			var list []members.Member
			if list, err = members.Ask(ctx, cfg); err == nil {
				return list, nil
			}
		}
		if isAnswer(err) {
			return nil, err
		}
		asked = err
	}
	list, err := apiserver.LocalMembers(ctx, f.dataDir)
	if err != nil {
		return nil, errors.Join(asked, err)
	}
	if cfg, _, err := (&clientFlags{kubeconfig: filepath.Join(f.dataDir, adminKubeconfig)}).load(); err == nil {
		members.AskEach(ctx, cfg, list)
	}
	return list, nil
}

func newServerRemove(g *global) *cobra.Command {
	var f clientFlags
	force := false
	cmd := &cobra.Command{
		Use: "remove NAME", Short: "Remove a server from the cluster for good",
		Long: `Remove a server from a cluster with embedded etcds. Its process ends; what its data
directory has is of no use then. To have a machine replaced, remove its server and start
the new one with --join; one that joins under the same name or address needs this, too.`,
		Example: `  fairlead server remove server3
  fairlead server remove 192.0.2.13:2380`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("which server? give a NAME of 'fairlead server members'")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, _, err := f.load()
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
			fmt.Fprintf(g.out, "server %s removed\n", args[0])
			return nil
		},
	}
	f.add(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "remove it also if the others lose the quorum by that")
	cmd.ValidArgsFunction = completeNames(serverNames)
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
