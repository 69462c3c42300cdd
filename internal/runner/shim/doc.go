// Package shim is the parent process of a pod: it holds the pod's namespaces,
// starts its containers, records their output and exit status, and outlives the
// agent. The agent talks to it through a socket in the pod's directory (Client);
// Main is what the process runs.
//
// A shim makes no decisions: it does not restart, probe or give up. An agent that
// was restarted finds it by its directory and learns the states from Watch.
package shim

import (
	"time"

	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner/logfile"
)

// Container is a process to start: one attempt of one container. Names are
// the names in the Pod's spec.
type Container struct {
	Name    string `json:"name"`
	Attempt int    `json:"attempt"`
	// ID is the containerID without its scheme, never reused.
	ID string `json:"id"`
	// Args is the command line; Args[0] is searched in the PATH of Env.
	Args []string `json:"args"`
	Env  []string `json:"env"`
	Dir  string   `json:"dir,omitempty"`
	// User and Group, nil for the user and group of the shim.
	User  *int64 `json:"user,omitempty"`
	Group *int64 `json:"group,omitempty"`
	// Confinement, nil for none, decides over user and group in their place.
	Confinement *Confinement `json:"walls,omitempty"`
	// Cgroup is the directory of the container's control group, which exists; ""
	// for that of the shim.
	Cgroup string `json:"cgroup,omitempty"`
	// OOMScoreAdj is the preference of the kernel for killing it when memory is
	// short (proc_pid_oom_score_adj(5)).
	OOMScoreAdj int `json:"oomScoreAdj,omitempty"`
	// Programs are shown to a confined container that does not see their directories.
	Programs []Program `json:"programs,omitempty"`
	// Binds are mounted over the file system, in this order, after the programs.
	Binds []mount.Bind  `json:"binds,omitempty"`
	Log   string        `json:"log"`
	Limit logfile.Limit `json:"limit"`
	// Record is the file that State is written to, atomically, at every change.
	Record    string `json:"record"`
	TTY       bool   `json:"tty,omitempty"`
	Stdin     bool   `json:"stdin,omitempty"`
	StdinOnce bool   `json:"stdinOnce,omitempty"`
}

// Program is an executable file of the machine that a confined container sees at its own path, if its SHA-256, in hex, is
// the expected one. What the container sees is Copy, which the first attempt to use it makes.
type Program struct {
	Path   string `json:"path"`
	SHA256 string `json:"sha256"`
	Copy   string `json:"copy"`
}

// State is the state of a Container. It is written to the Record file and sent to
// watchers.
type State struct {
	Name    string `json:"name"`
	Attempt int    `json:"attempt"`
	ID      string `json:"id"`
	// Process is zero and Error set when the process could not be started.
	Process process.ID `json:"process"`
	// MountNS is the inode of its mount namespace: every process of the
	// container is in it.
	MountNS  uint64    `json:"mountNS,omitempty"`
	Boot     string    `json:"boot"`
	Started  time.Time `json:"started"`
	Exited   bool      `json:"exited,omitempty"`
	Finished time.Time `json:"finished,omitzero"`
	// ExitCode is 128 plus the signal number for a process killed by one.
	ExitCode int    `json:"exitCode,omitempty"`
	Signal   int    `json:"signal,omitempty"`
	Error    string `json:"error,omitempty"`
	// OOMKilled is set when the kernel killed in its group for lack of memory.
	OOMKilled bool `json:"oomKilled,omitempty"`
}

// Exec is a further process in a running container.
type Exec struct {
	Container string   `json:"container"`
	Args      []string `json:"args"`
	// TTY makes the given stdin the controlling terminal.
	TTY bool `json:"tty,omitempty"`
}

// request is the first message of a connection; each connection has one. The
// files named true come along with it, in this order.
type request struct {
	Op        string     `json:"op"`
	Container *Container `json:"container,omitempty"`
	Exec      *Exec      `json:"exec,omitempty"`
	// For signal, attach and resize.
	Name   string `json:"name,omitempty"`
	Signal int    `json:"signal,omitempty"`
	// All: every process of the container, not only the first one's group.
	All    bool   `json:"all,omitempty"`
	Width  uint16 `json:"width,omitempty"`
	Height uint16 `json:"height,omitempty"`

	Stdin  bool `json:"stdin,omitempty"`
	Stdout bool `json:"stdout,omitempty"`
	Stderr bool `json:"stderr,omitempty"`
}

// The operations.
const (
	opStart    = "start"
	opWatch    = "watch"
	opSignal   = "signal"
	opExec     = "exec"
	opAttach   = "attach"
	opResize   = "resize"
	opShutdown = "shutdown"
)

// response answers a request; exec and watch send several.
type response struct {
	Error string `json:"error,omitempty"`
	State *State `json:"state,omitempty"`
	// Synced ends the list of present states of a watch.
	Synced bool `json:"synced,omitempty"`
	// Exited ends an exec.
	Exited   bool `json:"exited,omitempty"`
	ExitCode int  `json:"exitCode,omitempty"`
}

const socketName = "shim.sock"
