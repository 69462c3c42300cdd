// Package cli is the command line: flags, sub-commands, and the wiring of every
// component by hand. It is the only room that knows all the others.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd"
	"github.com/fairlead/fairlead/internal/cli/client/lbview"
	"github.com/fairlead/fairlead/internal/cli/client/migratecmd"
	"github.com/fairlead/fairlead/internal/cli/client/pods"
	"github.com/fairlead/fairlead/internal/cli/client/status"
	"github.com/fairlead/fairlead/internal/cli/client/uicmd"
	"github.com/fairlead/fairlead/internal/cli/config"
	"github.com/fairlead/fairlead/internal/cli/daemon"
	"github.com/fairlead/fairlead/internal/cli/host"
)

// Exit codes of the command.
const (
	exitDone   = 0
	exitFailed = 1
	exitUsage  = 2
	// exitRemoved is that of a server which others have removed from the cluster: to start it
	// again is of no use (RestartPreventExitStatus of its unit).
	exitRemoved = 3
)

// reloadPeriod is how long connections of this process may go on with a client certificate that was replaced.
const reloadPeriod = 10 * time.Second

// Main runs the command line args (without the program's name) and returns its
// exit code: 0 done, 1 failed, 2 wrong usage, 3 a server that was removed. SIGINT and SIGTERM end it cleanly;
// a second one ends it at once.
func Main(args []string) int {
	join.ReloadWithin(10 * reloadPeriod)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	go func() {
		<-ctx.Done()
		stop()
	}()
	return run(ctx, args, base.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
}

func run(ctx context.Context, args []string, std base.Streams) int {
	root := newRoot(std)
	root.SetArgs(args)
	called, err := root.ExecuteContextC(ctx)
	var usage base.UsageError
	var child base.ExitCodeError
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &child):
		return int(child)
	case errors.As(err, &usage):
		fmt.Fprintf(std.Err, "fairlead: %s\nSee 'fairlead --help' or the --help of the command.\n", base.OneLine(err))
		return base.UsageCode(called, exitUsage)
	case errors.Is(err, store.ErrRemoved):
		fmt.Fprintf(std.Err, "fairlead: %s\n", base.OneLine(err))
		return exitRemoved
	default:
		fmt.Fprintf(std.Err, "fairlead: %s%s\n", base.OneLine(err), base.Remedy(err))
		return exitFailed
	}
}

func newRoot(std base.Streams) *cobra.Command {
	g := &base.Global{Streams: std}
	root := &cobra.Command{
		Use:   "fairlead",
		Short: "Kubernetes Services without the rest of Kubernetes",
		Long: `fairlead gives a group of processes one stable name and one virtual IP, and
brings connections to a healthy process on any node. It speaks the Kubernetes
API: kubectl, client-go and Service manifests work as they are.

Standalone, 'fairlead up' runs everything on one machine, with its own API server. On a
Kubernetes cluster, 'fairlead proxy', 'dns' and 'controllers' each replace one component.

'fairlead completion bash' (zsh, fish) prints a script with which a shell completes
commands, flags and their values.`,
		Example: `  fairlead up                                   # everything on this machine
  fairlead run -l app=MyApp -p http=9376 -- ./server
  fairlead status
  fairlead proxy --kubeconfig /etc/kubernetes/proxy.conf --node-name node1`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          base.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(std.In)
	root.SetOut(std.Out)
	root.SetErr(std.Err)
	root.SetFlagErrorFunc(base.SuggestFlag)
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := config.Configure(cmd, emptyRoot); err != nil {
			return err
		}
		return g.CheckLogs()
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.PersistentFlags().StringVar(&g.LogLevel, "log-level", "info", "what to log: "+base.OneOf(base.LogLevels()))
	root.PersistentFlags().StringVar(&g.LogFormat, "log-format", "text", "how to log: "+base.OneOf(base.LogFormats()))
	root.AddCommand(
		daemon.NewUp(g), with(daemon.NewServer(g), client.NewServerMembers(g), client.NewServerRemove(g)), daemon.NewAgent(g),
		daemon.NewProxy(g, emptyRoot), daemon.NewDNS(g), daemon.NewControllers(g), daemon.NewHubbleRelay(g),
		with(daemon.NewLB(g), lbview.NewStatus(g), lbview.NewExplain(g), lbview.NewConvert(g), lbview.NewRebalance(g)),
		pods.NewRun(g), pods.NewScale(g), pods.NewRestart(g), pods.NewRm(g), pods.NewPs(g), pods.NewLogs(g),
		pods.NewRegister(g), pods.NewDeregister(g), status.NewStatus(g), status.NewTop(g),
		explaincmd.NewExplain(g), explaincmd.NewTrace(g), explaincmd.NewPlan(g), explaincmd.NewHistory(g), uicmd.NewUI(g),
		client.NewEnv(g), client.NewKubeconfig(g), client.NewToken(g), client.NewNode(g), client.NewCerts(g), config.NewCommand(g, emptyRoot),
		client.NewBackup(g), client.NewRestore(g), migratecmd.NewMigrate(g),
		host.NewCheck(g), host.NewCleanup(g), host.NewUninstall(g), newVersion(g),
	)
	config.AddFlag(root)
	addCompletion(root)
	nameShells(root)
	return root
}

// versionInfo is what 'fairlead version -o json' prints.
type versionInfo struct {
	Version    string `json:"version"`
	Kubernetes string `json:"kubernetes"` // the API's
	Go         string `json:"go"`
	Platform   string `json:"platform"`
}

func newVersion(g *base.Global) *cobra.Command {
	var output base.OutputFlag
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  fairlead version -o json",
		Args:    base.NoArgs,
		PreRunE: func(*cobra.Command, []string) error { return output.Check() },
		RunE: func(*cobra.Command, []string) error {
			info := versionInfo{
				Version: base.Version, Kubernetes: join.Version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
			}
			return output.Write(g.Out, info, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, "fairlead", base.Version)
				return err
			})
		},
	}
	output.Add(cmd)
	return cmd
}

// with adds sub-commands to a command.
func with(cmd *cobra.Command, below ...*cobra.Command) *cobra.Command {
	cmd.AddCommand(below...)
	return cmd
}
