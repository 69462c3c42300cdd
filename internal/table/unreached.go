package table

import (
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// nodeID stands for the name of another node; 0 for none. It costs an endpoint no memory, beside its State.
type nodeID uint32

// otherNodes are the names of the nodes that endpoints are on, and which of them this node does not reach.
type otherNodes struct {
	ids    map[string]nodeID // of every name seen
	absent map[nodeID]bool
}

// id returns the number of a name.
func (o *otherNodes) id(name string) nodeID {
	id, known := o.ids[name]
	if !known {
		if o.ids == nil {
			o.ids = map[string]nodeID{}
		}
		id = nodeID(len(o.ids) + 1) //nolint:gosec // the number of nodes
		o.ids[name] = id
	}
	return id
}

// of returns the number of the node that an endpoint is on, 0 for none and for this node.
func (o *otherNodes) of(ep *discoveryv1.Endpoint, self string) nodeID {
	if ep.NodeName == nil || *ep.NodeName == "" || *ep.NodeName == self {
		return 0
	}
	return o.id(*ep.NodeName)
}

// unreached reports whether this node does not reach the node.
func (o *otherNodes) unreached(id nodeID) bool { return id != 0 && o.absent[id] }

// SetUnreached sets the names of the nodes that this one does not reach. Their endpoints get new connections
// only where there are no others. It looks at all endpoints when the names change, which is rare.
func (b *Builder) SetUnreached(names []string) {
	absent := make(map[nodeID]bool, len(names))
	for _, name := range names {
		absent[b.others.id(name)] = true
	}
	before := b.others.absent
	b.others.absent = absent
	turned := func(e sliceEndpoint) bool { return e.node != 0 && before[e.node] != absent[e.node] }
	same := len(before) == len(absent)
	for id := range absent {
		same = same && before[id]
	}
	if same {
		return
	}
	for _, s := range b.services {
		if slices.ContainsFunc(s.slices, func(l *endpointSlice) bool { return slices.ContainsFunc(l.endpoints, turned) }) {
			b.touch(s)
		}
	}
}
