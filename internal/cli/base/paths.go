package base

import (
	"fmt"
	"os"
	"path/filepath"
)

// NodeState is the directory of an agent's state.
func NodeState(dataDir string) string { return filepath.Join(dataDir, "agent") }

// NodePKI is the directory of a node's certificate.
func NodePKI(dataDir string) string { return filepath.Join(dataDir, "node-pki") }

// AdminKubeconfig is the name of the administrator's kubeconfig in a data
// directory.
const AdminKubeconfig = "admin.kubeconfig"

// SystemDataDir, SystemConfigDir and SystemServicesDir are root's.
const (
	SystemDataDir     = "/var/lib/fairlead"
	SystemConfigDir   = "/etc/fairlead"
	SystemServicesDir = SystemConfigDir + "/services.d"
)

// DefaultDataDir is /var/lib/fairlead for root, and the user's state directory
// for others (XDG base directory specification).
func DefaultDataDir() string {
	if os.Geteuid() == 0 && !MappedRoot() {
		return SystemDataDir
	}
	state := os.Getenv("XDG_STATE_HOME")
	if state == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "fairlead-data"
		}
		state = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(state, "fairlead")
}

// MappedRoot reports whether this process is root only in a user namespace in
// which 0 stands for an ordinary user (user_namespaces(7)).
func MappedRoot() bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return false
	}
	var in, out, size uint32
	_, err = fmt.Sscan(string(text), &in, &out, &size)
	return err == nil && in == 0 && out != 0
}

// SystemConfigFile is read where --config is not given, if it is there.
const SystemConfigFile = SystemConfigDir + "/config.yaml"

// DefaultServicesDir is that of root; another user's 'fairlead up' has none.
func DefaultServicesDir() string {
	if os.Geteuid() == 0 && !MappedRoot() {
		return SystemServicesDir
	}
	return ""
}

// ServersRecord is the file of a data directory with the servers that a node knows.
const ServersRecord = "servers.json"

// ClusterRecord is the file of a data directory with what the server has published.
const ClusterRecord = "cluster.json"
