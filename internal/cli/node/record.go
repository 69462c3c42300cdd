package node

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// WriteRecord leaves the record of this agent.
func (f *Flags) WriteRecord(stateDir, server, kubeconfig string) error {
	if kubeconfig != "" {
		var err error
		if kubeconfig, err = filepath.Abs(kubeconfig); err != nil {
			return err
		}
	}
	services := f.Host.servicesDir
	if services != "" {
		var err error
		if services, err = filepath.Abs(services); err != nil {
			return err
		}
	}
	text, err := json.Marshal(base.AgentRecord{
		Node: f.Host.Name, Server: server, Kubeconfig: kubeconfig, Healthz: f.Proxy.Healthz, Metrics: f.Proxy.Metrics, ServicesDir: services,
	})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(stateDir, 0o700); err != nil {
		return err
	}
	return fileio.Replace(base.AgentRecordFile(filepath.Dir(stateDir)), text, 0o600)
}
