package podnet

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/events"
)

// PodsRouted is the Node condition that is True while the node has a route to the Pods of each other node,
// PodsMasqueraded the one that is True while packets that Pods send out of the cluster get the node's address, and
// PodsSourcesChecked the one that is True while what Pods send from other addresses than their own is dropped.
const (
	PodsRouted      corev1.NodeConditionType = "fairlead.dev/PodsRouted"
	PodsMasqueraded corev1.NodeConditionType = "fairlead.dev/PodsMasqueraded"

	PodsSourcesChecked corev1.NodeConditionType = "fairlead.dev/PodsSourcesChecked"
)

const (
	reasonRouteRejected  = "RouteRejected"
	reasonNotMasqueraded = "NotMasqueraded"
	notMasqueraded       = "packets that pods of this node send out of the cluster keep the pods' addresses, and get no answers " +
		"unless routers outside know the pods' ranges"
	reasonNotChecked = "SourcesNotChecked"
	notChecked       = "pods of this node can send with source addresses that are not their own"
)

// maxReported bounds how many other nodes the condition names.
const maxReported = 5

// ErrNoRange is what Healthy returns before the node has addresses for Pods, as at its start.
var ErrNoRange = errors.New("no range of pod addresses is known for this node yet (spec.podCIDRs of its Node)")

// Healthy returns why the node cannot connect Pods, nil if it can.
func (n *Network) Healthy() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.applied && n.err == nil {
		return ErrNoRange
	}
	return n.err
}

// Condition returns the Node condition PodsRouted.
func (n *Network) Condition() corev1.NodeCondition {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := corev1.NodeCondition{Type: PodsRouted, Status: corev1.ConditionTrue, Reason: "Routed", Message: "all other nodes' pods have routes"}
	switch names := slices.Sorted(maps.Keys(n.problems)); {
	case len(names) > 0:
		var texts []string
		for _, name := range names[:min(len(names), maxReported)] {
			texts = append(texts, fmt.Sprintf("node %s: %s", name, n.problems[name]))
		}
		if more := len(names) - len(texts); more > 0 {
			texts = append(texts, fmt.Sprintf("and %d more nodes", more))
		}
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, reasonRouteRejected, strings.Join(texts, "; ")
	case !n.synced || !n.applied:
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, "Starting", "waiting for the Nodes"
	case n.o.Plain && len(n.routed.withoutKey()) > 0:
		c.Message += ", without encryption where the node has no key of WireGuard: " + events.Abbreviate(n.routed.withoutKey())
	}
	return c
}

// sightings are the problems with other nodes by their names.
type sightings map[string]*sighting

type sighting struct {
	text     string
	since    time.Time
	reported bool
}

// follow takes in the problems of now, and calls report once for each that has lasted for reportAfter.
func (s sightings) follow(now time.Time, problems map[string]string, report func(node, problem string)) {
	maps.DeleteFunc(s, func(name string, known *sighting) bool { return problems[name] != known.text })
	for name, text := range problems {
		known := s[name]
		if known == nil {
			known = &sighting{text: text, since: now}
			s[name] = known
		}
		if !known.reported && now.Sub(known.since) >= reportAfter {
			known.reported = true
			report(name, text)
		}
	}
}

// Masquerading returns the Node condition PodsMasqueraded.
func (n *Network) Masquerading() corev1.NodeCondition {
	c := corev1.NodeCondition{Type: PodsMasqueraded, Status: corev1.ConditionTrue, Reason: "Masqueraded",
		Message: "packets that pods send out of the cluster get the node's address"}
	unsupported := n.masquerade.unsupportedNow()
	switch {
	case unsupported != nil:
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, reasonNotMasqueraded, notMasqueraded+": "+unsupported.Error()
	case !n.Applied():
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, "Starting", "waiting for the Nodes"
	}
	return c
}
