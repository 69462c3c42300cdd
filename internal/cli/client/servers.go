package client

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
)

const (
	// removalNotice bounds the wait for a removed server that knows it, and removalEnd that for its end.
	removalNotice = 10 * time.Second
	removalEnd    = 30 * time.Second
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

// serverRemoval is 'fairlead server remove'.
type serverRemoval struct {
	*base.Global
	base.ClientFlags
	name        string
	force, wipe bool
}

// NewServerRemove returns 'fairlead server remove'.
func NewServerRemove(g *base.Global) *cobra.Command {
	r := &serverRemoval{Global: g}
	cmd := &cobra.Command{
		Use: "remove NAME", Short: "Remove a server from the cluster for good",
		Long: `Remove a server from a cluster with embedded etcds. Its process ends and does not start again.
Its data directory keeps the key of the authority (pki/ca.key), the key that signs tokens
(pki/sa.key) and admin.kubeconfig, which stay valid: whoever has a copy is an administrator.
--wipe deletes them on the server's own machine, with its objects and its nightly backups; the
state of an agent in the same directory stays. There it also works after the removal. If a copy
may be in other hands, replace the authority with 'fairlead certs rotate-ca', and the key of
tokens with 'fairlead certs rotate-token-key'.

To replace a machine, remove its server and start the new one
with --join. A server that joins again under the same name or address must be removed first.`,
		Example: `  fairlead server remove server3
  fairlead server remove server3 --wipe
  fairlead server remove 192.0.2.13:2380`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return base.Usagef("which server? give a NAME of 'fairlead server members'")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			r.name = args[0]
			return r.run(cmd.Context())
		},
	}
	r.Add(cmd)
	cmd.Flags().BoolVar(&r.force, "force", false, "remove it even if the others lose the quorum")
	cmd.Flags().BoolVar(&r.wipe, "wipe", false,
		"delete the data of the removed server in --data-dir of this machine, keys and nightly backups included, once it does not run")
	cmd.ValidArgsFunction = base.CompleteNames(serverNames)
	return cmd
}

func (r *serverRemoval) run(ctx context.Context) error {
	if r.wipe {
		own, err := r.ownServer()
		if err != nil {
			return err
		}
		if own.Removed { // there is no need to ask, and perhaps nobody to be asked
			return r.wipeData(ctx)
		}
	}
	cfg, _, err := r.Load()
	if err != nil {
		return err
	}
	if r.wipe {
		if err := r.sameCluster(cfg); err != nil {
			return err
		}
	}
	err = members.Remove(ctx, cfg, r.name, r.force)
	switch {
	case err == nil:
		fmt.Fprintf(r.Out, "server %s removed\n", r.name)
	case r.wipe && (apierrors.IsNotFound(err) || !base.IsAnswer(err) && r.awaitRemoved(ctx)):
		fmt.Fprintf(r.Out, "server %s is removed\n", r.name) // earlier, or its answer was lost with it
	case apierrors.IsNotFound(err):
		return fmt.Errorf("there is no server %s: see 'fairlead server members'", r.name)
	case r.wipe && !base.IsAnswer(err):
		return fmt.Errorf("%w; nothing was deleted: name a server that runs with --kubeconfig", err)
	default:
		return err
	}
	if r.wipe {
		return r.wipeData(ctx)
	}
	fmt.Fprintf(r.Err, "its data directory still has the keys of the cluster: run 'fairlead server remove %s --wipe' on its machine; "+
		"if someone may have a copy, run 'fairlead certs rotate-ca'\n", r.name)
	return nil
}

// ownServer returns the server of the data directory of this machine. It is an error if that is another one than the
// command is for.
func (r *serverRemoval) ownServer() (members.State, error) {
	own, err := members.Load(filepath.Join(r.DataDir, "etcd"))
	what := fmt.Sprintf("%s is that of %s", r.DataDir, own.Name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		what = fmt.Sprintf("%s has no server of several", r.DataDir)
	case err != nil:
		return own, err
	case r.name == own.Name || r.name == strings.TrimPrefix(own.Peer, "https://"):
		return own, nil
	}
	return own, fmt.Errorf("nothing was removed: --wipe deletes a data directory of this machine, and %s; run it on the machine of %s: "+
		"fairlead server remove %[2]s --wipe (--data-dir names another directory), or leave out --wipe", what, r.name)
}

// sameCluster returns an error if the server of cfg is of another cluster than the data directory: a server of that may have
// the same name.
func (r *serverRemoval) sameCluster(cfg *rest.Config) error {
	asked, err := base.CAOf(cfg)
	if err != nil {
		return err
	}
	own, err := os.ReadFile(filepath.Join(r.DataDir, "pki", "ca.crt"))
	if err != nil {
		return err
	}
	theirs, err := certutil.ParseCertsPEM(asked)
	if err != nil {
		return fmt.Errorf("the authority of the kubeconfig: %w", err)
	}
	ours, err := certutil.ParseCertsPEM(own)
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Join(r.DataDir, "pki", "ca.crt"), err)
	}
	for _, c := range ours {
		if slices.ContainsFunc(theirs, c.Equal) {
			return nil
		}
	}
	return fmt.Errorf("nothing was removed: the server at %s has another authority than %s, so that is of another cluster, or of one "+
		"that has replaced its authority since; name a server of its cluster with --kubeconfig, or leave out --wipe", cfg.Host, r.DataDir)
}

// awaitRemoved waits a moment until the server of the data directory knows that it was removed, and reports whether it does.
func (r *serverRemoval) awaitRemoved(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, removalNotice)
	defer cancel()
	return lifecycle.UntilTrue(ctx, func() bool {
		own, err := members.Load(filepath.Join(r.DataDir, "etcd"))
		return err == nil && own.Removed
	}) == nil
}

// wipeData deletes the data of the removed server when it does not run any more.
func (r *serverRemoval) wipeData(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, removalEnd)
	defer cancel()
	if err := store.RemoveUnused(ctx, r.DataDir); err != nil {
		return fmt.Errorf("server %s is removed, but its data is not: %w; then repeat this command", r.name, err)
	}
	fmt.Fprintf(r.Out, "the keys, objects and backups of server %s in %s are deleted\n", r.name, r.DataDir)
	fmt.Fprintln(r.Err, "the keys of the cluster stay valid: if someone may have a copy, run 'fairlead certs rotate-ca' on another server")
	return nil
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
