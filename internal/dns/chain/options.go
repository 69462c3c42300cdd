package chain

import (
	"errors"
	"log/slog"
	"os"

	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/corefile"
)

// Options are the options of a Server. Plan and Log are required.
type Options struct {
	Plan *corefile.Plan
	// File is read again when it changes, if it has the plugin reload; empty for never.
	File string
	// Reload, if not nil, has File read again for each value, though it has not changed.
	Reload <-chan os.Signal
	// Client returns the client of a kubeconfig and a context; both are empty for the one of the
	// command line.
	Client func(kubeconfig, context string) (kubernetes.Interface, error)
	// Version is the answer to version.bind, and a label of coredns_build_info.
	Version string
	Log     *slog.Logger
}

// errNoClient is the error of a Corefile with the plugin kubernetes where no client is given.
var errNoClient = errors.New("the plugin kubernetes needs an API server; give its kubeconfig with --kubeconfig")
