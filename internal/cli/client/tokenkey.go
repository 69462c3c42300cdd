package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/apiserver/accounts"
	"github.com/fairlead/fairlead/internal/cli/base"
)

// tokenKey is 'fairlead certs rotate-token-key'.
type tokenKey struct {
	*base.Global
	base.ClientFlags
	key                                string
	status, sign, finish, abort, force bool
}

func newRotateTokenKey(g *base.Global) *cobra.Command {
	t := &tokenKey{Global: g}
	cmd := &cobra.Command{
		Use: "rotate-token-key", Short: "Replace the key that signs the tokens of ServiceAccounts while everything runs",
		Long: `Replace the key that signs the tokens of ServiceAccounts, in three stages, while everything
runs. It changes the directory pki of the server on this machine; the server follows within
a few seconds. Run each stage at every server before the next one:

1. Without a flag it makes the next key, whose tokens are valid from now on. Copy the file
   pki/sa-next.key to the other servers, and there name it with --key.
2. --sign: the next key signs. It first asks each server whether it knows that key.
3. --finish: the tokens of the old key are rejected (401). It first asks whether the new key
   signs at each server, and waits for the tokens of Pods to be new, which takes an hour.

--abort goes back before --sign at any server. After a theft of the key, take the three stages one after
the other with --force: all old tokens end at once.`,
		Example: `  fairlead certs rotate-token-key
  fairlead certs rotate-token-key --sign
  fairlead certs rotate-token-key --finish
  fairlead certs rotate-token-key --status`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return t.run(cmd.Context()) },
	}
	t.Add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&t.key, "key", "", "file with the next key (RSA or ECDSA, PEM), as another server has it")
	flags.BoolVar(&t.status, "status", false, "show which key signs, and what each server knows; change nothing")
	flags.BoolVar(&t.sign, "sign", false, "make the next key the one that signs")
	flags.BoolVar(&t.finish, "finish", false, "reject the tokens of the old key")
	flags.BoolVar(&t.abort, "abort", false, "forget the next key, which signs at no server yet")
	flags.BoolVar(&t.force, "force", false, "ask no server, and wait for no tokens: tokens of the old key may be rejected")
	return cmd
}

func (t *tokenKey) run(ctx context.Context) error {
	given := 0
	for _, b := range []bool{t.status, t.sign, t.finish, t.abort, t.key != ""} {
		if b {
			given++
		}
	}
	if given > 1 || t.status && t.force {
		return base.Usagef("give one of --key, --status, --sign, --finish and --abort; --force goes with all but --status")
	}
	dir := accounts.KeyDir(filepath.Join(t.DataDir, "pki"))
	state, err := dir.State()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: run this on the machine of a server, with its --data-dir", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: run this as the server's user", err)
	case err != nil:
		return err
	}
	switch {
	case t.status:
	case t.sign:
		if err = t.known(ctx, state.Next); err == nil {
			err = dir.Sign()
		}
	case t.finish:
		if err = t.ended(ctx, state); err == nil {
			err = dir.Finish()
		}
	case t.abort:
		if err = t.unsigned(ctx, state.Next); err == nil {
			err = dir.Abort()
		}
	default:
		var key []byte
		if t.key != "" {
			key, err = os.ReadFile(t.key)
		}
		if err == nil {
			err = dir.Publish(key)
		}
	}
	if err != nil {
		return err
	}
	if state, err = dir.State(); err != nil {
		return err
	}
	return t.print(ctx, t.Out, dir, state)
}

// ended returns an error while a server may sign with the old key, or Pods have tokens of it.
func (t *tokenKey) ended(ctx context.Context, s accounts.KeyState) error {
	if t.force || s.Stage != accounts.Signing {
		return nil
	}
	servers, err := t.askKnown(ctx, s.Signs, true)
	if err != nil {
		return err
	}
	return old(s.Since, servers, time.Now())
}

// old returns an error while Pods may have tokens of the old key, which each server signed with until since.
func old(since time.Time, servers []serverKeys, now time.Time) error {
	at := "this server"
	for _, s := range servers {
		if s.since.After(since) {
			at, since = "server "+s.at, s.since
		}
	}
	if left := accounts.TokenLife - now.Sub(since); left > 0 {
		return fmt.Errorf("the new key signs at %s since %s: Pods may have tokens of the old one for another %s; wait, or give --force",
			at, since.Format(time.RFC3339), left.Round(time.Minute))
	}
	return nil
}

// known returns an error unless every server of the cluster knows a key.
func (t *tokenKey) known(ctx context.Context, id string) error {
	if t.force || id == "" {
		return nil
	}
	_, err := t.askKnown(ctx, id, false)
	return err
}

// askKnown asks the servers of the cluster, and returns an error unless every one knows a key, or signs with it.
func (t *tokenKey) askKnown(ctx context.Context, id string, signs bool) ([]serverKeys, error) {
	servers, err := t.ask(ctx)
	if err != nil {
		return nil, fmt.Errorf("cannot ask the servers which keys they know: %w; --force does not ask", err)
	}
	var missing []string
	for _, s := range servers {
		switch {
		case s.err != nil:
			missing = append(missing, fmt.Sprintf("%s (%s)", s.at, base.OneLine(s.err)))
		case !s.has(id, signs):
			missing = append(missing, s.at)
		}
	}
	switch {
	case len(missing) == 0:
		return servers, nil
	case signs:
		return nil, fmt.Errorf("these servers do not sign with key %s: %s; run --sign there, or wait a few seconds for a server that has "+
			"just begun", id, strings.Join(missing, ", "))
	}
	return nil, fmt.Errorf("these servers do not know key %s: %s; copy %s there and run 'fairlead certs rotate-token-key --key FILE', "+
		"or wait a few seconds for a server that has just begun", id, strings.Join(missing, ", "), accounts.NextFile)
}

// unsigned returns an error unless no server of the cluster signs with the next key: its tokens would be rejected here.
func (t *tokenKey) unsigned(ctx context.Context, next string) error {
	if t.force || next == "" {
		return nil
	}
	servers, err := t.ask(ctx)
	if err != nil {
		return fmt.Errorf("cannot ask the servers which key signs: %w; --force does not ask", err)
	}
	return signsNowhere(servers, next)
}

func signsNowhere(servers []serverKeys, next string) error {
	var sign, silent []string
	for _, s := range servers {
		switch {
		case s.err != nil:
			silent = append(silent, fmt.Sprintf("%s (%s)", s.at, base.OneLine(s.err)))
		case s.has(next, true):
			sign = append(sign, s.at)
		}
	}
	switch {
	case len(sign) > 0:
		return fmt.Errorf("these servers sign with key %s already: %s; go on with --sign here", next, strings.Join(sign, ", "))
	case len(silent) > 0:
		return fmt.Errorf("these servers may sign with key %s, and cannot be asked: %s; start them, or give --force", next,
			strings.Join(silent, ", "))
	}
	return nil
}

// ask asks each server of the cluster for its keys.
func (t *tokenKey) ask(ctx context.Context) ([]serverKeys, error) {
	cfg, _, err := t.Load()
	if err != nil {
		return nil, err
	}
	return keysOfServers(ctx, cfg)
}

func (t *tokenKey) print(ctx context.Context, out io.Writer, dir accounts.KeyDir, s accounts.KeyState) error {
	fmt.Fprintf(out, "key %s signs, since %s\n", s.Signs, s.Since.Format(time.RFC3339))
	switch s.Stage {
	case accounts.NotRotating:
		fmt.Fprintln(out, "no key of tokens is being replaced here")
	case accounts.Published:
		fmt.Fprintf(out, "the tokens of key %s are valid too; give %s to all servers (--key FILE there), then run --sign at each\n", s.Next,
			filepath.Join(string(dir), accounts.NextFile))
	case accounts.Signing:
		fmt.Fprintf(out, "the tokens of the old key %s are still valid; when all servers sign with the new key and tokens are new, "+
			"run --finish\n", s.Old)
	}
	if !t.status {
		return nil
	}
	servers, err := t.ask(ctx)
	if err != nil {
		fmt.Fprintln(out, "! the servers were not asked:", base.OneLine(err))
		return nil
	}
	for _, x := range servers {
		if x.err != nil {
			fmt.Fprintf(out, "! server %s does not answer: %s\n", x.at, base.OneLine(x.err))
			continue
		}
		fmt.Fprintf(out, "server %s: %s\n", x.at, strings.Join(x.ids, ", "))
	}
	return nil
}
