package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
)

// Joining is how a machine becomes a node of its servers, or is one already.
type Joining struct {
	// Servers are URLs of servers; Kubeconfig, in their place, is a file with the node's credentials.
	Servers    []string
	Kubeconfig string
	Token      base.JoinFlags
	// ApprovalTimeout is how long a machine with a token that needs approval waits for it.
	ApprovalTimeout time.Duration
}

// Add adds the flags to a command.
func (j *Joining) Add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringSliceVar(&j.Servers, "server", nil,
		"URL of a server; of several, give one or more: the node learns of the others, and uses whichever answers")
	flags.StringVar(&j.Token.File, "token-file", "",
		"file with a join token ('fairlead token create'), only needed for the first start (default $"+base.TokenEnv+")")
	flags.StringVar(&j.Token.Text, "token", "",
		"a join token, or a file with it; others on this machine see it in the list of processes: use --token-file")
	flags.DurationVar(&j.ApprovalTimeout, "approval-timeout", join.DefaultApprovalTimeout,
		"how long to wait for an administrator's approval with a token of 'fairlead token create --needs-approval'; "+
			"a later start goes on with the same request")
	flags.StringVar(&j.Kubeconfig, "kubeconfig", "", "kubeconfig of this node, in place of --server and --token-file")
}

// Check rejects flags that cannot work.
func (j *Joining) Check() error {
	if j.ApprovalTimeout <= 0 {
		return base.Usagef("--approval-timeout is %s: want a time such as 1h", j.ApprovalTimeout)
	}
	return nil
}

// Identity returns how a node of this name reaches the server, and with which credentials. A machine that has
// joined needs no token; with one it gets a certificate for the name. The join.Node, nil with a kubeconfig,
// renews it.
func (j *Joining) Identity(ctx context.Context, log *slog.Logger, nodeName, stateDir string) (*rest.Config, *join.Node, error) {
	switch {
	case j.Kubeconfig != "" && (len(j.Servers) > 0 || j.Token != base.JoinFlags{}):
		return nil, nil, base.Usagef("--kubeconfig takes the place of --server and --token-file: give one or the other")
	case j.Kubeconfig != "":
		c := base.ClientFlags{Kubeconfig: j.Kubeconfig}
		cfg, _, err := c.Load()
		return cfg, nil, err
	case len(j.Servers) == 0:
		return nil, nil, base.Usagef("which server? give --server URL, at the first start with --token-file FILE, or --kubeconfig FILE")
	}
	token, err := j.Token.Read()
	if err != nil {
		return nil, nil, err
	}
	dir := base.NodePKI(filepath.Dir(stateDir))
	n, err := join.Open(j.Servers[0], nodeName, dir, log)
	switch {
	case err == nil && (token == "" || n.Of(token)):
		return n.Config(), n, nil
	case token == "" && errors.Is(err, fs.ErrNotExist):
		return nil, nil, base.Usagef(
			"this machine has not joined %s yet: give --token-file FILE with the output of 'fairlead token create' there",
			j.Servers[0])
	case token == "":
		return nil, nil, fmt.Errorf("the certificate of this node in %s cannot be used: %w; join again with --token-file FILE and the output of "+
			"'fairlead token create' on the server, after 'kubectl delete node %s'", dir, err, nodeName)
	}
	boot, bootErr := firstContact(ctx, j.Servers, token)
	if bootErr != nil && err == nil {
		log.Warn("the join token is not of this server's authority, or the server does not answer; using the certificate of this node",
			"err", bootErr)
		return n.Config(), n, nil
	}
	if bootErr != nil {
		return nil, nil, bootErr
	}
	if t, parseErr := join.Parse(token); parseErr == nil && t.Approval {
		n, err = join.NewApprovedNode(ctx, boot, nodeName, dir, j.ApprovalTimeout, log)
	} else {
		n, err = join.NewNode(ctx, boot, nodeName, dir, log)
	}
	if err != nil {
		return nil, nil, err
	}
	return n.Config(), n, nil
}

// firstContact returns how a machine that joins reaches the first of urls that answers.
func firstContact(ctx context.Context, urls []string, token string) (*rest.Config, error) {
	var errs []error
	for _, server := range urls {
		cfg, err := join.Config(ctx, server, token)
		if err == nil {
			return cfg, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}
