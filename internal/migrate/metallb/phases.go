package metallb

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// The annotations of the DaemonSet of MetalLB's speakers: its Phase, the number of Pods that MetalLB's controller had before, why
// the last step failed, and the update strategy that the DaemonSet had, while another one counts.
const (
	Annotation = svc.LBPhaseAnnotation
	Replicas   = svc.LBReplicasAnnotation
	Failure    = svc.LBFailureAnnotation
	Strategy   = svc.LBStrategyAnnotation
)

// Phase is how far a cluster is.
type Phase string

// The phases of a cluster. In each, one of the programs announces the addresses.
const (
	// Before has only MetalLB. The DaemonSet has no annotation then.
	Before Phase = ""
	// Beside has fairlead lb, too, which has no pool and so announces nothing.
	Beside Phase = "beside"
	// Both has the pools in fairlead lb: its nodes announce the addresses, and MetalLB's speakers still do. MetalLB's controller has
	// ended, so that one program gives out addresses. By BGP, each node announces with one of them.
	Both Phase = "both"
	// After has only fairlead lb; MetalLB's speakers have ended, or end.
	After Phase = "fairlead"
	// Returning has MetalLB, whose speakers begin to announce while fairlead lb still does; by BGP, node by node. Then fairlead lb
	// ends.
	Returning Phase = "returning"
)

var phases = []Phase{Before, Beside, Both, After, Returning}

// String names the phase for people.
func (p Phase) String() string {
	if p == Before {
		return "metallb"
	}
	return string(p)
}

// ParsePhase reads the value of the annotation, empty for none.
func ParsePhase(text string) (Phase, error) {
	if p := Phase(text); slices.Contains(phases, p) {
		return p, nil
	}
	var known []string
	for _, p := range phases[1:] {
		known = append(known, string(p))
	}
	return "", fmt.Errorf("the annotation %s is %q; want none, or one of %s", Annotation, text, strings.Join(known, ", "))
}

// Action is the kind of a Step.
type Action int

// The actions.
const (
	// Install applies the objects of fairlead lb, and waits until it is ready on every node of MetalLB's speakers.
	Install Action = iota
	// StopController ends MetalLB's controller, StartController starts it again.
	StopController
	StartController
	// ApplyPools makes MetalLB's pools pools of fairlead lb, HoldPools keeps their addresses from further Services.
	ApplyPools
	HoldPools
	// AwaitAnnounced waits until nodes of fairlead lb announce every address of a Service that MetalLB has given out.
	AwaitAnnounced
	// AwaitNoSpeakers waits until MetalLB's speakers have ended, AwaitMetalLB until all of MetalLB is ready.
	AwaitNoSpeakers
	AwaitMetalLB
	// Settle gives MetalLB's speakers the time to choose nodes and announce.
	Settle
	// ApplyPeers makes MetalLB's BGPPeers peers of fairlead lb on the nodes that are Moved, HoldPeers makes that of all its nodes, and
	// FreePeers makes them peers on every node.
	ApplyPeers
	HoldPeers
	FreePeers
	// MoveNodes changes the sessions of one node after another to fairlead lb, ReturnNodes back to MetalLB, and RenewPods gives
	// MetalLB's Pods the template that they had before, one by one.
	MoveNodes
	ReturnNodes
	RenewPods
	// Remove ends fairlead lb, gives its claims of addresses up, and deletes its objects. Services keep their addresses.
	Remove
	// Enter gives the cluster its next phase. MetalLB has no speakers in After, and all of them in every other one.
	Enter
)

// Step is one action. Each may be taken again after an interruption.
type Step struct {
	Action Action
	Phase  Phase // of Enter
}

// String describes the step while it is under way.
func (s Step) String() string {
	switch s.Action {
	case Install:
		return "starting fairlead lb beside MetalLB"
	case StopController:
		return "ending MetalLB's controller"
	case StartController:
		return "starting MetalLB's controller"
	case ApplyPools:
		return "giving MetalLB's pools to fairlead lb"
	case HoldPools:
		return "keeping the pools of fairlead lb from further Services"
	case AwaitAnnounced:
		return "waiting for fairlead lb to announce the addresses"
	case AwaitNoSpeakers:
		return "waiting for MetalLB's speakers to end"
	case AwaitMetalLB:
		return "waiting for MetalLB to be ready"
	case Settle:
		return "waiting for MetalLB's speakers to announce"
	case ApplyPeers, HoldPeers, FreePeers:
		return "giving MetalLB's BGPPeers to fairlead lb"
	case MoveNodes:
		return "changing the sessions of BGP to fairlead lb, node by node"
	case ReturnNodes:
		return "changing the sessions of BGP to MetalLB, node by node"
	case RenewPods:
		return "replacing MetalLB's speakers, node by node"
	case Remove:
		return "removing fairlead lb"
	}
	return "phase " + s.Phase.String()
}

// Steps returns the steps from a phase to the next one: towards After, or towards Before if back is set. The last one is Enter,
// but for After, whose steps wait for its end. From every phase both directions lead on. With bgp, nodes are changed one by one.
func Steps(from Phase, back, bgp bool) []Step {
	enter := Step{Action: Enter}
	next := func(p Phase, actions ...Action) (out []Step) {
		for _, a := range actions {
			out = append(out, Step{Action: a})
		}
		if enter.Phase = p; p != from {
			out = append(out, enter)
		}
		return out
	}
	switch {
	case back && from == Before:
		return nil
	case back && bgp && from == Returning:
		return next(Before, HoldPools, StartController, ReturnNodes, RenewPods, AwaitMetalLB, Remove)
	case back && from == Returning:
		return next(Before, HoldPools, StartController, AwaitMetalLB, Settle, Remove)
	case back && bgp && from == After:
		return next(Returning, HoldPeers)
	case back:
		return next(Returning)
	case bgp && from == Returning: // its speakers are replaced node by node only
		return next(Both)
	case from == Before || from == Returning:
		return next(Beside)
	case from == Beside:
		return next(Both, Install, StopController)
	case bgp && from == Both:
		return next(After, Install, StopController, ApplyPools, ApplyPeers, MoveNodes, AwaitAnnounced)
	case from == Both:
		return next(After, ApplyPools, AwaitAnnounced)
	case bgp:
		return next(After, AwaitNoSpeakers, AwaitAnnounced, FreePeers)
	}
	return next(After, AwaitNoSpeakers, AwaitAnnounced)
}

// Verification returns the steps that verify a cluster where it is, without changing it.
func Verification(at Phase) []Step {
	switch at {
	case Both:
		return []Step{{Action: AwaitAnnounced}}
	case After:
		return []Step{{Action: AwaitNoSpeakers}, {Action: AwaitAnnounced}}
	}
	return []Step{{Action: AwaitMetalLB}}
}
