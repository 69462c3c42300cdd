package coredns

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// The annotations of CoreDNS's Deployment: its Phase, the number of Pods that it had before, and why the last step failed.
const (
	Annotation = svc.DNSPhaseAnnotation
	Replicas   = svc.DNSReplicasAnnotation
	Failure    = svc.DNSFailureAnnotation
)

// Phase is how far a cluster is.
type Phase string

// The phases of a cluster.
const (
	// Before has only CoreDNS. Its Deployment has no annotation then.
	Before Phase = ""
	// Beside has Pods of fairlead, which the Service does not select.
	Beside Phase = "beside"
	// Both has both programs behind the Service.
	Both Phase = "both"
	// Switched has only fairlead behind the Service, which does not select CoreDNS's Pods. They still answer.
	Switched Phase = "switched"
	// After has only fairlead; CoreDNS has ended, or ends.
	After Phase = "fairlead"
	// Returning has CoreDNS behind the Service. The Pods of fairlead leave it, and end.
	Returning Phase = "returning"
)

var phases = []Phase{Before, Beside, Both, Switched, After, Returning}

// String names the phase for people.
func (p Phase) String() string {
	if p == Before {
		return "coredns"
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
	// Install applies fairlead's objects, whose Pods the Service selects if Joined is set, and waits until they are ready.
	Install Action = iota
	// Compare asks both programs the same questions.
	Compare
	// AwaitFairlead waits until the Service has the addresses of fairlead's Pods, AwaitCoreDNS of CoreDNS's.
	AwaitFairlead
	AwaitCoreDNS
	// Narrow makes the Service select only fairlead's Pods, Widen what it selected before.
	Narrow
	Widen
	// Leave takes the labels that the Service selects from fairlead's Pods.
	Leave
	// Settle waits until the nodes have seen which addresses the Service no longer has, while these still answer.
	Settle
	// AwaitNoCoreDNS waits until CoreDNS's Pods have ended.
	AwaitNoCoreDNS
	// Verify asks the Service's addresses, and compares their answers with those of fairlead's Pods.
	Verify
	// Remove deletes fairlead's objects and waits until its Pods have ended.
	Remove
	// Enter gives the cluster its next phase. CoreDNS has no Pods in After, and the former number in every other one.
	Enter
)

// Step is one action. Each may be taken again after an interruption.
type Step struct {
	Action Action
	Joined bool  // of Install
	Phase  Phase // of Enter
}

// String describes the step while it is under way.
func (s Step) String() string {
	switch s.Action {
	case Install:
		if s.Joined {
			return "joining fairlead dns to the Service"
		}
		return "starting fairlead dns beside CoreDNS"
	case Compare:
		return "comparing the answers of fairlead dns with those of CoreDNS"
	case AwaitFairlead:
		return "waiting for the Service to have the addresses of fairlead dns"
	case AwaitCoreDNS:
		return "waiting for the Service to have the addresses of CoreDNS"
	case Narrow:
		return "taking the addresses of CoreDNS from the Service"
	case Widen:
		return "giving the Service its selector back"
	case Leave:
		return "taking the addresses of fairlead dns from the Service"
	case Settle:
		return "waiting until the nodes have seen the change"
	case AwaitNoCoreDNS:
		return "waiting for the Pods of CoreDNS to end"
	case Verify:
		return "asking the addresses of the Service"
	case Remove:
		return "removing fairlead dns"
	}
	return "phase " + s.Phase.String()
}

// Steps returns the steps from a phase to the next one: towards After, or towards Before if back is set. The last one is Enter,
// but for After, whose steps wait for its end. From every phase both directions lead on.
func Steps(from Phase, back bool) []Step {
	enter := func(p Phase) Step { return Step{Action: Enter, Phase: p} }
	if back {
		switch from {
		case Switched, After:
			return []Step{enter(Both)}
		case Both:
			return []Step{{Action: Widen}, {Action: AwaitCoreDNS}, enter(Returning)}
		case Returning:
			return []Step{{Action: AwaitCoreDNS}, {Action: Leave}, {Action: Settle}, {Action: Remove}, enter(Before)}
		case Beside:
			return []Step{{Action: Remove}, enter(Before)}
		}
		return nil
	}
	switch from {
	case Before, Returning:
		return []Step{enter(Beside)}
	case Beside:
		return []Step{{Action: Install}, {Action: Compare}, enter(Both)}
	case Both:
		return []Step{{Action: Install, Joined: true}, {Action: AwaitFairlead}, {Action: Compare}, enter(Switched)}
	case Switched:
		return []Step{{Action: Narrow}, {Action: AwaitFairlead}, {Action: Settle}, enter(After)}
	}
	return []Step{{Action: AwaitNoCoreDNS}, {Action: Widen}, {Action: AwaitFairlead}, {Action: Verify}}
}

// Verification returns the steps that verify a cluster where it is, without changing it.
func Verification(at Phase) []Step {
	switch at {
	case Beside:
		return []Step{{Action: Compare}}
	case Both:
		return []Step{{Action: AwaitFairlead}, {Action: Compare}}
	case Switched:
		return []Step{{Action: AwaitFairlead}, {Action: Verify}}
	case After:
		return []Step{{Action: AwaitNoCoreDNS}, {Action: AwaitFairlead}, {Action: Verify}}
	}
	return []Step{{Action: AwaitCoreDNS}}
}
