package client

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/cli/base"
)

// NewBackup returns 'fairlead backup'.
func NewBackup(g *base.Global) *cobra.Command {
	var dataDir string
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Back a server up: its objects and its keys, in one file",
		Long: `Write everything that a server needs to come back into one file, with mode 0600: a consistent
snapshot of the embedded etcd, the certificates and keys, and the version. Run it on the
server's machine, whether the server runs or not.

The file has the keys of the cluster's certificate authority: keep it as secret as they are.
A server makes such a file each night in the directory backups of its data directory.`,
		Example: `  fairlead backup /mnt/backup/fairlead-$(date +%F).tar
  fairlead backup --data-dir /srv/fairlead today.tar`,
		Args: oneFile("backup", "today.tar"),
		RunE: func(cmd *cobra.Command, args []string) error {
			log, err := g.Logger()
			if err != nil {
				return err
			}
			file, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			m, err := store.Backup(cmd.Context(), dataDir, file, base.Version, log)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(g.Out, "%s has %d objects at revision %d, and %d files beside them; keep it secret: it has the cluster's keys\n",
				args[0], m.Keys, m.Revision, len(m.Parts)-1)
			return err
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", base.DefaultDataDir(), "the server's directory")
	return cmd
}

// NewRestore returns 'fairlead restore'.
func NewRestore(g *base.Global) *cobra.Command {
	var dataDir string
	var dryRun, intactOnly bool
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Restore a server from a backup",
		Long: `Write what 'fairlead backup' has saved into a data directory that has no server yet, on
this machine or another one. Then start the server as before. All parts of the file are
checked first; nothing is written if one is damaged. Other files in the directory, such as
the nightly backups and the state of an agent, stay. If objects in the backup are encrypted,
the server needs the file of --encryption-provider-config, which is not in the backup.`,
		Example: `  fairlead restore --dry-run today.tar
  mkdir /var/lib/fairlead.old && mv /var/lib/fairlead/etcd /var/lib/fairlead/pki /var/lib/fairlead.old/
  fairlead restore today.tar && fairlead server`,
		Args: oneFile("restore", "today.tar"),
		RunE: func(_ *cobra.Command, args []string) error {
			m, err := store.CheckBackup(args[0])
			if m != nil {
				fmt.Fprintf(g.Out, "%s: made by fairlead %s at %s, %d objects at revision %d\n", args[0], m.Version,
					m.Created.Format(time.RFC3339), m.Keys, m.Revision)
			}
			var damage *store.DamagedBackupError
			if err != nil && (dryRun || !intactOnly || !errors.As(err, &damage)) {
				return err
			}
			if dryRun {
				fmt.Fprintln(g.Out, "all its parts are intact; nothing was changed")
				return nil
			}
			if _, err := store.Restore(args[0], dataDir, intactOnly); err != nil {
				return err
			}
			if damage != nil {
				fmt.Fprintf(g.Err, "not restored, because damaged, or useless without a damaged part: %v\n", damage.LeftOut())
			}
			kinds, err := store.EncryptedKinds(dataDir, store.DefaultPrefix)
			if err != nil {
				return fmt.Errorf("restored into %s, but the store cannot be read: %w", dataDir, err)
			}
			how := ""
			if len(kinds) > 0 {
				how = " with --encryption-provider-config and its file, which no backup has: there are encrypted " +
					strings.Join(kinds, ", ")
			}
			_, err = fmt.Fprintf(g.Out, "restored into %s: start its server%s\n", dataDir, how)
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&dataDir, "data-dir", base.DefaultDataDir(), "directory to restore into, which has neither keys nor objects")
	flags.BoolVar(&dryRun, "dry-run", false, "check the file and write nothing")
	flags.BoolVar(&intactOnly, "intact-only", false,
		"restore the intact parts: without its objects a server still has its keys, so that nodes need not join again")
	return cmd
}

// oneFile requires a file's name as the only argument.
func oneFile(command, example string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return base.Usagef("which file? for example: fairlead %s %s", command, example)
		}
		return nil
	}
}
