package cli

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// tokenEnv is the variable of an agent's join token.
const tokenEnv = "FAIRLEAD_TOKEN"

// joinFlags name a join token.
type joinFlags struct{ text, file string }

// read returns the token, "" if none is given.
func (f joinFlags) read() (string, error) {
	text, file := f.text, f.file
	switch {
	case text != "" && file != "":
		return "", usagef("--token-file takes the place of --token: give one")
	case strings.Contains(text, "/"): // no token has one
		file = text
	case text == "" && file == "":
		text = os.Getenv(tokenEnv)
	}
	if file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("the join token: %w", err)
		}
		text = string(data)
	}
	return strings.TrimSpace(text), nil
}

func newToken(g *global) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "token",
		Short: "List, create and revoke the join tokens of nodes",
		Long: `List, create and revoke the tokens with which machines join as nodes. A token is
needed for a machine's first start alone; an agent that has joined keeps a certificate,
and renews it. Each is a Secret bootstrap-token-ID in kube-system.`,
		Example: `  fairlead token create > node-token
  fairlead token create --ttl 1h --description rack-7
  fairlead token list
  fairlead token revoke k3v9qz`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newTokenCreate(g), newTokenList(g), newTokenRevoke(g))
	return cmd
}

func newTokenCreate(g *global) *cobra.Command {
	var f clientFlags
	var life time.Duration
	var description string
	cmd := &cobra.Command{
		Use: "create", Short: "Create a join token and print it", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if life < 0 {
				return usagef("--ttl is %s: want a time such as 24h, or 0 for a token without an end", life)
			}
			cfg, _, err := f.load()
			if err != nil {
				return err
			}
			data := cfg.CAData
			if len(data) == 0 && cfg.CAFile != "" {
				if data, err = os.ReadFile(cfg.CAFile); err != nil {
					return err
				}
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
			if _, err := client.CoreV1().Secrets(join.SecretNamespace).Create(cmd.Context(), t.Object(end, description),
				metav1.CreateOptions{}); err != nil {
				return err
			}
			_, err = fmt.Fprintln(g.out, t)
			return err
		},
	}
	f.add(cmd)
	cmd.Flags().DurationVar(&life, "ttl", join.DefaultLife, "how long the token is valid; 0 for ever")
	cmd.Flags().StringVar(&description, "description", "", "what the token is for, shown by 'fairlead token list'")
	return cmd
}

func newTokenList(g *global) *cobra.Command {
	var f clientFlags
	cmd := &cobra.Command{
		Use: "list", Short: "List the join tokens, without their secrets", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, _, err := f.client()
			if err != nil {
				return err
			}
			all, err := client.CoreV1().Secrets(join.SecretNamespace).List(cmd.Context(),
				metav1.ListOptions{FieldSelector: "type=" + string(join.SecretType)})
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(g.out, 0, 0, 3, ' ', 0)
			fmt.Fprintln(w, "ID\tENDS\tDESCRIPTION")
			for i := range all.Items {
				l, err := join.List(&all.Items[i])
				if err != nil {
					continue
				}
				ends := "never"
				switch {
				case l.Expired(time.Now()):
					ends = "expired"
				case !l.End.IsZero():
					ends = l.End.Format(time.RFC3339)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\n", l.ID, ends, l.Description)
			}
			return w.Flush()
		},
	}
	f.add(cmd)
	return cmd
}

func newTokenRevoke(g *global) *cobra.Command {
	var f clientFlags
	cmd := &cobra.Command{
		Use: "revoke ID...", Short: "Revoke join tokens; nodes that have joined stay",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("which token? give an ID of 'fairlead token list'")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			client, _, err := f.client()
			if err != nil {
				return err
			}
			for _, id := range args {
				err := client.CoreV1().Secrets(join.SecretNamespace).Delete(cmd.Context(), join.SecretName(id), metav1.DeleteOptions{})
				if apierrors.IsNotFound(err) {
					return fmt.Errorf("there is no token %s: see 'fairlead token list'", id)
				}
				if err != nil {
					return err
				}
				fmt.Fprintf(g.out, "token %s revoked\n", id)
			}
			return nil
		},
	}
	f.add(cmd)
	cmd.ValidArgsFunction = completeNames(tokenIDs)
	return cmd
}
