// Package asnode lets a command on a node ask the API as that node, where no kubeconfig of an administrator exists.
package asnode

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
)

// Record returns what the agent of this machine has left. err is why an administrator's kubeconfig cannot be read; it is returned as it
// is if the user has named one, or if this machine is no node.
func Record(err error, f *base.ClientFlags) (a base.AgentRecord, _ error) {
	if f.Kubeconfig != "" || os.Getenv("KUBECONFIG") != "" || !errors.Is(err, base.ErrNoKubeconfig) {
		return a, err
	}
	a, missing := base.ReadRecord(f.DataDir)
	switch {
	case errors.Is(missing, fs.ErrNotExist):
		return a, err
	case errors.Is(missing, fs.ErrPermission):
		return a, fmt.Errorf("no permission to read %s: run this as root", base.AgentRecordFile(f.DataDir))
	}
	return a, missing
}

// Config returns the credentials of the node.
func Config(a *base.AgentRecord, dataDir string) (*rest.Config, error) {
	if a.Kubeconfig != "" {
		cfg, _, err := (&base.ClientFlags{Kubeconfig: a.Kubeconfig}).Load()
		if err != nil {
			return nil, err
		}
		return base.AgentConfig(cfg), nil
	}
	n, err := join.Open(a.Server, a.Node, base.NodePKI(dataDir), slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, fmt.Errorf("the node's certificate: %w", err)
	}
	return base.AgentConfig(n.Config()), nil
}
