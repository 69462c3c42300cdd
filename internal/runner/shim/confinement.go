package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/confine"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/mount"
)

// Confinement is what the processes of a container may do and see.
type Confinement struct {
	confine.Spec
	Mount mount.Confinement `json:"mount,omitzero"`
	// IDs puts each process into its own user namespace; all processes of a container
	// have the same map.
	IDs *IDs `json:"ids,omitempty"`
}

// IDs maps users and groups of a container to users and groups of the machine: First is
// Base, and so on.
type IDs struct {
	First uint32 `json:"first"`
	Base  uint32 `json:"base"`
	Size  uint32 `json:"size"`
}

// Host is the machine's user of a container's, which must be in the map.
func (w *Confinement) Host(id uint32) int {
	if w.IDs == nil {
		return int(id)
	}
	return int(w.IDs.Base + id - w.IDs.First)
}

// stage is what the process between the shim and a container's program is told: it has
// the rights to take from itself what the program is not to have.
type stage struct {
	Spec confine.Spec `json:"spec"`
	Path string       `json:"path"`
	Args []string     `json:"args"`
	Env  []string     `json:"env"`
}

// execArg, as the only argument, makes Main a stage. The files are its own.
const (
	execArg  = "-exec"
	stageFD  = 3
	failedFD = 4
)

// startConfined starts cmd behind w by way of a stage. prepare is called before the
// program runs.
func startConfined(cmd *exec.Cmd, w *Confinement, prepare func(pid int)) error {
	spec := stage{Spec: w.Spec, Path: cmd.Path, Args: cmd.Args, Env: cmd.Env}
	spec.Spec.Pdeathsig = int(cmd.SysProcAttr.Pdeathsig)
	specR, specW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer specW.Close()
	failedR, failedW, err := os.Pipe()
	if err != nil {
		_ = specR.Close()
		return err
	}
	defer failedR.Close()
	cmd.Path, cmd.Args, cmd.Env = "/proc/self/exe", []string{"pod-shim", "pod-shim", execArg}, []string{"GOMAXPROCS=1"}
	cmd.ExtraFiles = []*os.File{specR, failedW}
	a := cmd.SysProcAttr
	a.Credential = nil
	if m := w.IDs; m != nil {
		a.Cloneflags |= syscall.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: int(m.First), HostID: int(m.Base), Size: int(m.Size)}}
		a.GidMappings = a.UidMappings
		a.GidMappingsEnableSetgroups = !w.KeepGroups
		a.Credential = &syscall.Credential{Uid: m.First, Gid: m.First, NoSetGroups: true}
		if m.First != 0 { // execve would take the rights of the new namespace's creator
			a.AmbientCaps = confine.KnownCapabilities()
		}
	}
	err = cmd.Start()
	_, _ = specR.Close(), failedW.Close()
	cmd.Path = spec.Path
	if err != nil {
		return err
	}
	prepare(cmd.Process.Pid)
	deadline := time.Now().Add(startTimeout)
	_ = specW.SetWriteDeadline(deadline)
	err = json.NewEncoder(specW).Encode(spec)
	_ = specW.Close()
	_ = failedR.SetReadDeadline(deadline)
	why, readErr := io.ReadAll(io.LimitReader(failedR, 4096))
	if err = errors.Join(err, readErr); err == nil && len(why) == 0 {
		return nil // execve closed it
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if len(why) > 0 {
		return errors.New(string(why))
	}
	return fmt.Errorf("prepare the process: %w", err)
}

// becomeContainer is the stage. It returns only an exit code.
func becomeContainer() int {
	from, failed := os.NewFile(stageFD, "stage"), os.NewFile(failedFD, "failed")
	fileio.CloseOnExec(failed)
	var s stage
	err := json.NewDecoder(from).Decode(&s)
	_ = from.Close()
	if err == nil {
		err = confine.Exec(s.Spec, s.Path, s.Args, s.Env)
	}
	fmt.Fprint(failed, err)
	return 1
}
