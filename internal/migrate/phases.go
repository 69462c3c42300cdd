package migrate

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// The label of a Node that has its Phase, and the annotation with why the last step failed.
const (
	Label   = "fairlead.dev/proxy"
	Failure = svc.ProxyFailureAnnotation
)

// Phase is how far a node is.
type Phase string

// The phases of a node.
const (
	// Before has only kube-proxy. The Node has no label then.
	Before Phase = ""
	// Beside has both programs, and both keep their rules up to date.
	Beside Phase = "beside"
	// Switched has only fairlead proxy; the last rules of kube-proxy are still in the kernel.
	Switched Phase = "switched"
	// After has only fairlead proxy.
	After Phase = "fairlead"
	// Returning has only kube-proxy; the last rules of fairlead proxy are still in the kernel.
	Returning Phase = "returning"
)

var (
	phases = []Phase{Before, Beside, Switched, After, Returning}
	// withoutKubeProxy and withFairlead are the phases by which the DaemonSets select nodes.
	withoutKubeProxy = []string{string(After), string(Switched)}
	withFairlead     = []string{string(Beside), string(After), string(Switched)}
)

// String names the phase for people.
func (p Phase) String() string {
	if p == Before {
		return "kube-proxy"
	}
	return string(p)
}

// HasFairlead reports whether fairlead proxy runs on nodes in the phase.
func (p Phase) HasFairlead() bool { return slices.Contains(withFairlead, string(p)) }

// ParsePhase reads the value of the label, empty for none.
func ParsePhase(label string) (Phase, error) {
	if p := Phase(label); slices.Contains(phases, p) {
		return p, nil
	}
	var known []string
	for _, p := range phases[1:] {
		known = append(known, string(p))
	}
	return "", fmt.Errorf("the label %s is %q; want none, or one of %s", Label, label, strings.Join(known, ", "))
}

// Program is one of the two that write rules.
type Program string

// The programs.
const (
	KubeProxy Program = "kube-proxy"
	Fairlead  Program = "fairlead"
)

// Action is the kind of a Step.
type Action int

// The actions.
const (
	// AwaitReady waits until the program's Pod on the node is ready, AwaitGone until there is none.
	AwaitReady Action = iota
	AwaitGone
	// Check runs a Pod on the node that checks the program's rules; CleanUp one that removes them.
	Check
	CleanUp
	// Drain runs a Pod on the node that waits until no connection goes through the program any more; Undrain one that undoes what
	// Drain has changed for that.
	Drain
	Undrain
	// Enter gives the node its next phase.
	Enter
)

// Step is one action on a node. Each may be taken again after an interruption.
type Step struct {
	Action  Action
	Program Program
	// Only is set for a Check after the other program has ended: the port of health checks must answer, too.
	Only bool
	// Takes is set for a Check after which fairlead proxy keeps the clients with session affinity where kube-proxy did.
	Takes bool
	Phase Phase // of Enter
	// Again is set for a Pod that is run once more if it fails.
	Again bool
}

// String describes the step while it is under way.
func (s Step) String() string {
	name := map[Program]string{KubeProxy: "kube-proxy", Fairlead: "fairlead proxy"}[s.Program]
	switch s.Action {
	case AwaitReady:
		return "waiting for the Pod of " + name + " to be ready"
	case AwaitGone:
		return "waiting for the Pod of " + name + " to end"
	case Check:
		return "checking the rules of " + name
	case CleanUp:
		return "removing the rules of " + name
	case Drain:
		return "waiting for the connections that go through " + name
	case Undrain:
		return "undoing what the wait for connections has changed"
	}
	return "phase " + s.Phase.String()
}

// Steps returns the steps of a node from its phase to the next one: towards After, or towards Before if back is set. The last
// one is Enter; there are none at the end of the way. From every phase both directions lead on. drains is set if established
// connections end with the rules of kube-proxy (Settings.Drains).
func Steps(from Phase, back, drains bool) []Step {
	enter := func(p Phase) Step { return Step{Action: Enter, Phase: p} }
	if back {
		switch from {
		case Switched:
			if drains {
				return []Step{{Action: Undrain, Program: KubeProxy}, enter(Beside)}
			}
			return []Step{enter(Beside)}
		case After:
			return []Step{enter(Beside)}
		case Beside:
			return []Step{{Action: AwaitReady, Program: KubeProxy}, enter(Returning)}
		case Returning:
			return []Step{
				{Action: AwaitGone, Program: Fairlead}, {Action: AwaitReady, Program: KubeProxy},
				{Action: Check, Program: KubeProxy, Only: true},
				{Action: CleanUp, Program: Fairlead}, enter(Before),
			}
		}
		return nil
	}
	switch from {
	case Before, Returning:
		return []Step{enter(Beside)}
	case Beside:
		return []Step{{Action: AwaitReady, Program: Fairlead}, {Action: Check, Program: Fairlead}, enter(Switched)}
	case Switched:
		out := []Step{
			{Action: AwaitGone, Program: KubeProxy}, {Action: AwaitReady, Program: Fairlead},
			{Action: Check, Program: Fairlead, Only: true, Takes: !drains},
		}
		if drains {
			out = append(out, Step{Action: Drain, Program: KubeProxy})
		}
		// kube-proxy v1.37.2 in mode ipvs removes the chains of mode iptables first. They cannot go while the ones of mode ipvs refer to
		// them, so a first cleanup fails; it removes the latter all the same.
		return append(out, Step{Action: CleanUp, Program: KubeProxy, Again: drains}, Step{Action: Check, Program: Fairlead, Only: true},
			enter(After))
	}
	return nil
}

// Verification returns the steps that verify a node where it is, without changing it.
func Verification(at Phase) []Step {
	switch at {
	case Before, Returning:
		return []Step{{Action: Check, Program: KubeProxy, Only: true}}
	case Beside:
		return []Step{{Action: Check, Program: Fairlead}}
	}
	return []Step{{Action: Check, Program: Fairlead, Only: true}}
}
