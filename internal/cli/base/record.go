package base

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// AgentRecord is what an agent leaves in its state directory for 'fairlead status' and 'register' on
// the same machine.
type AgentRecord struct {
	Node string `json:"node"`
	// Server is the URL with which the node joined; Kubeconfig, in its place, the file of
	// --kubeconfig.
	Server     string `json:"server,omitempty"`
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// Healthz and Metrics are the addresses of the proxy's endpoints, empty where it has none.
	Healthz string `json:"healthz,omitempty"`
	Metrics string `json:"metrics,omitempty"`
	// ServicesDir is the directory whose files the agent registers programs from, empty where it has none.
	ServicesDir string `json:"servicesDir,omitempty"`
}

// AgentRecordFile returns the file of the record in a data directory.
func AgentRecordFile(dataDir string) string { return filepath.Join(NodeState(dataDir), "agent.json") }

// ReadRecord returns the record in a data directory.
func ReadRecord(dataDir string) (a AgentRecord, err error) {
	text, err := os.ReadFile(AgentRecordFile(dataDir))
	if err != nil {
		return a, err
	}
	if err := json.Unmarshal(text, &a); err != nil {
		return a, fmt.Errorf("%s: %w", AgentRecordFile(dataDir), err)
	}
	return a, nil
}
