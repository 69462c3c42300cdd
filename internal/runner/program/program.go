// Package program follows programs that this node has not started.
package program

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/systemd"
)

// State is the state of a program as far as the node can see it.
type State struct {
	// Up reports whether the program runs, as far as its source can tell.
	Up bool
	// Unknown reports that the source cannot tell.
	Unknown bool
	// Stopping names this run of the program while systemd stops it, as systemd.State has it.
	Stopping string
	// Reason is one word, and Message a line about why the program is not up.
	Reason, Message string
}

// Watcher follows a program until ctx ends. It calls report with the first state and
// with each change; report must not block.
type Watcher func(ctx context.Context, report func(State))

// Always is the Watcher of a program of which nothing is known but what its check says.
func Always(ctx context.Context, report func(State)) {
	report(State{Up: true})
	<-ctx.Done()
}

// Unit returns the Watcher of a unit of systemd.
func Unit(bus *systemd.Bus, name string) Watcher {
	return func(ctx context.Context, report func(State)) {
		defer bus.Watch(name, func(s systemd.State) { report(unitState(name, s)) })()
		<-ctx.Done()
	}
}

func unitState(name string, s systemd.State) State {
	switch {
	case s.Err != nil:
		return State{Unknown: true, Reason: "UnitUnknown", Message: s.Err.Error()}
	case s.Up():
		return State{Up: true}
	case s.Missing:
		return State{Reason: "UnitNotFound", Message: "systemd knows no unit " + name}
	case s.Active == "":
		return State{Unknown: true, Reason: "UnitUnknown", Message: "systemd gave no state of the unit " + name}
	}
	return State{
		Stopping: s.Stopping, Reason: "Unit" + strings.ToUpper(s.Active[:1]) + s.Active[1:], Message: "the unit " + name + " is " + s.Active,
	}
}

// poll is how often a file is read that names no living process, and pollAlive that of
// one which does: its end is seen at once, another process in the file a little later.
const (
	poll      = 100 * time.Millisecond
	pollAlive = time.Second
)

// maxPIDFile is the number of bytes read of a file, which the program's user writes.
const maxPIDFile = 4 << 10

// PIDFile returns the Watcher of the process whose ID is in a file.
func PIDFile(path string) Watcher {
	return func(ctx context.Context, report func(State)) {
		var last *State
		tell := func(s State) {
			if last == nil || *last != s {
				last = &s
				report(s)
			}
		}
		for ctx.Err() == nil {
			id, err := readPIDFile(path)
			if err != nil {
				tell(State{Reason: "ProcessNotFound", Message: err.Error()})
				wait(ctx, poll)
				continue
			}
			tell(State{Up: true})
			limited, cancel := context.WithTimeout(ctx, pollAlive)
			err = id.Wait(limited)
			cancel()
			if err != nil && limited.Err() == nil { // a kernel without pidfds
				wait(ctx, poll)
			}
		}
	}
}

// readPIDFile returns the living process that the file names.
func readPIDFile(path string) (process.ID, error) {
	text, err := fileio.ReadRegular(path, maxPIDFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return process.ID{}, fmt.Errorf("there is no %s", path)
	case err != nil:
		return process.ID{}, fmt.Errorf("%s: %w", path, err)
	}
	line, _, _ := strings.Cut(string(text), "\n") // PostgreSQL's has further lines
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil || pid <= 0 {
		return process.ID{}, fmt.Errorf("%s: the first line is not the ID of a process", path)
	}
	id, err := process.Find(pid)
	if err != nil || !id.Alive() {
		return process.ID{}, fmt.Errorf("the process %d of %s has ended", pid, path)
	}
	return id, nil
}

func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
