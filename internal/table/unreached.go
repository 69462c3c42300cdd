package table

import (
	"slices"
	"unique"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// nodeName is the name of another node; the zero nodeName is none. Names are anyone's who may write slices, so they take no
// memory longer than an endpoint has them.
type nodeName = unique.Handle[string]

// nodeOf returns the node that an endpoint is on, none for the node called self.
func nodeOf(ep *discoveryv1.Endpoint, self string) nodeName {
	if ep.NodeName == nil || *ep.NodeName == "" || *ep.NodeName == self {
		return nodeName{}
	}
	return unique.Make(*ep.NodeName)
}

// SetUnreached sets the names of the nodes that this one does not reach. Their endpoints get new connections
// only where there are no others. It looks at all endpoints when the names change, which is rare.
func (b *Builder) SetUnreached(names []string) {
	unreached := make(map[nodeName]bool, len(names))
	for _, name := range names {
		unreached[unique.Make(name)] = true
	}
	before := b.unreached
	same := len(before) == len(unreached)
	for n := range unreached {
		same = same && before[n]
	}
	if same {
		return
	}
	b.unreached = unreached
	turned := func(e sliceEndpoint) bool { return e.node != nodeName{} && before[e.node] != unreached[e.node] }
	for _, s := range b.services {
		if slices.ContainsFunc(s.slices, func(l *endpointSlice) bool { return slices.ContainsFunc(l.endpoints, turned) }) {
			b.touch(s)
		}
	}
}
