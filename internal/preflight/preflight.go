// Package preflight finds what on a machine keeps a node from working, or would surprise
// its administrator, before the first start. It changes nothing.
package preflight

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// Level is how much a Finding matters.
type Level string

// The levels. A node does not work, or not as asked, with an Error.
const (
	OK      Level = "ok"
	Warning Level = "warning"
	Error   Level = "error"
)

// Finding is what one check has found.
type Finding struct {
	Check   string `json:"check"`
	Level   Level  `json:"level"`
	Message string `json:"message"`
	// Remedy is what to do, empty for OK.
	Remedy string `json:"remedy,omitempty"`
}

// Failed reports whether one of the findings is an Error.
func Failed(findings []Finding) bool {
	return slices.ContainsFunc(findings, func(f Finding) bool { return f.Level == Error })
}

// Mode is a mode of the proxy that may be used; one of them has to work.
type Mode struct {
	Name string
	// Probe returns why the mode does not work here. It leaves nothing behind.
	Probe func(context.Context) error
}

// Feature is a part of a node without which the rest works.
type Feature struct {
	Name string
	// Probe returns why the kernel cannot have it. It leaves nothing behind.
	Probe func() error
	// Without is what a node does without it, Remedy what to do.
	Without, Remedy string
}

// Port is one that a node listens on.
type Port struct {
	// Network is tcp or udp.
	Network string
	Address netip.AddrPort
	// Flag is the one that changes it.
	Flag string
}

// Machine is what to look at. What is empty is not looked at.
type Machine struct {
	// Root is the machine's file system.
	Root fs.FS
	// StateDir is where the node keeps its state; it need not be there yet.
	StateDir string
	Modes    []Mode
	Features []Feature
	Ports    []Port
	// Ranges are the ranges of Services and Pods.
	Ranges []netip.Prefix
	// Pods are the ranges of Pods, DNSPort is where the node gets what they ask its DNS server.
	Pods    []netip.Prefix
	DNSPort uint16
	// Encryption is what --encrypt needs, nil without.
	Encryption *Encryption
	// Agent is the name of the node whose agent runs here and has the ports, "" if none does.
	Agent string
}

// Encryption is the port and the addresses of WireGuard.
type Encryption struct {
	// Port is that of UDP, Addresses are the node's own.
	Port      uint16
	Addresses []netip.Addr
}

// Check looks at all of it, in the network namespace of the calling thread.
func (m Machine) Check(ctx context.Context) []Finding {
	return slices.Concat(m.modes(ctx), m.features(), m.ports(), m.forwarding(), policies(), m.rules(ctx), firewalls(ctx),
		clocks(), m.addresses(), groups(),
		m.disk(), m.encryption())
}

func (m Machine) modes(ctx context.Context) (out []Finding) {
	var failed []error
	works := false
	for _, mode := range m.Modes {
		check := "mode " + mode.Name
		if err := mode.Probe(ctx); err != nil {
			failed = append(failed, err)
			out = append(out, Finding{check, Warning, oneLine(err),
				"load the kernel's modules or install the programs that it names, or use another --mode"})
			continue
		}
		works = true
		out = append(out, Finding{check, OK, "works", ""})
	}
	if len(failed) > 0 && !works {
		out = append(out, Finding{"modes", Error, "no mode of the proxy works here", "make one of the modes above work"})
	}
	return out
}

func (m Machine) features() (out []Finding) {
	for _, f := range m.Features {
		if err := f.Probe(); err != nil {
			out = append(out, Finding{f.Name, Warning, f.Without + ": " + oneLine(err), f.Remedy})
			continue
		}
		out = append(out, Finding{f.Name, OK, "works", ""})
	}
	return out
}

// disk is low as a node's condition DiskPressure has it (package agent), or cannot be read.
func (m Machine) disk() []Finding {
	if m.StateDir == "" {
		return nil
	}
	dir := m.StateDir
	for { // the nearest directory that is there
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			break
		}
		dir = filepath.Dir(dir)
	}
	space, err := fileio.SpaceOf(dir)
	if err != nil {
		return []Finding{{"disk", Error, fmt.Sprintf("cannot look at the disk of %s: %v", m.StateDir, err), "choose another --data-dir"}}
	}
	if why := space.Low(); why != "" {
		return []Finding{{"disk", Warning, "the disk of " + dir + " has " + why,
			"make room, or choose another --data-dir: a node under disk pressure gets no Pods"}}
	}
	return []Finding{{"disk", OK, "there is room in " + dir, ""}}
}
