// Package base is what all commands share: the flags that every command has, usage errors,
// output formats, values of flags, the client of the API server, and the paths of files on
// this machine.
package base

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"syscall"

	"github.com/spf13/cobra"
)

// UsageError is a mistake in how the command was called.
type UsageError struct{ error }

// Usagef returns a UsageError.
func Usagef(format string, args ...any) error {
	return UsageError{fmt.Errorf(format, args...)}
}

// Streams is where a command reads and writes, so that tests can capture it.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// Global holds the flags every command has.
type Global struct {
	Streams
	LogLevel, LogFormat string

	level slog.LevelVar
}

// Quiet sets the level warn, for a command that prints its own progress, unless
// the user has chosen a level.
func (g *Global) Quiet(cmd *cobra.Command) {
	if !cmd.Flags().Changed("log-level") {
		g.LogLevel = "warn"
	}
}

// NoArgs rejects positional arguments, naming the first one.
func NoArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.HasSubCommands() {
		return unknownCommand(cmd, args[0])
	}
	return Usagef("%s takes no arguments, but got %q", cmd.CommandPath(), args[0])
}

// OneLine folds an error of several lines, as errors.Join makes them, into one.
func OneLine(err error) string {
	out := []byte(err.Error())
	for i, c := range out {
		if c == '\n' {
			out[i] = ';'
		}
	}
	return string(out)
}

// Remedy returns what to do about an error of the connection to the server, whose
// own text does not say so.
func Remedy(err error) string {
	var request *url.Error
	var invalid x509.CertificateInvalidError
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &request) && errors.Is(err, syscall.ECONNREFUSED):
		return "; no server runs there: start one with 'fairlead up' or 'fairlead server', or name another with --kubeconfig"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "; compare the clocks of this machine and the server's"
	case errors.As(err, &unknown):
		return "; the credentials are for another server: use the kubeconfig in its data directory"
	}
	return ""
}

// Version is set by the linker.
var Version = "unknown"

// exitUsage is EX_USAGE of sysexits.h.
const exitUsage = 64

// usageAnnotation marks a command whose results have the exit code of wrong usage.
const usageAnnotation = "usage-exits-with-64"

// UsageExitsWith64 makes 64 the exit code of a wrong usage of a command, for one with another meaning of the usual code.
func UsageExitsWith64(cmd *cobra.Command) { cmd.Annotations = map[string]string{usageAnnotation: ""} }

// UsageCode returns the exit code of a wrong usage of a command.
func UsageCode(cmd *cobra.Command, usual int) int {
	if _, special := cmd.Annotations[usageAnnotation]; special {
		return exitUsage
	}
	return usual
}

// ExitCodeError is the exit code of a child that has printed the reason itself.
type ExitCodeError int

func (e ExitCodeError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// AsUsage marks an error as a mistake in how the command was called.
func AsUsage(err error) error { return UsageError{err} }
