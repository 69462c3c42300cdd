// Package client has the commands that administer a cluster through its API or, where no
// server answers, from the files of this machine: tokens, certificates, servers, backups.
package client

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/cli/base"
)

// NewToken returns 'fairlead token'.
func NewToken(g *base.Global) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "token",
		Short: "List, create and revoke the join tokens of nodes and servers",
		Long: `List, create and revoke the tokens with which machines join as nodes. A token is
only needed for a machine's first start; an agent that has joined keeps a certificate,
and renews it. Each is a Secret bootstrap-token-ID in kube-system. A token is for one node,
or as many as --nodes allows.

With a token of --needs-approval a machine can only ask to join: its agent waits until an
administrator approves its certificate request ('kubectl get csr', 'kubectl certificate approve').

Tokens of --server are for further servers ('fairlead server --join'). Whoever has one gets
the keys of the cluster: by default they are valid for an hour and for one server, only
administrators make them, and no Secret shows them.`,
		Example: `  fairlead token create > node-token
  fairlead token create --nodes 20 > rack-token
  fairlead token create --needs-approval > request-token
  fairlead token create --server > server-token
  fairlead token create --ttl 1h --description rack-7
  fairlead token list
  fairlead token revoke k3v9qz`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newTokenCreate(g), newTokenList(g), newTokenRevoke(g))
	return cmd
}

func newTokenCreate(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var life time.Duration
	var description string
	var server, reusable, approval bool
	nodes := join.DefaultNodes
	cmd := &cobra.Command{
		Use: "create", Short: "Create a join token and print it", Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if life < 0 {
				return base.Usagef("--ttl is %s: want a time such as 24h, or 0 for a token without an end", life)
			}
			if reusable && !server {
				return base.Usagef("--reusable is for --server: give --nodes N for a token of several nodes")
			}
			if cmd.Flags().Changed("nodes") && (server || approval) {
				return base.Usagef("--nodes is for tokens of nodes that join without an approval: leave out --nodes, --server or --needs-approval")
			}
			if nodes < 1 || nodes > join.MaxNodes {
				return base.Usagef("--nodes is %d: want 1 to %d", nodes, join.MaxNodes)
			}
			if approval && server {
				return base.Usagef("--needs-approval is for the token of a node: leave out --server")
			}
			cfg, _, err := f.Load()
			if err != nil {
				return err
			}
			if server {
				if !cmd.Flags().Changed("ttl") {
					life = members.DefaultTokenLife
				}
				if life == 0 {
					return base.Usagef("--ttl 0: the token of a server needs an end")
				}
				text, err := members.CreateToken(cmd.Context(), cfg,
					members.Token{End: time.Now().Add(life), Description: description, Reusable: reusable})
				if err == nil {
					_, err = fmt.Fprintln(g.Out, text)
				}
				return err
			}
			data, err := base.CAOf(cfg)
			if err != nil {
				return err
			}
			block, _ := pem.Decode(data)
			if block == nil {
				return errors.New("the kubeconfig names no certificate authority, which a join token has the hash of")
			}
			ca, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return fmt.Errorf("the certificate authority in the kubeconfig: %w", err)
			}
			client, err := kubernetes.NewForConfig(cfg)
			if err != nil {
				return err
			}
			var end time.Time
			if life > 0 {
				end = time.Now().Add(life)
			}
			t := join.New(ca)
			t.Approval = approval
			if _, err := client.CoreV1().Secrets(join.SecretNamespace).Create(cmd.Context(), t.Object(end, nodes, description),
				metav1.CreateOptions{}); err != nil {
				return err
			}
			_, err = fmt.Fprintln(g.Out, t)
			return err
		},
	}
	f.Add(cmd)
	cmd.Flags().IntVar(&nodes, "nodes", nodes, "how many nodes may join with the token")
	cmd.Flags().DurationVar(&life, "ttl", join.DefaultLife, "how long the token is valid, 0 for no end; with --server 1h unless given")
	cmd.Flags().BoolVar(&server, "server", false, "create the token of a server in place of one of nodes")
	cmd.Flags().BoolVar(&approval, "needs-approval", false,
		"create a token with which a machine can only ask: an administrator approves its certificate request")
	cmd.Flags().BoolVar(&reusable, "reusable", false, "with --server: let any number of servers join with the token")
	cmd.Flags().StringVar(&description, "description", "", "what the token is for, shown by 'fairlead token list'")
	return cmd
}

func newTokenList(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	cmd := &cobra.Command{
		Use: "list", Short: "List the join tokens, without their secrets", Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := f.Load()
			if err != nil {
				return err
			}
			client, err := kubernetes.NewForConfig(cfg)
			if err != nil {
				return err
			}
			all, err := client.CoreV1().Secrets(join.SecretNamespace).List(cmd.Context(),
				metav1.ListOptions{FieldSelector: "type=" + string(join.SecretType)})
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(g.Out, 0, 0, 3, ' ', 0)
			fmt.Fprintln(w, "ID\tFOR\tENDS\tDESCRIPTION")
			for i := range all.Items {
				l, err := join.List(&all.Items[i])
				if err != nil {
					continue
				}
				kind := fmt.Sprintf("%d of %d nodes joined", len(l.Joined), l.Nodes)
				if l.Approval {
					kind = "nodes, by approval"
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", l.ID, kind, tokenEnd(l), l.Description)
			}
			servers, err := members.Tokens(cmd.Context(), cfg)
			if err != nil && !members.IsOnly(err) {
				return err
			}
			for _, t := range servers {
				kind := "a server"
				switch {
				case t.Reusable:
					kind = "servers"
				case t.UsedBy != "":
					kind = t.UsedBy
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", t.ID, kind, tokenEnd(join.Listed{End: t.End}), t.Description)
			}
			return w.Flush()
		},
	}
	f.Add(cmd)
	return cmd
}

// tokenEnd says when a token ends.
func tokenEnd(l join.Listed) string {
	switch {
	case l.Expired(time.Now()):
		return "expired"
	case l.End.IsZero():
		return "never"
	}
	return l.End.Format(time.RFC3339)
}

func newTokenRevoke(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	cmd := &cobra.Command{
		Use: "revoke ID...", Short: "Revoke join tokens; nodes and servers that have joined stay",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return base.Usagef("which token? give an ID of 'fairlead token list'")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, _, err := f.Load()
			if err != nil {
				return err
			}
			client, err := kubernetes.NewForConfig(cfg)
			if err != nil {
				return err
			}
			for _, id := range args {
				err := client.CoreV1().Secrets(join.SecretNamespace).Delete(cmd.Context(), join.SecretName(id), metav1.DeleteOptions{})
				if apierrors.IsNotFound(err) {
					err = members.RevokeToken(cmd.Context(), cfg, id)
				}
				if apierrors.IsNotFound(err) || members.IsOnly(err) {
					return fmt.Errorf("there is no token %s: see 'fairlead token list'", id)
				}
				if err != nil {
					return err
				}
				fmt.Fprintf(g.Out, "token %s revoked\n", id)
			}
			return nil
		},
	}
	f.Add(cmd)
	cmd.ValidArgsFunction = base.CompleteNames(tokenIDs)
	return cmd
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
