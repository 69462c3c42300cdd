package pod

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/runner/logfile"
	"github.com/fairlead/fairlead/internal/runner/podnet"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/runner/status"
	"github.com/fairlead/fairlead/internal/svc"
)

// record is what the agent must know of a pod after a restart, stored as
// pod.json in the pod's directory. The states of its containers are in separate
// records, written by the shim.
type record struct {
	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	// IPs are allocated as long as this file names them; empty with hostNetwork
	// and once the pod has ended.
	IPs []netip.Addr `json:"ips,omitempty"`
	// Shown are the addresses in the pod's status, which keeps them after its end.
	Shown       []netip.Addr `json:"shown,omitempty"`
	Device      string       `json:"device,omitempty"`
	HostNetwork bool         `json:"hostNetwork,omitempty"`
	// HostPorts are the ports of the node that lead to the pod.
	HostPorts []svc.HostPort `json:"hostPorts,omitempty"`
	Static    bool           `json:"static,omitempty"`
	Grace     time.Duration  `json:"grace"`
	Started   time.Time      `json:"started"`
	// Failure is why the node has ended the pod, which is Failed then.
	Failure *status.Failure `json:"failure,omitempty"`
}

func readPod(p Paths) (record, error) {
	var rec record
	b, err := os.ReadFile(p.pod())
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err == nil && rec.UID == "" {
		err = errors.New("no uid in it")
	}
	if err != nil {
		return rec, fmt.Errorf("read %s: %w", p.pod(), err)
	}
	return rec, nil
}

func writePod(p Paths, rec record) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	return fileio.Replace(p.pod(), b, 0o600)
}

// readStates returns the records of a container's last two attempts, the
// current one last. A record that cannot be read counts as an attempt that
// ended in an unknown way, so that its number is not reused.
func readStates(p Paths, container string) []shim.State {
	entries, err := os.ReadDir(p.container(container))
	if err != nil {
		return nil
	}
	last := -1
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".json"); ok {
			if n, err := strconv.Atoi(name); err == nil {
				last = max(last, n)
			}
		}
	}
	var out []shim.State
	for n := max(0, last-1); n <= last; n++ {
		var st shim.State
		b, err := os.ReadFile(p.record(container, n))
		if err != nil || json.Unmarshal(b, &st) != nil {
			st = shim.State{Name: container, Attempt: n, Exited: true, ExitCode: unknownExit, Error: "its record cannot be read"}
		}
		out = append(out, st)
	}
	return out
}

// unknownExit is the exit code of a container whose end was not observed, that
// of kubelet.
const unknownExit = 137

// keptAttempts is how many attempts of a container keep their record and log:
// the current one and the one before (kubectl logs --previous).
const keptAttempts = 2

// makeContainerDir makes the directory of a container with the file of its termination
// message, and removes the files of attempts older than keptAttempts.
func makeContainerDir(p Paths, container string, attempt int) error {
	if err := os.MkdirAll(p.container(container), 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(p.container(container))
	if err != nil {
		return err
	}
	for _, e := range entries {
		head, _, _ := strings.Cut(e.Name(), ".")
		if n, err := strconv.Atoi(head); err == nil && n <= attempt-keptAttempts {
			logfile.Remove(p.Log(container, n))
			_ = os.Remove(p.record(container, n))
			_ = os.Remove(p.message(container, n))
		}
	}
	// Any user a container runs as may write its message.
	message := p.message(container, attempt)
	return errors.Join(os.WriteFile(message, nil, 0o666), os.Chmod(message, 0o666))
}

// Dirs lists the directories of pods below root.
func Dirs(root string) ([]Paths, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the pods of an earlier run: %w", err)
	}
	var out []Paths
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, Paths{filepath.Join(root, e.Name())})
		}
	}
	return out, nil
}

// EarlierHostPorts returns the host ports of the Pods below root that adopt adopts.
func EarlierHostPorts(root string) map[types.UID]podnet.HeldPorts {
	out := map[types.UID]podnet.HeldPorts{}
	dirs, err := Dirs(root)
	if err != nil {
		return out // adopt reports it
	}
	for _, d := range dirs {
		if rec, err := readPod(d); err == nil && filepath.Base(d.Dir) == string(rec.UID) { // adopt ends the others
			out[rec.UID] = rec.hostPorts()
		}
	}
	return out
}
