// Package cli is the command line: flags, sub-commands, and the wiring of every
// component by hand. It is the only room that knows all the others.
package cli

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/join"
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
const reloadPeriod = 30 * time.Second

// version is set by the linker.
var version = "unknown"

// usageError is a mistake in how the command was called.
type usageError struct{ error }

func usagef(format string, args ...any) error {
	return usageError{fmt.Errorf(format, args...)}
}

// streams is where a command reads and writes, so that tests can capture it.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// global holds the flags every command has.
type global struct {
	streams
	logLevel, logFormat string
}

// quiet sets the level warn, for a command that prints its own progress, unless
// the user has chosen a level.
func (g *global) quiet(cmd *cobra.Command) {
	if !cmd.Flags().Changed("log-level") {
		g.logLevel = "warn"
	}
}

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
	return run(ctx, args, streams{in: os.Stdin, out: os.Stdout, err: os.Stderr})
}

func run(ctx context.Context, args []string, std streams) int {
	root := newRoot(std)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var usage usageError
	var child exitCodeError
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &child):
		return int(child)
	case errors.As(err, &usage):
		fmt.Fprintf(std.err, "fairlead: %s\nSee 'fairlead --help' or the --help of the command.\n", oneLine(err))
		return exitUsage
	case errors.Is(err, apiserver.ErrRemoved):
		fmt.Fprintf(std.err, "fairlead: %s\n", oneLine(err))
		return exitRemoved
	default:
		fmt.Fprintf(std.err, "fairlead: %s%s\n", oneLine(err), remedy(err))
		return exitFailed
	}
}

func newRoot(std streams) *cobra.Command {
	g := &global{streams: std}
	root := &cobra.Command{
		Use:   "fairlead",
		Short: "Kubernetes Services as a system of its own",
		Long: `fairlead gives a group of processes one stable name and one virtual IP, and
brings connections to a healthy process on any node. It speaks the Kubernetes
API: kubectl, client-go and Service manifests work as they are.

Standalone, 'fairlead up' is all of it on one machine, with an API server of its
own. On a Kubernetes cluster, 'fairlead proxy', 'dns' and 'controllers' each take
the place of one component.

'fairlead completion bash' (zsh, fish) prints what lets a shell complete commands, flags
and their values.`,
		Example: `  fairlead up                                   # everything on this machine
  fairlead run -l app=MyApp -p http=9376 -- ./server
  fairlead status
  fairlead proxy --kubeconfig /etc/kubernetes/proxy.conf --node-name node1`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(std.in)
	root.SetOut(std.out)
	root.SetErr(std.err)
	root.SetFlagErrorFunc(suggestFlag)
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := configure(cmd); err != nil {
			return err
		}
		return g.checkLogs()
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.PersistentFlags().StringVar(&g.logLevel, "log-level", "info", "what to log: "+oneOf(logLevels()))
	root.PersistentFlags().StringVar(&g.logFormat, "log-format", "text", "how to log: "+oneOf(logFormats()))
	root.AddCommand(
		newUp(g), newServer(g), newAgent(g),
		newProxy(g), newDNS(g), newControllers(g), newLB(g),
		newRun(g), newScale(g), newRestart(g), newRm(g), newPs(g), newLogs(g),
		newRegister(g), newDeregister(g), newStatus(g), newTop(g),
		newEnv(g), newKubeconfig(g), newToken(g), newCerts(g), newConfig(g), newBackup(g), newRestore(g),
		newCheck(g), newCleanup(g), newUninstall(g), newVersion(g),
	)
	addConfigFile(root)
	addCompletion(root)
	return root
}

// noArgs rejects positional arguments, naming the first one.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.HasSubCommands() {
		return unknownCommand(cmd, args[0])
	}
	return usagef("%s takes no arguments, but got %q", cmd.CommandPath(), args[0])
}

// oneLine folds an error of several lines, as errors.Join makes them, into one.
func oneLine(err error) string {
	out := []byte(err.Error())
	for i, c := range out {
		if c == '\n' {
			out[i] = ';'
		}
	}
	return string(out)
}

// remedy returns what to do about an error of the connection to the server, whose
// own text does not say so.
func remedy(err error) string {
	var request *url.Error
	var invalid x509.CertificateInvalidError
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &request) && errors.Is(err, syscall.ECONNREFUSED):
		return "; no server runs there: start one with 'fairlead up' or 'fairlead server', or name another with --kubeconfig"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "; compare the clocks of this machine and the server's"
	case errors.As(err, &unknown):
		return "; the credentials are for another server: use those in its data directory"
	}
	return ""
}

// versionInfo is what 'fairlead version -o json' prints.
type versionInfo struct {
	Version    string `json:"version"`
	Kubernetes string `json:"kubernetes"` // the API's
	Go         string `json:"go"`
	Platform   string `json:"platform"`
}

func newVersion(g *global) *cobra.Command {
	var output outputFlag
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  fairlead version -o json",
		Args:    noArgs,
		PreRunE: func(*cobra.Command, []string) error { return output.check() },
		RunE: func(*cobra.Command, []string) error {
			info := versionInfo{
				Version: version, Kubernetes: apiserver.Version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
			}
			return output.write(g.out, info, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, "fairlead", version)
				return err
			})
		},
	}
	output.add(cmd)
	return cmd
}
