package daemon

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/cli/base"
)

// severalFlags make a server one of several with embedded etcds.
type severalFlags struct {
	token base.JoinFlags
}

func (s *severalFlags) add(cmd *cobra.Command, o *apiserver.Options) {
	flags := cmd.Flags()
	flags.BoolVar(&o.ClusterInit, "cluster-init", false,
		"be the first of several servers, which others join; an existing single server keeps its objects")
	flags.StringVar(&o.Join.Server, "join", "", "URL of a server of the cluster that this one joins at its first start")
	flags.StringVar(&s.token.Text, "token", "", "token of 'fairlead token create --server' for --join; others see it in the process list")
	flags.StringVar(&s.token.File, "token-file", "", "file with the token for --join, only needed for the first start")
	flags.StringVar(&o.ServerName, "server-name", "", "name of this server among several, for good (default: the host's name)")
	flags.Uint16Var(&o.EtcdPeerPort, "etcd-peer-port", apiserver.DefaultEtcdPeerPort,
		"port at --advertise-address where the embedded etcds of several servers reach each other")
	cmd.MarkFlagsMutuallyExclusive("cluster-init", "join")
	cmd.MarkFlagsMutuallyExclusive("cluster-init", "etcd-servers")
	cmd.MarkFlagsMutuallyExclusive("join", "etcd-servers")
}

// check rejects flags that have no effect on a server that is, and stays, the only one.
func (s *severalFlags) check(cmd *cobra.Command, o *apiserver.Options) error {
	if o.ClusterInit || o.Join.Server != "" || store.IsMember(o.DataDir) {
		return nil
	}
	for _, name := range []string{"token", "token-file", "server-name", "etcd-peer-port"} {
		if flag := cmd.Flags().Lookup(name); flag.Value.String() != flag.DefValue {
			return base.Usagef("--%s has no effect without --cluster-init or --join: this would be the only server", name)
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
	if o.Join.Token, err = s.token.Read(); err != nil {
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
